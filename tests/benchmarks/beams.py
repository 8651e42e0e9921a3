"""Tokens a second of beam searches with the demo model: both services, against transformers' generate on one batch.

The same prompts, all of one length, and the same number of tokens in every list, one thread each; the two take turns. What is
counted are the tokens that are told, of which a search with several beams computes as many times more.
"""

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kvkeeper.client import AsyncEngineClient, BeamSearch, GenerateOptions, Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.benchmarks.both_services import both_services

_NUM_BEAMS, _PROMPT_LEN, _NUM_NEW, _NUM_ROUNDS = 4, 64, 48, 5


def figures() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32).eval()
    async with both_services("--threads", "1") as (client, _):
        return [await _compare(client, model, num_requests) for num_requests in (1, 4)]


async def _compare(client: AsyncEngineClient, model: torch.nn.Module, num_requests: int) -> dict[str, object]:
    rng = np.random.default_rng(num_requests)
    prompts = rng.integers(300, 1000, (num_requests, _PROMPT_LEN)).astype(np.int32)
    ours, theirs = [], []
    for _ in range(_NUM_ROUNDS + 1):
        begin = time.perf_counter()
        await asyncio.gather(*(_search(client, prompt) for prompt in prompts))
        ours.append(num_requests * _NUM_NEW / (time.perf_counter() - begin))
        theirs.append(_their_rate(model, torch.from_numpy(prompts.astype(np.int64))))
    return {
        "requests": num_requests,
        "beams": _NUM_BEAMS,
        "new_tokens": _NUM_NEW,
        "per_second": round(float(np.median(ours[1:])), 1),  # the first round warms both up
        "baseline": "transformers generate, one batch",
        "baseline_per_second": round(float(np.median(theirs[1:])), 1),
        "ratio": round(float(np.median(np.array(ours[1:]) / np.array(theirs[1:]))), 3),
    }


async def _search(client: AsyncEngineClient, prompt: np.ndarray) -> None:
    sampling = Sampling(max_tokens=_NUM_NEW, repetition_penalty=1.0, ignore_eos=True)
    options = GenerateOptions(beam_search=BeamSearch(_NUM_BEAMS), sampling=sampling, skip_look_up=True)
    async with client.generate(prompt, options) as chunks:
        assert sum([len(chunk.token_ids) async for chunk in chunks]) == _NUM_NEW


def _their_rate(model: torch.nn.Module, prompts: torch.Tensor) -> float:
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            num_beams=_NUM_BEAMS,
            max_new_tokens=_NUM_NEW,
            min_new_tokens=_NUM_NEW,
            pad_token_id=0,
        )
    return len(prompts) * _NUM_NEW / (time.perf_counter() - begin)
