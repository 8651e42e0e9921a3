"""Engines on one pool of the real core for days of virtual time: bursts that fill the pool, and quiet between them.

Owns the mix, the virtual clock and the watchdog; engine_crowd.py is the same for a few seconds. A seed replays everything.
Rules: what can run ends with the right tokens; while anything is left to do, no STALL_SECONDS of virtual time pass without a
new token for some request; what cannot ever run is refused by the engine the moment it comes, and changes nothing.
"""

import random
from dataclasses import dataclass
from typing import Any

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import SessionId
from kvkeeper.engine_service.loop.open_requests import OpenRequests
from kvkeeper.engine_service.loop.stats import EngineStats
from kvkeeper.engine_service.loop.tracing import EngineTracing
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.model_text import StopRules
from kvkeeper.engine_service.values.errors import NeverFits
from kvkeeper.engine_service.values.request import Request
from kvkeeper.engine_service.values.sampling_params import SamplingParams
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.engine_crowd import STALL_SECONDS
from tests.support.worlds.scheduler_world import World, expected_output, make_request

_STEP_SECONDS = (0.005, 0.025)
_AUDIT_EVERY = 61  # steps of an engine
_QUIET = (8.0, 16.0)  # how much longer than a burst the quiet after it is


@dataclass
class DaysCounts:
    """What the engines did; a run proves nothing where these are 0."""

    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_given_back: int = 0  # answers that asked an engine for blocks
    num_refused_starts: int = 0
    num_impossible: int = 0  # requests that were refused at once
    num_cancelled: int = 0
    num_lost_sessions: int = 0
    num_full: int = 0  # steps after which no block was free
    busy_seconds: float = 0.0
    longest_stall: float = 0.0


