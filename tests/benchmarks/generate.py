"""Tokens a second of 16 requests with the demo model: both services, against transformers' generate on a padded batch.

The same prompts, the same number of greedy tokens, one thread each; the two take turns. Ours includes tokenising, both
gRPC services and streaming every chunk; the baseline gets its ids ready-made.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import kvkeeper.engine_service
from kvkeeper.client import AsyncEngineClient, GenerateOptions, Sampling
from tests.benchmarks.processes import process

_NUM_REQUESTS, _NUM_NEW, _NUM_ROUNDS = 16, 64, 5
_MODEL = f"{next(iter(kvkeeper.engine_service.__path__))}/demo_model"


def figures() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)
    ours, theirs = asyncio.run(_take_turns())
    yield {
        "requests": _NUM_REQUESTS,
        "new_tokens": _NUM_NEW,
        "per_second": round(float(np.median(ours)), 1),
        "baseline": "transformers generate, padded batch",
        "baseline_per_second": round(float(np.median(theirs)), 1),
        "ratio": round(float(np.median(np.array(ours) / np.array(theirs))), 3),
    }


def _prompts() -> list[np.ndarray]:
    """[num_requests] prompts of 16 to 256 token ids, all different from their first token on."""
    rng = np.random.default_rng(0)
    return [rng.integers(300, 1000, length).astype(np.int32) for length in np.linspace(16, 256, _NUM_REQUESTS, dtype=int)]


async def _take_turns() -> tuple[list[float], list[float]]:
    model = AutoModelForCausalLM.from_pretrained(_MODEL, dtype=torch.float32).eval()
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        cache, engine = f"unix:{folder}/cache", f"unix:{folder}/engine"
        engine_flags = ("--listen", engine, "--cache", cache, "--model", _MODEL, "--threads", "1")
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder),
            process("-m", "kvkeeper.engine_service", *engine_flags),
            AsyncEngineClient(engine) as client,
        ):
            for round_idx in range(_NUM_ROUNDS + 1):
                mine, other = await _ours(client), _theirs(model)
                if round_idx:  # the first warms both up
                    ours.append(mine)
                    theirs.append(other)
    return ours, theirs


async def _ours(client: AsyncEngineClient) -> float:
    """Tokens a second. The cache is not looked up: every round computes its prompts, as the baseline does."""
    begin = time.perf_counter()
    counts = await asyncio.gather(*(_stream(client, prompt) for prompt in _prompts()))
    return sum(counts) / (time.perf_counter() - begin)


async def _stream(client: AsyncEngineClient, prompt: np.ndarray) -> int:
    sampling = Sampling(max_tokens=_NUM_NEW, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    count = 0
    async with client.generate(prompt, GenerateOptions(sampling=sampling, skip_look_up=True)) as chunks:
        async for chunk in chunks:
            count += len(chunk.token_ids)
    return count


def _theirs(model: torch.nn.Module) -> float:
    prompts = _prompts()
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=False, max_new_tokens=_NUM_NEW, min_new_tokens=_NUM_NEW, pad_token_id=0
        )
    return _NUM_REQUESTS * _NUM_NEW / (time.perf_counter() - begin)
