"""64 requests, at most 16 at a time, and one alone, with the 32 M parameter Llama: both services against transformers.

Same weights, the same prompts (new ones every round), greedy, one thread each for the forward pass; they take turns. First in
float32, as the baseline and the bound are, then with products of 8-bit integers against the same two.
The baseline pads groups of 16 in order of arrival and runs each to its longest member; of what it generates, the tokens that
were asked for count. Ours includes both gRPC services and streaming every chunk to the client. The bound is bare_products.py's,
for the batches that the engine really computed in the round, measured right after it. The share of the iterations that waited
for the cache service is of the last 256 of each round.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.bare_products import BareProducts, Step
from tests.benchmarks.both_services import ask, ask_all, both_services
from tests.benchmarks.llama import build_folder, generate, random_prompt

_NUM_REQUESTS, _MOST_RUNNING, _NUM_THREADS = 64, 16, 1
_NUM_ROUNDS, _NUM_LONE_ROUNDS = 3, 5
_LONE_PROMPT, _LONE_NEW = 128, 128


class _Aims(NamedTuple):
    share_of_bound: float
    lone_ratio: float


_AIMS = {"float32": _Aims(0.7, 1.4), "int8": _Aims(1.1, 2.5)}


def figures() -> Iterator[dict[str, object]]:
    torch.set_num_threads(_NUM_THREADS)
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        model = build_folder(Path(folder, "model"))
        record = Path(folder, "steps")
        recorder = ("tests.benchmarks.recording_engine", str(record))
        flags = ("--model", f"{folder}/model", "--threads", str(_NUM_THREADS), "--max-sequences", str(_MOST_RUNNING))
        found = []
        for dtype, aims in _AIMS.items():
            async with both_services(*flags, "--dtype", dtype, engine=recorder) as (client, _):
                found += [await _serve(client, model, record, dtype, aims), await _lone(client, model, dtype, aims)]
        return found


async def _serve(client: AsyncEngineClient, model: torch.nn.Module, record: Path, dtype: str, aims: _Aims) -> dict[str, object]:
    products = BareProducts()
    ours: list[float] = []
    theirs: list[float] = []
    bounds: list[float] = []
    waits: list[float] = []
    for round_idx in tqdm(range(_NUM_ROUNDS + 1), desc="serve", file=sys.stderr):
        rng = np.random.default_rng(round_idx)
        num_requests = _NUM_REQUESTS if round_idx else _MOST_RUNNING  # the first warms all three up
        prompts = [random_prompt(rng, length) for length in rng.integers(16, 257, num_requests)]
        nums_new = rng.integers(8, 129, num_requests).tolist()
        num_before = len(_steps(record))
        begin = time.perf_counter()
        await ask_all(client, prompts, nums_new)
        ours.append(sum(nums_new) / (time.perf_counter() - begin))
        waits.append((await client.stats()).cache_wait_share)
        steps = _steps(record)[num_before:]
        assert sum(step.num_tokens for step in steps) == sum(map(len, prompts)) + sum(nums_new) - num_requests
        bounds.append(sum(nums_new) / products.seconds(steps))
        begin = time.perf_counter()
        for first in range(0, num_requests, _MOST_RUNNING):
            group = slice(first, first + _MOST_RUNNING)
            generate(model, prompts[group], max(nums_new[group]))
        theirs.append(sum(nums_new) / (time.perf_counter() - begin))
    measured, baseline, bound = (np.array(column[1:]) for column in (ours, theirs, bounds))
    return {
        "dtype": dtype,
        "requests": _NUM_REQUESTS,
        "running": _MOST_RUNNING,
        "threads": _NUM_THREADS,
        "per_second": round(float(np.median(measured)), 1),
        "baseline": "transformers generate, padded groups of 16",
        "baseline_per_second": round(float(np.median(baseline)), 1),
        "ratio": round(float(np.median(measured / baseline)), 3),
        "ratio_aim": 1.8,
        "bound": "bare matrix products of the same batches, in float32",
        "bound_per_second": round(float(np.median(bound)), 1),
        "share_of_bound": round(float(np.median(measured / bound)), 3),
        "share_of_bound_aim": aims.share_of_bound,
        "step_ms": round(float(sum(nums_new) / measured[-1] / len(steps) * 1e3), 2),
        "cache_wait_share": round(float(np.median(waits[1:])), 4),
        "cache_wait_share_aim": 0.03,
    }


def _steps(record: Path) -> list[Step]:
    """All forward passes so far."""
    return [Step(*map(int, line.split())) for line in record.read_text().splitlines()]


async def _lone(client: AsyncEngineClient, model: torch.nn.Module, dtype: str, aims: _Aims) -> dict[str, object]:
    ours: list[float] = []
    theirs: list[float] = []
    for round_idx in range(_NUM_LONE_ROUNDS + 1):
        prompt = random_prompt(np.random.default_rng(1000 + round_idx), _LONE_PROMPT)
        ours.append(_LONE_NEW / (await ask(client, prompt, _LONE_NEW)).seconds)
        begin = time.perf_counter()
        generate(model, [prompt], _LONE_NEW)
        theirs.append(_LONE_NEW / (time.perf_counter() - begin))
    measured, baseline = np.array(ours[1:]), np.array(theirs[1:])
    return {
        "dtype": dtype,
        "requests": 1,
        "prompt_tokens": _LONE_PROMPT,
        "new_tokens": _LONE_NEW,
        "threads": _NUM_THREADS,
        "per_second": round(float(np.median(measured)), 1),
        "baseline": "transformers generate",
        "baseline_per_second": round(float(np.median(baseline)), 1),
        "ratio": round(float(np.median(measured / baseline)), 3),
        "ratio_aim": aims.lone_ratio,
    }
