"""Engines that are stopped past their lease in the middle of a step: their clients get right tokens alone.

Real processes on one small pool. The first engine stops itself in its steps, before they read K and V or when they have; while
it stands still its lease ends, and the second one takes and overwrites what it had. Then it goes on: what it was computing is
lost with its session, and computed again. The oracle is the second engine, asked the same before anything stops; a model of
floating-point numbers may say either of two tokens that are as good as alike (near_ties.py).
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvkeeper.client import AsyncEngineClient, BeamSearch, CallOptions, GenerateOptions, Sampling
from kvkeeper.engine_service.config import HASH_TOY
from tests.soak.compared_streams import Asked, Crowd, outputs
from tests.soak.row import Counts
from tests.support.processes.fleet import DEADLINE_S, Fleet, Service, fleet

LEASE_MS = 500
_BLOCK_SIZE, _NUM_BLOCKS = 8, 40
_NUM_REQUESTS = 6  # on each engine at once
_OTHERS_TOKENS = 60  # that the second engine gives while the first stands still
_STOP_EVERY = 8  # calls of the model
_NUM_WORDS = 250  # tokens that both models know
_SEARCHES = 0.3  # of the requests
_TIMEOUT_MS = 900_000


async def run(seed: int, model: str, num_stops: int) -> Counts:
    """Counts stops; the fault is a session that a stopped engine lost. Worst: the largest gap at a token that differs."""
    rng = random.Random(seed)
    asked = [[_request(rng, has_searches=model == HASH_TOY) for _ in range(_NUM_REQUESTS)] for _ in range(2)]
    stops = {"stop_every": _STOP_EVERY, "stop_seed": rng.randrange(1 << 30)}
    flags = {"model": model, "block_size": _BLOCK_SIZE, "token_budget": 128, "lease_ms": LEASE_MS}
    options = CallOptions(timeout_s=DEADLINE_S, retry_s=0)
    async with fleet(2, {"num_blocks": _NUM_BLOCKS, "max_sequences": 128}, stops, **flags) as services:
        first, second = services.engine_addresses
        async with AsyncEngineClient(first, options) as stopped, AsyncEngineClient(second, options) as other:
            expected = [await asyncio.gather(*(outputs(other, request) for request in requests)) for requests in asked]
            crowds = [Crowd(client, *both) for client, *both in zip((stopped, other), asked, expected, strict=True)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(crowd.again_and_again()) for crowd in crowds]
                stops = _Stops(services.engines[0])
                for _ in range(num_stops):
                    await _stop_and_go(services, stops, crowds[1])
                for crowd in crowds:
                    crowd.is_over = True
                async with stops.passed_over():
                    await asyncio.wait(tasks)
                stops.close()
        num_lost = services.engines[0].events["session_lost"]
    return Counts(num_stops, num_lost, max(crowd.largest_gap for crowd in crowds))


async def _stop_and_go(services: Fleet, stops: "_Stops", others: Crowd) -> None:
    """One stop, for so long that others overwrite what the engine had."""
    engine, num_ended = services.engines[0], services.cache.events["session_ended"]
    await stops.wait()
    await services.cache.until("session_ended", num_ended + 1)
    await others.until_tokens(_OTHERS_TOKENS)
    num_lost = engine.events["session_lost"]
    engine.resume()
    async with stops.passed_over():  # the step behind may stop, too, before the loop hears of the lease
        await engine.until("session_lost", num_lost + 1)


class _Stops:
    """The stops of an engine, in turn. A thread that waits for one takes it, also where its waiter was cancelled."""

    def __init__(self, engine: Service) -> None:
        self._engine = engine
        self._next: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Until it has stopped. A wait that is cancelled leaves the stop to the next one."""
        self._next = self._next or asyncio.create_task(self._engine.until_stopped())
        await asyncio.shield(self._next)
        self._next = None

    @asynccontextmanager
    async def passed_over(self) -> AsyncIterator[None]:
        """What stops meanwhile goes on at once."""
        passing = asyncio.create_task(self._pass_over())
        try:
            yield
        finally:
            passing.cancel()

    async def _pass_over(self) -> None:
        while True:
            await self.wait()
            self._engine.resume()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()


def _request(rng: random.Random, *, has_searches: bool) -> Asked:
    """One, two or three continuations, or a beam search where the model leaves it no choice between numbers that are alike."""
    prompt = tuple(rng.randrange(3, _NUM_WORDS) for _ in range(rng.choice([7, 8, 9, 16, 17, 24])))
    num_tokens, n = rng.choice([20, 40, 60]), rng.choice([1, 1, 2, 3])
    if has_searches and rng.random() < _SEARCHES:
        sampling = Sampling(max_tokens=num_tokens // 2, ignore_eos=True, repetition_penalty=1.0)
        return Asked(prompt, GenerateOptions(n=2, timeout_ms=_TIMEOUT_MS, beam_search=BeamSearch(3), sampling=sampling))
    sampling = Sampling(
        max_tokens=num_tokens, temperature=rng.choice([0.0, 0.8]), seed=rng.getrandbits(32), ignore_eos=True,
        repetition_penalty=1.0, num_logprobs=2,
    )  # fmt: skip
    return Asked(prompt, GenerateOptions(n=n, timeout_ms=_TIMEOUT_MS, sampling=sampling))
