"""Both services as processes, and a client of each: what figures of whole requests are measured through."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, GenerateOptions, Sampling
from tests.benchmarks.processes import process


@asynccontextmanager
async def both_services(
    *engine_flags: str,
    cache_flags: Sequence[str] = (),
    engine: Sequence[str] = ("kvkeeper.engine_service",),
    cache: Sequence[str] = ("kvkeeper.cache_service",),
    listen: str = "",
) -> AsyncIterator[tuple[AsyncEngineClient, AsyncCacheClient]]:
    """engine, cache: the module that runs the service, and arguments of its own. listen: of the engine, else a Unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        pool_at, address = f"unix:{folder}/cache", listen or f"unix:{folder}/engine"
        async with (
            process("-m", *cache, "--listen", pool_at, "--runtime-dir", folder, *cache_flags),
            process("-m", *engine, "--listen", address, "--cache", pool_at, *engine_flags),
            AsyncEngineClient(address) as client,
            AsyncCacheClient(pool_at) as pools,
        ):
            yield client, pools


@dataclass(frozen=True, slots=True)
class Reply:
    """When each chunk of a request came, in seconds from its submission, how many tokens there were then, and which."""

    times: list[float]
    token_ids: list[int]
    num_cached: int
    counts: list[int]

    @property
    def first_token_seconds(self) -> float:
        return self.times[0]

    @property
    def seconds(self) -> float:
        return self.times[-1]

    @property
    def gaps(self) -> list[float]:
        """Seconds between the tokens of the stream."""
        return np.diff(self.times).tolist()


async def ask(
    client: AsyncEngineClient,
    prompt: np.ndarray | str,
    num_new: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    skip_look_up: bool = False,
) -> Reply:
    """num_new tokens behind the prompt, streamed."""
    sampling = Sampling(max_tokens=num_new, temperature=temperature, seed=seed, repetition_penalty=1.0, ignore_eos=True)
    options = GenerateOptions(sampling=sampling, skip_look_up=skip_look_up)
    begin, times, token_ids, counts = time.perf_counter(), list[float](), list[int](), list[int]()
    async with client.generate(prompt, options) as chunks:
        async for chunk in chunks:
            times.append(time.perf_counter() - begin)
            token_ids += chunk.token_ids
            counts.append(len(token_ids))
    assert len(token_ids) == num_new, "every token was asked for"
    assert chunks.usage is not None, "a request that ended well has usage"
    return Reply(times, token_ids, chunks.usage.cached_tokens, counts)


async def ask_all(
    client: AsyncEngineClient, prompts: Sequence[np.ndarray], nums_new: Sequence[int], *, skip_look_up: bool = False
) -> list[Reply]:
    """All of them at once."""
    pairs = zip(prompts, nums_new, strict=True)
    return await asyncio.gather(*(ask(client, *pair, skip_look_up=skip_look_up) for pair in pairs))


def step_seconds(replies: Sequence[Reply]) -> float:
    """Seconds of a step in which all of them decode: a token of the one that began last, until the first one ends.

    0 where all of that one came at once.
    """
    latest, end = max(replies, key=lambda reply: reply.first_token_seconds), min(reply.seconds for reply in replies)
    last = max([1, *(place for place, at in enumerate(latest.times) if at <= end)])
    if last >= len(latest.times):
        return 0.0
    return (latest.times[last] - latest.times[0]) / (latest.counts[last] - latest.counts[0])
