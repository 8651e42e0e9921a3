"""Several engines' schedulers on one pool of the real core, under a virtual clock, with requests as awkward as can be.

Owns the mix and the watchdog. A seed replays everything: which engine steps next, what arrives, what is cancelled, which steps
slowly. Rule: what runs finishes with the right tokens, and while anything is left to do no STALL_SECONDS of virtual time pass
without a new token for some request.
"""

import random
from dataclasses import dataclass

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import SessionId
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, expected_output, make_request

STALL_SECONDS = 5.0
_STEP_SECONDS = (0.005, 0.02)


@dataclass
class CrowdCounts:
    """What a crowd did; a run proves nothing where these are 0."""

    num_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_given_back: int = 0  # answers that asked an engine for blocks
    num_refused_starts: int = 0
    num_steps: int = 0
    longest_stall: float = 0.0


class EngineCrowd:
    """Engines on one pool of num_blocks usable blocks. With a host tier they swap."""

    def __init__(
        self,
        seed: int,
        num_engines: int,
        num_blocks: int,
        block_size: int = 2,
        watermark: float = 0.0,
        num_host_blocks: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.counts = CrowdCounts()
        self.num_blocks, self.block_size = num_blocks, block_size
        config = PoolConfig(num_blocks + 1, block_size, 64, 10_000, watermark, num_host_blocks=num_host_blocks)
        self.manager = PoolManager(config)
        budget, chunk = self.rng.choice([8, 64]), self.rng.choice([2, 5, 8])
        self.worlds: list[World] = []
        for number in range(num_engines):
            session = SessionId(f"engine {number}")
            make_cache = lambda *_, session=session, **_host: CoreCache(0, 0, 0, manager=self.manager, session=session)  # noqa: E731
            world = World(num_blocks + 1, block_size, 64, budget, chunk, make_cache=make_cache, num_host_blocks=num_host_blocks)
            if self.worlds:
                world.memory, world.host = self.worlds[0].memory, self.worlds[0].host  # one arena
            self.worlds.append(world)
        self._slowness = [self.rng.choice([1, 1, 2, 5]) for _ in self.worlds]
        self._next_at = [0.0 for _ in self.worlds]  # when each engine's step begins; they run side by side
        self._last_token_at = 0.0

    def submit(self, world: World) -> None:
        """One request: mostly small, now and then one that takes the whole pool, a few of higher or lower priority."""
        rng, most = self.rng, self.num_blocks * self.block_size
        length = rng.choice([1, self.block_size, rng.randint(1, most - 1), most // 2])
        num_prompt = max(1, min(length, most - 1))
        num_new = rng.choice([1, min(4, most - num_prompt), most - num_prompt])
        n = rng.choice([1, 1, 1, 2]) if 2 * (num_prompt + num_new) <= most else 1
        prompt = [rng.randrange(3) for _ in range(num_prompt)]
        request = make_request(prompt, num_new, n, rng.choice([0, 0, 0, 1, -1]), look_up=rng.random() < 0.7)
        world.submit(request)
        if rng.random() < 0.1:
            world.cancel(request, after=rng.randint(0, 30))

    def run(self, num_requests: int) -> CrowdCounts:
        """Until all of them have ended."""
        left = num_requests
        while left or any(world.busy for world in self.worlds):
            if left and self.rng.random() < 0.2:
                left -= 1
                self.submit(self.rng.choice(self.worlds))
            self._step(self._next_at.index(min(self._next_at)))
        for _ in range(3):  # orders are told, run, and reported
            for world in self.worlds:
                world.step()
        for world in self.worlds:
            for request in world.requests:
                for sequence in request.sequences:
                    output = world.outputs[sequence]
                    expected = expected_output(request, sequence.index)
                    assert output == expected or (request in world.cancelled and output == expected[: len(output)])
            assert not world.cache.sequences
        stats = self.manager.queries.stats()
        assert stats.num_claimed_blocks == stats.num_transfer_blocks == getattr(stats, "num_held_host_blocks", 0) == 0
        self.counts.num_refused_starts = stats.num_refused_starts
        self.counts.num_preemptions = sum(world.scheduler.state.num_preemptions for world in self.worlds)
        self.counts.num_swapped_out = sum(world.scheduler.state.num_swapped_out for world in self.worlds)
        return self.counts

    def _step(self, number: int) -> None:
        world = self.worlds[number]
        self.manager.state.tick(self._next_at[number])
        self._next_at[number] += self.rng.uniform(*_STEP_SECONDS) * self._slowness[number]
        before = sum(len(output) for output in world.outputs.values())
        was_busy = any(other.busy for other in self.worlds)
        world.step()
        self.counts.num_steps += 1
        self.counts.num_given_back += self.manager.sessions.reclaim_hint(world.cache.session) > 0
        num_new = sum(len(output) for output in world.outputs.values()) - before
        self.counts.num_tokens += num_new
        if num_new or not was_busy:
            self._last_token_at = self.manager.state.now
        stall = self.manager.state.now - self._last_token_at
        self.counts.longest_stall = max(self.counts.longest_stall, stall)
        assert stall < STALL_SECONDS, f"no token for {stall:.1f} virtual seconds"
