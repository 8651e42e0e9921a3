"""Clients that ask the engines of a fleet without a pause, and check every token the moment it comes.

The hash toy's output is a function of the prompt alone, so a wrong, missing or repeated token shows at its place in the stream,
also when services were killed meanwhile. Rule: what was acknowledged, by a first message or by an answer to SubmitRequest, ends
well; a Load tells which clients may nevertheless be cut, and with which reasons a request may be refused before that.
"""

import asyncio
import functools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvkeeper.client import (
    AsyncEngineClient,
    BeamSearch,
    CallOptions,
    EngineClient,
    GenerateOptions,
    KvkeeperError,
    Sampling,
    Usage,
)
from tests.support.processes.fleet import BLOCK_SIZE, DEADLINE_S, Fleet
from tests.support.processes.history import Event, What, violations
from tests.support.processes.service_pair import toy_output

_NUM_PROMPTS = 12
_LONGEST_OUTPUT = 80
_LONGEST_SEARCH = 25
_LATE_BY_CHUNKS = 200
_OPTIONS = CallOptions(timeout_s=DEADLINE_S, retry_s=0)  # so that each refusal is seen
_TIMEOUT_MS = 900_000  # of a request: that of a whole unit
_PAUSE_S = 0.02  # of a client that was refused, where the service names none


@dataclass(eq=False)
class Asked:
    """One request of a worker of some kind at some engine."""

    number: int
    kind: str
    request_id: str
    prompt: tuple[int, ...]
    num_tokens: int
    n: int
    num_beams: int = 0  # of a beam search: its likeliest list is the toy's greedy output; 0: none
    tenant: str = ""
    got: dict[int, int] = field(default_factory=dict)  # tokens by continuation
    num_faults: int = 0  # that came between its first and its last token

    def take(self, index: int, token_ids: tuple[int, ...]) -> None:
        first = self.got.get(index, 0)
        expected = expected_tokens(self.prompt)[first : first + len(token_ids)]
        assert list(token_ids) == expected, f"{self.request_id}: {token_ids} at {first} of {index}, not {expected}"
        self.got[index] = first + len(token_ids)

    def check_end(self, usage: Usage | None) -> None:
        assert self.got == dict.fromkeys(range(self.n), self.num_tokens), f"{self.request_id}: {self.got} of {self.num_tokens}"
        assert usage is not None
        assert usage.new_tokens == self.n * self.num_tokens or self.num_beams  # a search counts the lists that it gave up

    def options(self, resubmit_s: float = 0.0) -> GenerateOptions:
        sampling = Sampling(max_tokens=self.num_tokens, temperature=0, repetition_penalty=1.0)
        search = BeamSearch(self.num_beams) if self.num_beams else None
        return GenerateOptions(
            n=self.n,
            request_id=self.request_id,
            timeout_ms=_TIMEOUT_MS,
            tenant=self.tenant,
            resubmit_s=resubmit_s,
            sampling=sampling,
            beam_search=search,
        )


@functools.cache
def expected_tokens(prompt: tuple[int, ...]) -> list[int]:
    return toy_output(prompt, _LONGEST_OUTPUT)