class EngineDays:
    """Several engines on one pool, and the days that they live through."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.counts = DaysCounts()
        self.now = 0.0
        self.block_size = rng.choice([1, 2, 4])
        self.num_blocks = rng.choice([4, 5, 9, 20])
        num_engines, max_sequences = rng.choice([1, 2, 2, 3, 4]), rng.choice([3, 8, 64])
        watermark, num_hosts = rng.choice([0.0, 0.1, 0.2]), rng.choice([0, 0, self.num_blocks, 4 * self.num_blocks])
        size = self.num_blocks + 1
        self.manager = PoolManager(
            PoolConfig(size, self.block_size, max_sequences, 10_000, watermark, num_host_blocks=num_hosts)
        )
        self._num_sessions = 0
        budget, chunk = rng.choice([8, 64]), rng.choice([2, 5, 8])
        sizes = (size, self.block_size, max_sequences, budget, chunk)
        options: dict[str, Any] = {"make_cache": self._make_cache, "num_host_blocks": num_hosts}
        kinds: list[dict[str, Any]] = [{}, {"overlap": True}, {"ahead": True}, {"guess": self._guess}]
        self.worlds = [World(*sizes, **options, **rng.choice(kinds)) for _ in range(num_engines)]
        for world in self.worlds[1:]:
            world.memory, world.host = self.worlds[0].memory, self.worlds[0].host  # one arena
        self._slowness = [rng.choice([1, 1, 2, 4]) for _ in self.worlds]
        self._next_at = [0.0 for _ in self.worlds]  # when each engine's step begins; they run side by side
        self._last_token_at = 0.0

    def _make_cache(self, *_: int, **host: int) -> CoreCache:
        """A session of the pool."""
        self._num_sessions += 1
        session = SessionId(f"session {self._num_sessions}")
        return CoreCache(0, 0, 0, manager=self.manager, session=session, audit_every=_AUDIT_EVERY)

    def _guess(self, tokens: tuple[int, ...], index: int) -> list[int]:
        return [self.rng.randrange(3) for _ in range(self.rng.randrange(4))]

    def run(self, seconds: float) -> DaysCounts:
        """So much virtual time, to the end of the last burst."""
        while self.now < seconds:
            began = self.now
            self._burst(self.rng.choice([1, 5, 20, 20, 40, 200]))
            self.counts.busy_seconds += self.now - began
            self.now += (self.now - began) * self.rng.uniform(*_QUIET)
        return self.counts

    def _burst(self, num_requests: int) -> None:
        """Requests come in a short time, and all of them end."""
        pace = self.rng.choice([0.02, 0.1, 0.5])
        arrivals = sorted(self.now + self.rng.expovariate(1 / pace) * place for place in range(num_requests))
        self._last_token_at = self.now
        self._next_at = [self.now] * len(self.worlds)
        while arrivals or any(_has_work(world) for world in self.worlds):
            number = self._next_at.index(min(self._next_at))
            self.now = self._next_at[number]
            self.manager.state.tick(self.now)
            while arrivals and arrivals[0] <= self.now:
                arrivals.pop(0)
                self._arrival(self.rng.choice(self.worlds))
            self._next_at[number] += self.rng.uniform(*_STEP_SECONDS) * self._slowness[number]
            self._step(self.worlds[number])
        self._check_and_forget()

    def _arrival(self, world: World) -> None:
        """One request: mostly small, now and then one that takes the whole pool, or that could never run."""
        rng, most = self.rng, self.num_blocks * self.block_size
        self.counts.num_requests += 1
        if not any(other.busy for other in self.worlds):
            self._last_token_at = self.now
        num_prompt = min(rng.choice([1, self.block_size, self.block_size + 1, rng.randint(1, most), most // 2 + 1]), most - 1)
        num_new = rng.choice([1, min(4, most - num_prompt), most - num_prompt])
        n = rng.choice([1, 1, 1, 2, 3]) if 2 * (num_prompt + num_new) <= most else 1
        prompt = [rng.randrange(3) for _ in range(max(1, num_prompt))]
        if rng.random() < 0.05:
            self._refuse(world, make_request(prompt, most - len(prompt) + rng.choice([1, 100])))
            return
        request = world.submit(make_request(prompt, num_new, n, rng.choice([0, 0, 0, 1, -1]), look_up=rng.random() < 0.7))
        if rng.random() < 0.1:
            self._cancel(world, request, after=rng.randint(1, 30))
        elif rng.random() < 0.2:  # it ends by itself, which cannot be foreseen
            world.stop_after[request.sequences[0]] = rng.randint(1, num_new)

    def _cancel(self, world: World, request: Request, after: int) -> None:
        self.counts.num_cancelled += 1
        world.cancel(request, after)

    def _refuse(self, world: World, request: Request) -> None:
        """The engine itself says no, before anything is queued."""
        requests = OpenRequests(world.scheduler, EngineStats(), EngineTracing(None), 10**6, lambda: None)
        num_waiting = world.scheduler.num_waiting
        try:
            requests.submit(Generation(request, SamplingParams(), 0, StopRules(), [], send=lambda chunk: None))
        except NeverFits:
            self.counts.num_impossible += 1
        assert world.scheduler.num_waiting == num_waiting, "a request that can never run was queued"

    def _step(self, world: World) -> None:
        if not _has_work(world):
            world.cache.report()
            return
        if self.rng.random() < 0.0005:
            self._lose_session(world)
        before, num_started = _num_tokens(world), len(world.started)
        world.step()
        for sequence in world.started[num_started:]:
            if self.rng.random() < 0.05 * sequence.request.n:  # its first work is under way
                self._cancel(world, sequence.request, after=self.rng.choice([0, 1, 2]))
        self.counts.num_steps += 1
        self.counts.num_given_back += self.manager.sessions.reclaim_hint(world.cache.session) > 0
        self.counts.num_full += self.manager.queries.stats().num_free_blocks == 0
        num_new = _num_tokens(world) - before
        self.counts.num_tokens += num_new
        if num_new or not any(other.busy for other in self.worlds):
            self._last_token_at = self.now
        stall = self.now - self._last_token_at
        self.counts.longest_stall = max(self.counts.longest_stall, stall)
        assert stall < STALL_SECONDS, f"no token for {stall:.1f} virtual seconds, at {self.now:.1f}"

    def _lose_session(self, world: World) -> None:
        """As an engine does after the end of its lease: everything starts again on a new session, from the tokens it holds."""
        self.counts.num_lost_sessions += 1
        world.lose_session(self._make_cache)

    def _check_and_forget(self) -> None:
        """The burst is over: every output is right, every block is back, and the pool is at rest."""
        for world in self.worlds:
            for request in world.requests:
                for sequence in request.sequences:
                    expected = expected_output(request, sequence.index)[: world.stop_after.get(sequence)]
                    output = world.outputs[sequence]
                    assert output == expected or (request in world.cancelled and output == expected[: len(output)])
            world.cache.report()
            assert not world.cache.sequences
            self.counts.num_preemptions += sum(request.num_preemptions for request in world.requests)
            self.counts.num_swapped_out = sum(other.scheduler.state.num_swapped_out for other in self.worlds)
            world.forget()
        stats = self.manager.queries.stats()
        assert stats.num_claimed_blocks == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == self.num_blocks
        assert self.manager.queries.check_invariants() == []
        self.counts.num_refused_starts = stats.num_refused_starts


def _has_work(world: World) -> bool:
    return world.busy or world.has_step_in_flight or not world.scheduler.is_empty


def _num_tokens(world: World) -> int:
    return sum(len(output) for output in world.outputs.values())
