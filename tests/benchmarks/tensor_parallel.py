"""A decoding step on one rank and on two, and what the second one costs: the sums over the ranks.

One process with all threads against two with half of them each, both with a service of their own, asked in turns. The sums are
timed by themselves between two processes, as many and as large as a step has; what they leave unexplained is told, too: the
message of a step, the answer to it, and that each rank waits for the slower one.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import torch

from kvkeeper.engine_service.ranks.meeting import Meeting
from tests.benchmarks.both_services import ask_all, both_services
from tests.benchmarks.llama import build_folder, random_prompt
from tests.benchmarks.summing_rank import HIDDEN, NUM_ROUNDS, SHAPES, sum_all

_NUM_PROMPT, _NUM_NEW, _NUM_TURNS = 64, 48, 5
_NUM_LAYERS = 8
_NUM_SUMS = 2 * _NUM_LAYERS
_NUM_ROWS = (1, 16)


def figures() -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        build_folder(Path(folder))
        took, sums = asyncio.run(_measure(folder))
    for rows in _NUM_ROWS:
        one, two = (float(np.median(took[ranks, rows])) for ranks in (1, 2))
        of_sums = _NUM_SUMS * float(np.median(sums[rows]))
        yield {
            "rows": rows,
            "one_rank_step_ms": round(one * 1e3, 2),
            "two_ranks_step_ms": round(two * 1e3, 2),
            "two_of_one": round(two / one, 2),
            "sums_of_a_step_ms": round(of_sums * 1e3, 2),
            "unexplained_ms": round((two - one - of_sums) * 1e3, 2),
        }


async def _measure(folder: str) -> tuple[dict[tuple[int, int], list[float]], dict[int, list[float]]]:
    """Seconds of a step by ranks and rows, and of one sum by rows."""
    num_threads = os.cpu_count() or 2
    took: dict[tuple[int, int], list[float]] = {}
    sums: dict[int, list[float]] = {}
    rng = np.random.default_rng(0)
    async with AsyncExitStack() as stack:
        clients = {}
        for ranks in (1, 2):
            flags = "--model", folder, "--tensor-parallel", str(ranks), "--threads", str(max(num_threads // ranks, 1))
            cache = "--pool-memory", "64MiB", "--num-pools", "1"
            clients[ranks], _ = await stack.enter_async_context(both_services(*flags, cache_flags=cache))
        for _ in range(_NUM_TURNS):
            for rows in _NUM_ROWS:
                prompts = [random_prompt(rng, _NUM_PROMPT) for _ in range(rows)]
                for ranks, client in clients.items():
                    replies = await ask_all(client, prompts, [_NUM_NEW] * rows)
                    seconds = np.median([reply.seconds - reply.first_token_seconds for reply in replies])
                    took.setdefault((ranks, rows), []).append(float(seconds) / (_NUM_NEW - 1))
            for rows, seconds in (await asyncio.to_thread(_sums)).items():
                sums.setdefault(rows, []).append(seconds)
    return took, sums


def _sums() -> dict[int, float]:
    """Seconds of one sum by rows, between this process and another one."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        with subprocess.Popen([sys.executable, "-m", "tests.benchmarks.summing_rank", str(path)]):
            meeting = Meeting(2)
            meeting.join(path, 0, torch.device("cpu"), 60.0)
            found = {}
            for rows, part in ((rows, torch.ones(rows, HIDDEN)) for rows in SHAPES):
                sum_all(meeting, part)
                began = time.perf_counter()
                sum_all(meeting, part)
                found[rows] = (time.perf_counter() - began) / NUM_ROUNDS
    return found
