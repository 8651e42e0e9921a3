"""Row 17 with a model of floating-point numbers: the demo model's tokens are the same when the cache service is killed.

The same requests, greedy and seeded, run twice through real processes: left alone, and with the cache service killed in the
middle of all of them. Tokens are computed again in other batches then, which rounds differently, so either of two tokens may
come where they are as good as alike (near_ties.py). Any other token that differs is a violation.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.soak.near_ties import check_near_tie
from tests.soak.row import Counts
from tests.support.processes.fleet import DEADLINE_S, Fleet, fleet

_STEMS = ("The cache service keeps", "A block of memory", "When the engine", "Once upon a time", "In the morning the")
_WORDS = ("and", "the", "of", "two", "old", "long", "every", "never")


@dataclass
class _Output:
    """What one request has given."""

    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two likeliest tokens, at each token's place
    is_complete: bool = False


def briefly(seed: int) -> Counts:
    """Counts tokens compared; faults are requests under way in a kill. Worst: the largest gap at a token that differs."""
    return asyncio.run(_run(random.Random(seed), num_tokens=40, num_kills=1))


def long(seed: int) -> Counts:
    """The same with more of both."""
    return asyncio.run(_run(random.Random(seed), num_tokens=200, num_kills=10))


async def _run(rng: random.Random, num_tokens: int, num_kills: int) -> Counts:
    prompts = [" ".join([rng.choice(_STEMS), *rng.choices(_WORDS, k=rng.randint(0, 20))]) for _ in range(8)]
    asked = [
        Sampling(max_tokens=num_tokens, temperature=0.0 if place % 2 else 0.8, seed=rng.getrandbits(32), ignore_eos=True,
                 num_logprobs=2) for place in range(len(prompts))
    ]  # fmt: skip
    cache = {"num_blocks": 256, "drain_timeout": 0.0}
    async with fleet(1, cache, model=str(DEMO_MODEL_DIR), block_size=16, token_budget=256) as services:
        async with AsyncEngineClient(services.engine_addresses[0], CallOptions(timeout_s=DEADLINE_S, retry_s=0)) as client:
            alone = await _Crowd(client).run(prompts, asked)
            crowd = _Crowd(client)
            running = asyncio.create_task(crowd.run(prompts, asked))
            total, num_hit = len(prompts) * num_tokens, 0
            for kill in range(num_kills):
                first = total * kill // num_kills
                await crowd.until(max(len(prompts), rng.randint(first, first + total // num_kills // 2)))
                num_hit += await _kill(services, crowd)
            killed = await asyncio.wait_for(running, DEADLINE_S)
            texts = [await client.tokenize(prompt) for prompt in prompts]
    rows = zip(texts, asked, alone, killed, strict=True)
    gaps = [gap for row in rows if (gap := _gap(*row)) is not None]
    if gaps:
        print(f"{len(gaps)} of {len(prompts)} outputs differ, where two tokens are within {max(gaps):.1e}")
    return Counts(total, num_hit, max(gaps, default=0.0))


async def _kill(services: Fleet, crowd: "_Crowd") -> int:
    num_hit = crowd.num_under_way
    await services.cache.kill()
    await services.start_cache()
    return num_hit


def _gap(prompt: Sequence[int], asked: Sampling, alone: _Output, killed: _Output) -> float | None:
    """At the first token that differs; what follows it continues another text. None: none does."""
    assert len(alone.token_ids) == len(killed.token_ids)
    for place, (one, other) in enumerate(zip(alone.token_ids, killed.token_ids, strict=True)):
        if one != other:
            return check_near_tie([*prompt, *alone.token_ids[:place]], asked, 0, alone.gaps[place], one, other)
    return None


class _Crowd:
    """Requests that run side by side."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self._client = client
        self._outputs: list[_Output] = []
        self._news = asyncio.Event()

    async def run(self, prompts: Sequence[str], asked: Sequence[Sampling]) -> list[_Output]:
        self._outputs = [_Output() for _ in prompts]
        async with asyncio.TaskGroup() as group:
            for output, prompt, sampling in zip(self._outputs, prompts, asked, strict=True):
                group.create_task(self._one(output, prompt, sampling))
        return self._outputs

    @property
    def num_under_way(self) -> int:
        return sum(bool(output.token_ids) and not output.is_complete for output in self._outputs)

    async def until(self, num_tokens: int) -> None:
        """All together have so many."""
        async with asyncio.timeout(DEADLINE_S):
            while sum(len(output.token_ids) for output in self._outputs) < num_tokens:
                self._news.clear()
                await self._news.wait()

    async def _one(self, output: _Output, prompt: str, sampling: Sampling) -> None:
        options = GenerateOptions(timeout_ms=int(3000 * DEADLINE_S), skip_look_up=True, sampling=sampling)
        async for chunk in self._client.generate(prompt, options):
            output.token_ids += chunk.token_ids
            output.gaps += [one.top[0][1] - one.top[1][1] for one in chunk.logprobs]
            self._news.set()
        output.is_complete = True
        assert len(output.token_ids) == len(output.gaps) == sampling.max_tokens
