"""Part e: the engine, then the cache service, is killed with SIGKILL while requests run on the device, and started again.

The arena outlives the engine: its successor finds the prompts cached. It does not outlive the cache service: the engine unmaps
the old arena, maps the new one, computes its requests again and sends no token twice.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions, GenerateOptions, KvkeeperError, Sampling
from tests.gpu.checks import Check
from tests.gpu.random_model import LLAMA_1B, TINY, write_model
from tests.support.processes.fleet import Fleet, fleet

_NUM_REQUESTS = 8
_PROMPT_TOKENS = 256
_BLOCK_SIZE = 16


def run(is_dry: bool) -> Iterator[Check]:
    """A rehearsal does it with a tiny model on the CPU."""
    shape, device, new_tokens = (TINY, "cpu", 64) if is_dry else (LLAMA_1B, "cuda", 400)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, shape.vocab_size, _PROMPT_TOKENS).astype(np.int32) for _ in range(_NUM_REQUESTS)]
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape, device)
        yield from asyncio.run(_kill_both(model, device, prompts, new_tokens))


async def _kill_both(model: Path, device: str, prompts: list[np.ndarray], new_tokens: int) -> list[Check]:
    cache_flags: dict[str, Any] = {"device": device, "num_blocks": 1024}
    flags: dict[str, Any] = {"device": device, "dtype": "bfloat16", "block_size": _BLOCK_SIZE, "chunk_size": 512}
    async with fleet(1, cache_flags, model=model, **flags, token_budget=2048) as services:
        undisturbed = await _all_tokens(services, prompts, new_tokens)
        return [
            await _kill_engine(services, prompts, new_tokens),
            await _kill_cache(services, prompts, new_tokens, undisturbed),
            await _audit(services),
        ]


async def _kill_engine(services: Fleet, prompts: list[np.ndarray], new_tokens: int) -> Check:
    async with AsyncEngineClient(services.engine_addresses[0], CallOptions(retry_s=0)) as client:
        streams = [asyncio.create_task(_tokens(client, prompt, new_tokens)) for prompt in prompts]
        await _until_running(client, len(prompts))
        killed = time.perf_counter()
        await services.engines[0].kill()
        ends = await asyncio.gather(*streams, return_exceptions=True)
        told_ms = (time.perf_counter() - killed) * 1000
    await services.start_engine(0)
    restart_ms = (time.perf_counter() - killed) * 1000
    async with AsyncEngineClient(services.engine_addresses[0]) as client:
        await asyncio.gather(*(_tokens(client, prompt, 4) for prompt in prompts))
        cached = (await client.stats()).num_cached_tokens
    expected = len(prompts) * (_PROMPT_TOKENS - _BLOCK_SIZE)  # at least one token is computed
    ok = all(isinstance(end, KvkeeperError) for end in ends) and cached >= expected
    figures = {"clients_told_ms": told_ms, "serving_again_ms": restart_ms, "cached_tokens": cached}
    return Check("engine_killed", ok, figures, "" if ok else f"{expected} cached tokens were expected: {ends}")


async def _kill_cache(services: Fleet, prompts: list[np.ndarray], new_tokens: int, undisturbed: list[list[int]]) -> Check:
    async with AsyncEngineClient(services.engine_addresses[0]) as client:
        streams = [asyncio.create_task(_tokens(client, prompt, new_tokens)) for prompt in prompts]
        await _until_running(client, len(prompts))
        killed = time.perf_counter()
        await services.cache.kill()
        await services.start_cache()
        serving_ms = (time.perf_counter() - killed) * 1000
        await services.engines[0].until("session_opened", 2)
        back_ms = (time.perf_counter() - killed) * 1000
        ends = await asyncio.gather(*streams)
    num_different = sum(end != before for end, before in zip(ends, undisturbed, strict=True))
    ok = all(len(end) == new_tokens for end in ends)
    figures = {"serving_again_ms": serving_ms, "engine_back_ms": back_ms, "different_outputs": num_different}
    note = "an output may differ where two tokens are equally likely to the last bits of bfloat16"
    return Check("cache_service_killed", ok, figures, note if num_different else "")


async def _audit(services: Fleet) -> Check:
    async with AsyncCacheClient(services.cache_address) as cache:
        violations = list((await cache.check_invariants()).violations)
    return Check("pool_is_sound", not violations, note="; ".join(violations))


async def _all_tokens(services: Fleet, prompts: list[np.ndarray], new_tokens: int) -> list[list[int]]:
    async with AsyncEngineClient(services.engine_addresses[0]) as client:
        return list(await asyncio.gather(*(_tokens(client, prompt, new_tokens) for prompt in prompts)))


async def _tokens(client: AsyncEngineClient, prompt: np.ndarray, new_tokens: int) -> list[int]:
    sampling = Sampling(max_tokens=new_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    tokens: list[int] = []
    async with client.generate(prompt, GenerateOptions(sampling=sampling)) as chunks:
        async for chunk in chunks:
            tokens += chunk.token_ids
    return tokens


async def _until_running(client: AsyncEngineClient, count: int) -> None:
    """All decode, each behind its prompt."""
    while len((await client.iteration_plan()).decodes) < count:  # noqa: ASYNC110  # there is no event to wait for
        await asyncio.sleep(0.005)
