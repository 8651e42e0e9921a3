"""Long prompts beside streams: two engines that each compute whole requests, against one for prompts and one for the rest.

Four streams decode in one engine while prompts of 1,536 tokens come, two at a time, each with 16 new tokens. In the first case
the prompts go to both engines by turns; in the second one engine computes all prompts, and the other takes their blocks. One
thread each, the same model of 32 M parameters, new prompts every time. Of the streams the gaps between tokens count.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import Reply, ask
from tests.benchmarks.llama import build_folder, random_prompt
from tests.benchmarks.processes import process

_NUM_STREAMS, _NUM_STREAM_TOKENS = 4, 400
_PROMPT_TOKENS, _PROMPT_NEW, _NUM_AT_ONCE = 1536, 16, 2


def figures() -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        build_folder(Path(folder, "model"))
        quiet = asyncio.run(_measure(folder, has_roles=False, has_prompts=False))
        for has_roles in (False, True):
            case = "one for prompts, one for the rest" if has_roles else "both compute whole requests"
            found = asyncio.run(_measure(folder, has_roles=has_roles, has_prompts=True))
            yield {"case": case, "streams": _NUM_STREAMS, "prompt_tokens": _PROMPT_TOKENS, **found, "quiet": quiet}


async def _measure(folder: str, *, has_roles: bool, has_prompts: bool) -> dict[str, object]:
    async with _engines(folder, has_roles=has_roles) as clients:
        rng = np.random.default_rng(1)
        await asyncio.gather(*(ask(client, random_prompt(rng, 64), 8) for client in clients))  # warms them up
        streams = [
            asyncio.create_task(ask(clients[0], random_prompt(rng, 64), _NUM_STREAM_TOKENS)) for _ in range(_NUM_STREAMS)
        ]
        replies: list[Reply] = []
        begin = time.perf_counter()
        if has_prompts:
            targets = itertools.cycle(clients[:1] if has_roles else clients)
            askers = [_ask_on(targets, rng, streams, replies) for _ in range(_NUM_AT_ONCE)]
            await asyncio.gather(*askers)
        seconds = time.perf_counter() - begin
        gaps = np.concatenate([stream.gaps for stream in await asyncio.gather(*streams)]) * 1e3
        stats = await clients[0].stats()
    p50, p99 = np.percentile(gaps, (50, 99))
    found: dict[str, object] = {"gap_p50_ms": round(float(p50), 2), "gap_p99_ms": round(float(p99), 2)}
    found["gap_longest_ms"] = round(float(gaps.max()), 2)
    if has_prompts:
        firsts = [reply.first_token_seconds for reply in replies]
        found |= {
            "prompts_per_second": round(len(replies) / seconds, 2),
            "first_token_p50_ms": round(float(np.median(firsts)) * 1e3, 1),
        }
        found |= {"remote": stats.num_remote_prefills, "failed_remote": stats.num_failed_remote_prefills}
    return found


@asynccontextmanager
async def _engines(folder: str, *, has_roles: bool) -> AsyncIterator[Sequence[AsyncEngineClient]]:
    """Clients of both engines; the first one's decodes."""
    cache, helper, decoder = (f"unix:{folder}/{name}" for name in ("cache", "helper", "decoder"))
    common = ("--cache", cache, "--model", f"{folder}/model", "--threads", "1")
    roles = (("--role", "prefill"), ("--role", "decode", "--prefill", helper)) if has_roles else ((), ())
    async with AsyncExitStack() as stack:
        flags = ("--listen", cache, "--runtime-dir", folder)
        await stack.enter_async_context(process("-m", "kvkeeper.cache_service", *flags))
        for address, role in zip((helper, decoder), roles, strict=True):
            await stack.enter_async_context(process("-m", "kvkeeper.engine_service", "--listen", address, *common, *role))
        addresses = (decoder,) if has_roles else (decoder, helper)
        yield [await stack.enter_async_context(AsyncEngineClient(address)) for address in addresses]


async def _ask_on(
    targets: Iterator[AsyncEngineClient],
    rng: np.random.Generator,
    streams: Sequence[asyncio.Task[Reply]],
    replies: list[Reply],
) -> None:
    """One prompt after the other, while a stream goes on."""
    while not all(stream.done() for stream in streams):
        replies.append(await ask(next(targets), random_prompt(rng, _PROMPT_TOKENS), _PROMPT_NEW))