class Load:
    """Workers on a fleet. They run in the task group until stop; the first wrong token ends the group."""

    def __init__(
        self,
        fleet: Fleet,
        rng: random.Random,
        group: asyncio.TaskGroup,
        refusals: frozenset[str],
        tenants: Sequence[str] = ("",),
    ) -> None:
        """refusals: reasons with which the service may refuse what it has not acknowledged; empty for no service there."""
        self.fleet = fleet
        self.history: list[Event] = []
        self.open: set[Asked] = set()  # acknowledged and not ended, by plain streams, streams that resubmit and submissions
        self.asked: set[Asked] = set()  # and those that are not acknowledged yet
        self.num_chunks: Counter[int] = Counter()  # by engine
        self.num_cached: Counter[int] = Counter()  # cached tokens of requests that ended, by engine
        self.num_ended: Counter[str] = Counter()  # by kind of worker
        self.refused: Counter[str] = Counter()  # by reason
        self.num_survived = 0  # requests that went on over a fault
        self.num_cut = 0
        self.longest_cut_s = 0.0  # from the kill of an engine until a client was told
        self._killed_at: dict[int, float] = {}  # the last time, by engine
        self._dead: set[int] = set()
        self._shaken: set[int] = set()
        self._draining: set[int] = set()
        self._rng = rng
        self._group = group
        self._refusals = refusals
        self._tenants = tenants
        self._prompts = self._make_prompts()
        self._clients = [AsyncEngineClient(address, _OPTIONS) for address in fleet.engine_addresses]
        self._blocking = [EngineClient(address, _OPTIONS) for address in fleet.engine_addresses]
        self._news = asyncio.Event()
        self._is_stopping = False
        self._num_asked = 0
        self._workers: list[asyncio.Task[None]] = []

    def _make_prompts(self) -> list[tuple[int, ...]]:
        stems = [[self._rng.randrange(512) for _ in range(self._rng.choice([11, 12, 13]))] for _ in range(3)]
        tails = ([self._rng.randrange(512) for _ in range(self._rng.randint(1, 9))] for _ in range(_NUM_PROMPTS))
        return [(*self._rng.choice(stems), *tail) for tail in tails]

    def start(self, **workers: int) -> None:
        """So many workers of each kind on every engine: plain, resubmitting, threaded, submitting."""
        for number in range(len(self.fleet.engine_addresses)):
            for kind, count in workers.items():
                for _ in range(count):
                    self._workers.append(self._group.create_task(self._work(number, kind, getattr(self, f"_{kind}"))))

    async def stop(self) -> None:
        """Until the last request has ended."""
        self._is_stopping = True
        self._news.set()
        await asyncio.wait(self._workers, timeout=2 * DEADLINE_S)
        assert all(worker.done() for worker in self._workers), f"requests that never ended: {[a.request_id for a in self.open]}"

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for client in self._blocking:
            client.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looked at whenever something came."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_chunks(self, count: int, *numbers: int) -> None:
        """So many more from each of these engines, or from all together where none is named."""
        if numbers:
            before = self.num_chunks.copy()
            await self.until(lambda: all(self.num_chunks[number] - before[number] >= count for number in numbers))
        else:
            total = self.num_chunks.total()
            await self.until(lambda: self.num_chunks.total() - total >= count)

    def acknowledged(self, number: int, kind: str) -> list[Asked]:
        """Requests under way at an engine by one kind of worker."""
        return [asked for asked in self.open if asked.number == number and asked.kind == kind]

    def resumed(self, number: int) -> list[Asked]:
        """Requests under way at an engine that were there at a fault already."""
        return [asked for asked in self.open if asked.number == number and asked.num_faults]

    def note_fault(self, *numbers: int) -> None:
        """One comes now, for what is under way at these engines."""
        for asked in self.asked:
            if asked.number in numbers:
                asked.num_faults += asked in self.open
                self.history.append(Event(What.FAULT, asked.request_id))

    def note_kill(self, number: int) -> None:
        """An engine is killed now."""
        self.note_fault(number)
        self._killed_at[number] = time.monotonic()
        self._dead.add(number)

    def note_shaken(self, number: int, *, is_over: bool = False) -> None:
        """What an engine relies on may fail from now on, until it is over: its requests may be computed twice."""
        self.note_fault(number)
        self._shaken.discard(number) if is_over else self._shaken.add(number)

    def note_drain(self, number: int) -> None:
        """An engine is asked to stop now."""
        self.note_fault(number)
        self._killed_at[number] = time.monotonic()
        self._draining.add(number)

    def note_start(self, number: int) -> None:
        """It serves again. Channels may need a moment to find out."""
        self._dead.discard(number)
        self._draining.discard(number)

    # -- workers

    async def _work(self, number: int, kind: str, ask: Callable[[Asked], Awaitable[Usage | None]]) -> None:
        while not self._is_stopping:
            self._num_asked += 1
            num_tokens = self._rng.choice([1, 4, 25, 60, _LONGEST_OUTPUT, _LONGEST_OUTPUT])
            name, prompt, n = f"{kind}-{self._num_asked}", self._rng.choice(self._prompts), self._rng.choice([1, 1, 2])
            num_beams = self._rng.choice([0, 0, 0, 0, 0, 0, 2, 3])
            if num_beams:
                num_tokens, n = min(num_tokens, _LONGEST_SEARCH), 1
            asked = Asked(number, kind, name, prompt, num_tokens, n, num_beams, self._rng.choice(self._tenants))
            self.asked.add(asked)
            self._note(asked, What.ASKED, tokens=prompt, num_outputs=n, num_tokens=num_tokens)
            if number in self._dead | self._shaken:
                self._note(asked, What.FAULT)
            try:
                usage = await ask(asked)
                asked.check_end(usage)
            except KvkeeperError as error:
                self._note_refusal(asked, error)
                await asyncio.sleep(error.retry_after or _PAUSE_S)  # as clients do
            else:
                assert usage is not None
                self._note(asked, What.COMPLETED, num_cached=usage.cached_tokens)
                self.num_ended[kind] += 1
                self.num_cached[number] += usage.cached_tokens
                self.num_survived += asked.num_faults > 0
            finally:
                self.open.discard(asked)
                self._news.set()

    def _note(self, asked: Asked, what: What, **fields: Any) -> None:
        self.history.append(Event(what, asked.request_id, asked.tenant, **fields))
        if what in (What.COMPLETED, What.CUT, What.REFUSED):
            self.asked.discard(asked)

    def _take(self, asked: Asked, index: int, token_ids: tuple[int, ...]) -> None:
        self._note(asked, What.TOKENS, tokens=tuple(token_ids), index=index)
        asked.take(index, token_ids)

    def _note_refusal(self, asked: Asked, error: KvkeeperError) -> None:
        if asked in self.open:
            what = f"{asked.request_id} was acknowledged, and lost after {asked.got}: {error}"
            assert asked.number in self._dead and asked.kind == "plain" and error.service_down, what
            self._note(asked, What.CUT)
            self.num_cut += 1
            self.longest_cut_s = max(self.longest_cut_s, time.monotonic() - self._killed_at[asked.number])
            return
        self._note(asked, What.REFUSED)
        is_starting = asked.number in self._killed_at and (error.service_down or error.reason == "CACHE_SERVICE_DOWN")
        if not is_starting:
            assert error.code is grpc.StatusCode.UNAVAILABLE and error.reason in self._refusals, f"{asked.request_id}: {error}"
            assert error.retry_after, "a refusal for now says when to come again"
        self.refused[error.reason] += 1

    def _note_chunk(self, asked: Asked) -> None:
        self.open.add(asked)
        self.num_chunks[asked.number] += 1
        self._news.set()

    async def _plain(self, asked: Asked, resubmit_s: float = 0.0) -> Usage | None:
        stream = self._clients[asked.number].generate(asked.prompt, asked.options(resubmit_s))
        async for chunk in stream:
            self._take(asked, chunk.index, chunk.token_ids)
            self._note_chunk(asked)
        return stream.usage

    async def _resubmitting(self, asked: Asked) -> Usage | None:
        return await self._plain(asked, DEADLINE_S)

    async def _threaded(self, asked: Asked) -> Usage | None:
        """The blocking client, in a thread."""
        loop = asyncio.get_running_loop()

        def run() -> Usage | None:
            stream = self._blocking[asked.number].generate(asked.prompt, asked.options(DEADLINE_S))
            for chunk in stream:
                self._take(asked, chunk.index, chunk.token_ids)
                loop.call_soon_threadsafe(self._note_chunk, asked)
            return stream.usage

        return await asyncio.to_thread(run)

    async def _late(self, asked: Asked) -> Usage | None:
        """Submits, and comes for the results when its engine has been asked to stop and refuses others, or after a while."""
        num_chunks, num_refused = self.num_chunks.total(), self.refused["DRAINING"]
        return await self._submitting(
            asked,
            lambda: (
                self.refused["DRAINING"] > num_refused
                if asked.number in self._draining
                else self.num_chunks.total() > num_chunks + _LATE_BY_CHUNKS
            ),
        )

    async def _submitting(self, asked: Asked, may_fetch: Callable[[], bool] = lambda: True) -> Usage | None:
        client = self._clients[asked.number]
        assert await client.submit(asked.prompt, asked.options()) == asked.request_id
        self.open.add(asked)
        await self.until(lambda: self._is_stopping or may_fetch())
        result = await client.result(asked.request_id, wait_s=DEADLINE_S)
        assert result.state == "completed", f"{asked.request_id}: {result.error}"
        for output in result.outputs:
            self._take(asked, output.index, output.token_ids)
        return result.usage


@asynccontextmanager
async def load_on(
    fleet: Fleet, rng: random.Random, refusals: frozenset[str], tenants: Sequence[str] = ("",)
) -> AsyncIterator[Load]:
    """What a worker finds wrong ends the block, and is raised from it. At the end the whole history is looked at, too."""
    async with asyncio.TaskGroup() as group:
        load = Load(fleet, rng, group, refusals, tenants)
        try:
            yield load
            found = violations(load.history, expected_tokens, BLOCK_SIZE)
            assert not found, "\n".join(found)
        finally:
            await load.close()
