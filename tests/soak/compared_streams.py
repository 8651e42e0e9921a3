"""Requests at an engine beside what they give when nothing goes wrong: each token is compared the moment it comes.

A model of floating-point numbers may say either of two tokens that are as good as alike (near_ties.py).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvkeeper.client import AsyncEngineClient, GenerateOptions
from tests.soak.near_ties import check_near_tie
from tests.support.processes.fleet import DEADLINE_S

_APART = 1e-3  # that other batches may bring a log probability


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: tuple[int, ...]
    options: GenerateOptions


@dataclass
class Output:
    """What one continuation has given."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two likeliest tokens, at each token's place


async def outputs(client: AsyncEngineClient, asked: Asked) -> list[Output]:
    """What each continuation gives, to the end."""
    found = [Output() for _ in range(asked.options.n or 1)]
    async for chunk in client.generate(asked.prompt, asked.options):
        found[chunk.index].token_ids += chunk.token_ids
        found[chunk.index].logprobs += [one.logprob for one in chunk.logprobs]
        found[chunk.index].gaps += [one.top[0][1] - one.top[1][1] for one in chunk.logprobs]
    return found


class Crowd:
    """Requests at one engine, all at once, again and again until it is over; each token is compared the moment it comes."""

    def __init__(self, client: AsyncEngineClient, asked: Sequence[Asked], expected: Sequence[list[Output]]) -> None:
        self.is_over = False
        self.num_tokens = 0
        self.num_under_way = 0  # streams that have given something, and not all
        self.largest_gap = 0.0  # at a token that differs
        self._client, self._asked, self._expected = client, asked, expected
        self._news = asyncio.Event()
        self._num_running = len(asked)

    async def again_and_again(self) -> None:
        """Until it is over, each for itself, and each at least once."""
        async with asyncio.TaskGroup() as group:
            for asked, expected in zip(self._asked, self._expected, strict=True):
                group.create_task(self._repeat(asked, expected))

    async def until_tokens(self, count: int) -> None:
        """So many more tokens, or until no stream is left to give any."""
        wanted = self.num_tokens + count
        async with asyncio.timeout(DEADLINE_S):
            while self.num_tokens < wanted and self._num_running:
                self._news.clear()
                await self._news.wait()

    async def _repeat(self, asked: Asked, expected: list[Output]) -> None:
        await self._one(asked, expected)
        while not self.is_over:
            await self._one(asked, expected)
        self._num_running -= 1
        self._news.set()

    async def _one(self, asked: Asked, expected: list[Output]) -> None:
        outputs = [_Comparison(asked, index, output) for index, output in enumerate(expected)]
        has_begun = False
        async for chunk in self._client.generate(asked.prompt, asked.options):
            self.num_under_way += not has_begun
            has_begun = True
            logprobs = [one.logprob for one in chunk.logprobs] or [None] * len(chunk.token_ids)
            for token_id, logprob in zip(chunk.token_ids, logprobs, strict=True):
                outputs[chunk.index].take(token_id, logprob)
            self.num_tokens += len(chunk.token_ids)
            self._news.set()
        self.num_under_way -= has_begun
        assert all(output.is_complete for output in outputs)
        self.largest_gap = max(self.largest_gap, *(output.gap for output in outputs))


class _Comparison:
    """One continuation beside what it should be."""

    def __init__(self, asked: Asked, index: int, expected: Output) -> None:
        """index: of the continuation."""
        self.gap = 0.0  # at the first token that differs
        self._asked, self._index, self._expected = asked, index, expected
        self._num_taken = 0
        self._differs = False  # from there on it continues another text

    @property
    def is_complete(self) -> bool:
        return self._num_taken == len(self._expected.token_ids)

    def take(self, token_id: int, logprob: float | None) -> None:
        place, self._num_taken = self._num_taken, self._num_taken + 1
        if self._differs:
            return
        expected = self._expected.token_ids[place]
        if token_id != expected:
            self._differs, sampling = True, self._asked.options.sampling
            assert self._expected.gaps and sampling is not None, f"token {place} is {token_id} and not {expected}"
            before = [*self._asked.prompt, *self._expected.token_ids[:place]]
            self.gap = check_near_tie(before, sampling, self._index, self._expected.gaps[place], expected, token_id)
        elif logprob is not None:
            apart = abs(logprob - self._expected.logprobs[place])
            assert apart < _APART, f"the log probability of token {place} is {apart} away from what it is without a stop"
