"""Parts d and q: both services on the device with models of real shapes.

Part q is as short as it can be: tokens a second with the default flags, and without graphs and overlap; the greedy tokens of
both, which have to be the same; and swap. Part d has every way: with overlap and without, fronts and none, K and V in 8 bits
and in 4 beside a tail, two ranks where there are two devices, and a model with chunks, whose layers are in groups.

A step's time is what passes between two tokens while all sequences decode, as the client sees it. Of it, the engine says what
the device computed and what waited for the cache service, in a load of its own, because asking costs the engine's loop; what is
left is the host's own. Tokens a second are of the whole load, prompts included. Swap is forced by a pool that holds half of the
sequences.
"""

import asyncio
import dataclasses
import statistics
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import Reply, ask_all, both_services, step_seconds
from tests.gpu.checks import Check, text_of
from tests.gpu.random_model import LLAMA_1B, QWEN3_06B, TINY, Shape, write_family, write_model
from tests.gpu.same_tokens import Output, judge, outputs_of

_PROMPT_TOKENS = 128
_MOST_CACHE_WAIT = 0.03  # of a step
# Each engine that is started here takes some 12 s of a host: imports, weights, kernels from Triton's cache, and three graphs of
# each of 27 batch sizes, whose capture is the lesser part. So each flag is taken off the way before it, not off the default:
# nine engines say what all of it gains, and a tenth does where there are two devices.
_DEFAULT = ("--graphs",)
_PLAIN = ("--no-graphs", "--no-overlap")
_WAYS = (_DEFAULT, ("--no-overlap", "--graphs"), _PLAIN)
# At the largest size alone. 4 bits come with a tail of tokens in full, in blocks of a group of their own.
_OTHER_WAYS = (("--fronts", "0"), ("--kv-dtype", "int8"), ("--kv-dtype", "int4"))
_TWO_RANKS = ("--tensor-parallel", "2")


def run(is_dry: bool) -> Iterator[Check]:
    """A rehearsal serves a tiny model on the CPU. A second shape has the default flags alone: its kernels are other ones."""
    sizes, new_tokens = ((1, 4), 48) if is_dry else ((1, 16, 64, 256), 128)
    others = (*_OTHER_WAYS, *((_TWO_RANKS,) if is_dry or torch.cuda.device_count() > 1 else ()))
    device = "cpu" if is_dry else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        shape = TINY if is_dry else LLAMA_1B
        model = write_model(Path(folder), shape, device)
        for ways in (*_WAYS, *others):
            of_way = sizes if ways in _WAYS else sizes[-1:]
            name = f"serve_{shape.name}{_label(ways)}"
            yield from _guarded(name, partial(_serve, model, shape, device, of_way, new_tokens, ways, {}))
        if not is_dry:
            model = write_model(Path(folder), QWEN3_06B, device)
            name = f"serve_{QWEN3_06B.name}{_label(_DEFAULT)}"
            yield from _guarded(name, partial(_serve, model, QWEN3_06B, device, sizes, new_tokens, _DEFAULT, {}))
        chunked = write_family(Path(folder), "llama4_text")
        shape = dataclasses.replace(TINY, name="chunks")
        yield from _guarded("serve_chunks", partial(_serve, chunked, shape, device, sizes[-1:], new_tokens, _DEFAULT, {}))


def run_first_tokens(is_dry: bool) -> Iterator[Check]:
    """The default flags, the same without graphs and overlap, whether both give the same tokens, and swap."""
    sizes, new_tokens = ((1, 4), 48) if is_dry else ((1, 64, 256), 128)
    device, shape = ("cpu", TINY) if is_dry else ("cuda", LLAMA_1B)
    outputs: dict[tuple[str, ...], list[Output]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape, device)
        for ways in (_DEFAULT, _PLAIN):
            name = f"first_tokens{_label(ways)}"
            yield from _guarded(name, partial(_serve, model, shape, device, sizes, new_tokens, ways, outputs))
        yield _same_tokens(f"same_tokens_{shape.name}", outputs)
        yield from _guarded(f"swap_{shape.name}", partial(_swap, model, shape, device))


def _same_tokens(name: str, outputs: dict[tuple[str, ...], list[Output]]) -> Check:
    if missing := [_label(ways) for ways in (_DEFAULT, _PLAIN) if ways not in outputs]:
        return Check(name, False, note=f"no tokens of {' and '.join(missing)}")
    return judge(name, outputs[_DEFAULT], outputs[_PLAIN])


def _guarded(name: str, measure: Callable[[], Coroutine[Any, Any, list[Check]]]) -> list[Check]:
    try:
        return asyncio.run(measure())
    except Exception as failure:  # a service that does not start; its log lies beside the results
        traceback.print_exc()
        return [Check(name, False, note=text_of(failure))]


