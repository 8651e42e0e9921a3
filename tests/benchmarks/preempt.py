"""A load that a pool has room for a third of, with the 32 M parameter Llama: what swapping saves over computing again.

The same requests, new ones every round, with --preemption recompute, swap and auto; the three take turns, so that all that the
machine does meets all of them. With prefix caching what a preempted sequence had committed may still be there, in the pool or
in the host tier, when it starts again; without it all of it is computed again.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tests.benchmarks.both_services import ask_all, both_services
from tests.benchmarks.llama import build_folder, random_prompt

_WAYS = ("recompute", "swap", "auto")
_NUM_REQUESTS, _PROMPT_LEN, _NUM_NEW = 12, 120, 72
_NUM_BLOCKS, _NUM_HOST_BLOCKS = 49, 400  # of 16 tokens; all requests together come to 144
_NUM_ROUNDS = 3


def figures() -> Iterator[dict[str, object]]:
    for has_caching in (True, False):
        yield asyncio.run(_measure(has_caching))


async def _measure(has_caching: bool) -> dict[str, object]:
    sizes = ("--num-blocks", str(_NUM_BLOCKS), "--num-host-blocks", str(_NUM_HOST_BLOCKS))
    cache_flags = sizes if has_caching else (*sizes, "--no-prefix-caching")
    took: dict[str, list[float]] = {way: [] for way in _WAYS}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        build_folder(Path(folder))
        clients = {}
        for way in _WAYS:
            services = both_services("--model", folder, "--threads", "1", "--preemption", way, cache_flags=cache_flags)
            clients[way], _ = await stack.enter_async_context(services)
        for round_idx in tqdm(range(_NUM_ROUNDS + 1), desc="preempt", file=sys.stderr):
            rng = np.random.default_rng(round_idx)
            prompts = [random_prompt(rng, _PROMPT_LEN) for _ in range(_NUM_REQUESTS)]
            for place in range(len(_WAYS)):
                way = _WAYS[(round_idx + place) % len(_WAYS)]
                begin = time.perf_counter()
                await ask_all(clients[way], prompts, [_NUM_NEW] * _NUM_REQUESTS)
                took[way].append(time.perf_counter() - begin)
        stats = {way: await client.stats() for way, client in clients.items()}
    seconds = {way: np.array(times[1:]) for way, times in took.items()}  # the first warms all up
    return {
        "prefix_caching": has_caching,
        "requests": _NUM_REQUESTS,
        "blocks_wanted_over_pool": round(_NUM_REQUESTS * (_PROMPT_LEN + _NUM_NEW) / 16 / (_NUM_BLOCKS - 1), 2),
        "seconds": {way: round(float(np.median(times)), 3) for way, times in seconds.items()},
        "baseline": "--preemption recompute",
        "swap_ratio": round(float(np.median(seconds["recompute"] / seconds["swap"])), 3),
        "auto_ratio": round(float(np.median(seconds["recompute"] / seconds["auto"])), 3),
        "preemptions": {way: stats[way].num_preemptions for way in _WAYS},
        "swapped_out": {way: stats[way].num_swapped_out for way in _WAYS},
        "prompt_tokens_computed_over_least": {
            way: round(stats[way].num_prefill_tokens / ((_NUM_ROUNDS + 1) * _NUM_REQUESTS * _PROMPT_LEN), 3) for way in _WAYS
        },
    }
