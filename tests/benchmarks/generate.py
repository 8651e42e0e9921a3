"""Tokens a second of 16 requests with the demo model: both services, against transformers' generate on a padded batch.

The same prompts, the same number of greedy tokens, one thread each; the two take turns. Ours includes both gRPC services and
streaming every chunk. The cache is not looked up: every round computes its prompts, as the baseline does.
"""

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.benchmarks.both_services import ask_all, both_services
from tests.benchmarks.llama import generate

_NUM_REQUESTS, _NUM_NEW, _NUM_ROUNDS = 16, 64, 5


def figures() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)
    ours, theirs = asyncio.run(_take_turns())
    yield {
        "requests": _NUM_REQUESTS,
        "new_tokens": _NUM_NEW,
        "per_second": round(float(np.median(ours)), 1),
        "baseline": "transformers generate, padded batch",
        "baseline_per_second": round(float(np.median(theirs)), 1),
        "ratio": round(float(np.median(ours / theirs)), 3),
    }


async def _take_turns() -> tuple[np.ndarray, np.ndarray]:
    """Tokens a second of each round; prompts of 16 to 256 token ids, all different from their first token on."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(300, 1000, length).astype(np.int32) for length in np.linspace(16, 256, _NUM_REQUESTS, dtype=int)]
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32).eval()
    times = []
    async with both_services("--model", str(DEMO_MODEL_DIR), "--threads", "1") as (client, _):
        for _ in range(_NUM_ROUNDS + 1):
            begin = time.perf_counter()
            await ask_all(client, prompts, [_NUM_NEW] * _NUM_REQUESTS, skip_look_up=True)
            middle = time.perf_counter()
            generate(model, prompts, _NUM_NEW)
            times.append((middle - begin, time.perf_counter() - middle))
    ours, theirs = _NUM_REQUESTS * _NUM_NEW / np.array(times[1:]).T  # the first round warms both up
    return ours, theirs