async def _swap(model: Path, shape: Shape, device: str) -> list[Check]:
    """More sequences than the pool holds: they go to the host tier and come back, and all end."""
    num_seqs, new_tokens = 8, 96
    blocks = 4 * -(-(_PROMPT_TOKENS + new_tokens) // 16)  # for half of them
    cache_flags = ("--device", device, "--num-pools", "1", "--num-blocks", str(blocks), "--num-host-blocks", str(4 * blocks))
    flags = ("--device", device, "--model", str(model), "--dtype", "bfloat16", "--preemption", "swap", "--policy", "fcfs",
             "--max-sequences", str(num_seqs))  # fmt: skip
    async with both_services(*flags, cache_flags=cache_flags) as (client, _):
        await _load(client, shape, num_seqs, new_tokens)
        stats = await client.stats()
    figures = {"swapped_out": stats.num_swapped_out, "steps": stats.num_steps}
    note = "" if stats.num_swapped_out else "no sequence was swapped: the pool was not short"
    return [Check(f"swap_{shape.name}", stats.num_swapped_out > 0, figures, note)]


def _label(ways: tuple[str, ...]) -> str:
    return "".join(ways)[1:].replace("--", "-")


async def _serve(
    model: Path,
    shape: Shape,
    device: str,
    sizes: tuple[int, ...],
    new_tokens: int,
    ways: tuple[str, ...],
    outputs: dict[tuple[str, ...], list[Output]],
) -> list[Check]:
    """outputs: gets the tokens of the two ways that are compared."""
    pool = "64MiB" if device == "cpu" else "24GiB"
    cache_flags = ("--device", device, "--num-pools", "1", "--pool-memory", pool, "--max-sequences", "512")
    flags = ("--device", device, "--model", str(model), "--dtype", "bfloat16", "--max-sequences", "256", *ways)
    async with both_services(*flags, cache_flags=cache_flags) as (client, _):
        await _load(client, shape, 2, 4)  # kernels are compiled with their first use
        if ways in (_DEFAULT, _PLAIN):
            outputs[ways] = await outputs_of(client, shape.vocab_size, is_told=ways == _PLAIN)
        return [check async for check in _by_size(client, shape, sizes, new_tokens, _label(ways))]


async def _by_size(
    client: AsyncEngineClient, shape: Shape, sizes: tuple[int, ...], new_tokens: int, label: str
) -> AsyncIterator[Check]:
    for size in sizes:
        await _load(client, shape, size, 8)  # and for each batch size
        begin = time.perf_counter()
        replies = await _load(client, shape, size, new_tokens)
        seconds = time.perf_counter() - begin
        splits: list[tuple[float, float]] = []
        watching = asyncio.create_task(_watch(client, size, splits))
        await _load(client, shape, size, new_tokens)
        watching.cancel()
        firsts = [reply.first_token_seconds * 1000 for reply in replies]
        wait = statistics.median(wait / total for total, wait in splits) if splits else 0.0
        computed = statistics.median(total - wait for total, wait in splits) if splits else 0.0
        figures = {
            "tokens_per_s": size * new_tokens / seconds,
            "step_ms": step_seconds(replies) * 1000,
            "computed_ms": computed,
            "cache_wait_share": wait,
            "time_to_first_token_p50_ms": statistics.median(firsts),
            "all_begun_ms": max(firsts),
        }
        note = (
            "" if wait <= _MOST_CACHE_WAIT else f"misses the aim: at most {_MOST_CACHE_WAIT:.0%} of a step wait for the cache"
        )
        if not splits:
            note = "no step of the whole batch was seen: it was over too soon"
        yield Check(f"serve_{shape.name}{label}_{size}", True, figures, note)


async def _load(client: AsyncEngineClient, shape: Shape, size: int, new_tokens: int) -> list[Reply]:
    """So many requests at once, none with a prefix of another."""
    rng = np.random.default_rng()
    prompts = [rng.integers(3, shape.vocab_size, _PROMPT_TOKENS).astype(np.int32) for _ in range(size)]
    return await ask_all(client, prompts, [new_tokens] * size)


async def _watch(client: AsyncEngineClient, size: int, splits: list[tuple[float, float]]) -> None:
    """Milliseconds of iterations in which the whole batch decodes, and of their wait for the cache service."""
    last = 0
    while True:
        plan = await client.iteration_plan()
        if plan.step_id != last and len(plan.decodes) == size and not plan.prefills:
            last = plan.step_id
            splits.append((plan.duration_ms, plan.cache_wait_ms))
        await asyncio.sleep(0.005)
