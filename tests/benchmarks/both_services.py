"""Both services as processes, and a client of the engine: what figures of whole requests are measured through."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from kvkeeper.client import AsyncEngineClient, GenerateOptions, Sampling
from tests.benchmarks.processes import process


@asynccontextmanager
async def both_services(
    *engine_flags: str, cache_flags: Sequence[str] = (), engine: Sequence[str] = ("kvkeeper.engine_service",)
) -> AsyncIterator[AsyncEngineClient]:
    """engine: the module that runs the engine service, and arguments of its own."""
    with tempfile.TemporaryDirectory() as folder:
        cache, address = f"unix:{folder}/cache", f"unix:{folder}/engine"
        flags = ("--listen", address, "--cache", cache, *engine_flags)
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *cache_flags),
            process("-m", *engine, *flags),
            AsyncEngineClient(address) as client,
        ):
            yield client


@dataclass(frozen=True, slots=True)
class Reply:
    """When a request had its first token and its last, in seconds from its submission."""

    first_token_seconds: float
    seconds: float


async def ask(
    client: AsyncEngineClient, prompt: np.ndarray | str, num_new: int, *, temperature: float = 0.0, seed: int = 0
) -> Reply:
    """num_new tokens behind the prompt, streamed."""
    sampling = Sampling(max_tokens=num_new, temperature=temperature, seed=seed, repetition_penalty=1.0, ignore_eos=True)
    options = GenerateOptions(sampling=sampling)
    begin, first, count = time.perf_counter(), 0.0, 0
    async with client.generate(prompt, options) as chunks:
        async for chunk in chunks:
            first = first or time.perf_counter() - begin
            count += len(chunk.token_ids)
    assert count == num_new, "every token was asked for"
    return Reply(first, time.perf_counter() - begin)


async def ask_all(client: AsyncEngineClient, prompts: Sequence[np.ndarray], nums_new: Sequence[int]) -> list[Reply]:
    """All of them at once."""
    return await asyncio.gather(*(ask(client, *item) for item in zip(prompts, nums_new, strict=True)))
