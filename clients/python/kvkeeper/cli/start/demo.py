"""`kvkeeper demo`: what the two processes are for, in a minute.

Both services run as processes of their own, on Unix sockets in a temporary folder: prompts that share a long prefix, one
request forked into three continuations, then the engine is killed and a new one finds what the dead one computed, and then
the cache service is killed and the next one finds the memory.
"""

import argparse
import asyncio
import inspect
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvkeeper.cli.console.problems import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, complain
from kvkeeper.cli.console.tables import facts, table
from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, GenerateOptions, KvkeeperError, Sampling
from kvkeeper.common.service.sizes import size

T = TypeVar("T")

_START_S = 120.0  # a slow disk and a cold torch
_GRACE_S = 10.0
_MEMORY, _POOL_MEMORY = "/dev/shm", "32MiB"  # containers have 64 MiB there
_SETTLE_LOOKS, _SETTLE_LOOK_S = 40, 0.05
_QUESTIONS = ("wrap_all", "indent_lines", "count_words", "shorten_title", "split_paragraphs", "strip_margin")
_SAMPLING = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of one request, and how fast it came."""

    name: str
    texts: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    copied_blocks: int
    first_token_ms: float
    tokens_per_second: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__


def run(_: argparse.Namespace) -> int:
    from kvkeeper.common.service.process import StartError
    from kvkeeper.engine_service.preflight import check_packages

    try:
        check_packages()
    except StartError as error:
        complain(str(error), reason="NOT_STARTED", is_json=False)
        return EXIT_FAILED
    return asyncio.run(_until_done())


async def _until_done() -> int:
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    temporary = tempfile.TemporaryDirectory
    with temporary(prefix="kvkeeper-demo-") as folder, temporary(prefix="kvkeeper-demo-", dir=_MEMORY) as memory:
        try:
            return await _show(f"unix:{folder}/cache.sock", f"unix:{folder}/engine.sock", folder, memory)
        except (_ServiceEnded, KvkeeperError, TimeoutError) as error:
            print(f"kvkeeper: the demo could not go on: {error}", file=sys.stderr)
            return EXIT_FAILED
        except asyncio.CancelledError:
            print("kvkeeper: interrupted; both services have ended", file=sys.stderr)
            return EXIT_INTERRUPTED


async def _show(cache: str, engine: str, folder: str, memory: str) -> int:
    print("Starting the cache service and an engine as two processes ...", flush=True)
    print("The model is a toy that has learned a little Python; a real one: kvkeeper up --model smollm2", flush=True)
    cache_flags = ("--runtime-dir", folder, "--memory-dir", memory, "--num-pools", "1", "--pool-memory", _POOL_MEMORY)
    async with _service("cache", cache, *cache_flags) as first_cache:
        async with _service("engine", engine, "--cache", cache) as first_engine, AsyncEngineClient(engine) as client:
            cold = [await _ask(client, _QUESTIONS[0])]
            _print_answers("1. One prompt with a long prefix, on an empty cache", cold)
            warm = await asyncio.gather(*(_ask(client, name) for name in _QUESTIONS))
            _print_answers("2. Six prompts at once that share that prefix", warm)
            forked = await _ask(client, _QUESTIONS[0], n=3)
            _print_answers("3. One prompt, three continuations: computed once, then forked", [forked])
            print(f"   blocks copied on write so that they could part: {forked.copied_blocks}")
            for idx, text in enumerate(forked.texts):
                print(f"   [{idx}] {_one_line(text)}")
            print("\nKilling the engine with SIGKILL and starting a new one ...", flush=True)
            first_engine.kill()
            await first_engine.ended
        async with _service("engine", engine, "--cache", cache) as second_engine, AsyncEngineClient(engine) as client:
            again = await asyncio.gather(*(_ask(client, name) for name in _QUESTIONS))
            _print_answers("4. The same six prompts: the dead engine's prefix cache is still there", again)
            await _print_pool(cache)
            print("\nKilling the cache service with SIGKILL and starting a new one ...", flush=True)
            first_cache.kill()
            await first_cache.ended
            async with _service("cache", cache, *cache_flags):
                kept = await asyncio.gather(*(_ask(client, name) for name in _QUESTIONS))
                _print_answers("5. The same six prompts: the memory outlived the cache service", kept)
                await second_engine.end(_GRACE_S)  # before the cache service, which waits for its session to be closed
    print()
    hits = [_print_hits("engine", warm, again), _print_hits("cache service", warm, kept)]
    return EXIT_OK if all(hits) else EXIT_FAILED


def _print_hits(what: str, before: Sequence[Answer], after: Sequence[Answer]) -> int:
    """Returns the number of cached tokens."""
    hits = sum(answer.cached_tokens for answer in after)
    same = all(first.texts == second.texts for first, second in zip(before, after, strict=True))
    line = f"With the new {what}, {hits:,} of {sum(a.prompt_tokens for a in after):,} prompt tokens were in the cache"
    print(line + (", and the answers are word for word the same." if same else "."))
    return hits


async def _ask(client: AsyncEngineClient, name: str, n: int = 1) -> Answer:
    """Streams one request: greedy for one continuation, sampled for several."""
    sampling = _SAMPLING if n == 1 else Sampling(max_tokens=24, temperature=0.8, seed=7, ignore_eos=True)
    prompt = f"{_prefix()}\n\ndef {name}(text):\n"
    texts = [""] * n
    first: float | None = None
    begin = time.perf_counter()
    async with client.generate(prompt, GenerateOptions(n=n, sampling=sampling)) as chunks:
        async for chunk in chunks:
            first = first or time.perf_counter()
            texts[chunk.index] += chunk.text
    end = time.perf_counter()
    usage = chunks.usage
    assert usage is not None and first is not None, "a request that ended well has usage and a first token"
    return Answer(
        name,
        tuple(texts),
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.new_tokens,
        usage.copied_blocks,
        (first - begin) * 1e3,
        usage.new_tokens / (end - begin),
    )


def _prefix() -> str:
    """A text that every machine has: the source of a standard module."""
    return inspect.getsource(textwrap)[:3000]


def _print_answers(title: str, replies: Sequence[Answer]) -> None:
    headers = ("prompt", "prompt tokens", "cached", "new", "first token ms", "tokens/s")
    rows = [
        (a.name, a.prompt_tokens, a.cached_tokens, a.new_tokens, round(a.first_token_ms, 1), round(a.tokens_per_second, 1))
        for a in replies
    ]
    print(f"\n{title}\n{textwrap.indent(table(headers, rows), '   ')}", flush=True)


async def _print_pool(cache: str) -> None:
    async with AsyncCacheClient(cache) as client:
        for _ in range(_SETTLE_LOOKS):
            (pool,) = (await client.stats()).pools
            if not pool.num_referenced_blocks + pool.num_fenced_blocks:
                break
            await asyncio.sleep(_SETTLE_LOOK_S)  # the engine's last step, with its releases, follows the last token
    rows = [
        ("blocks", f"{pool.pool.num_blocks - 1:,} of {pool.pool.block_size} tokens, {size(pool.pool.arena_bytes)}"),
        ("free", pool.num_free_blocks),
        ("cached", pool.num_cached_blocks),
        ("in use", pool.num_referenced_blocks),
        ("hit tokens", f"{pool.num_hit_tokens:,} of {pool.num_look_up_tokens:,} looked up"),
        ("forks, copies on write", f"{pool.num_forks}, {pool.num_copies_on_write}"),
    ]
    print(f"\nThe pool, which no engine owns\n{facts(rows, '   ')}")


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 90, placeholder=" ...")


class _ServiceEnded(Exception):
    """A service ended by itself."""


@asynccontextmanager
async def _service(name: str, address: str, *flags: str) -> AsyncIterator[ServiceProcess]:
    """A service that serves when the body begins and has ended after it. Raises _ServiceEnded or TimeoutError."""
    service = await ServiceProcess.start(name, ["--listen", address, "--log-level", "warning", *flags])
    try:
        await asyncio.wait_for(_unless_ended(service, until_serving(address)), _START_S)
        yield service
    finally:
        await asyncio.shield(service.end(_GRACE_S))


async def _unless_ended(service: ServiceProcess, work: Awaitable[T]) -> T:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, service.ended}, return_when=asyncio.FIRST_COMPLETED)
        if service.ended.done():
            raise _ServiceEnded(f"the {service.name} service {service.how_it_ended()}")
        return await task
    finally:
        task.cancel()
