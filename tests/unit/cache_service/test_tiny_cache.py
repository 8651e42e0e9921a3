"""TinyCache alone, and against the core: the same steps give the same hits, grants, tables and copies."""

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.tiny_cache import Commit, Start, TinyCache, story
from kvkeeper.engine_service.scheduler.plan import Plan
from tests.support.documents.markdown import page
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request
from tests.support.worlds.tiny_columns import TinyColumns


def test_the_story_shows_a_fork_a_copy_a_hit_and_an_eviction() -> None:
    tables = []
    for _, cache in story():
        cache.check()
        tables.append([list(sequence.table) for sequence in cache.sequences.values()])
    assert tables[1] == [[1, 2], [1, 2]], "a fork shares all blocks"
    assert tables[2] == [[1, 3], [1, 2]], "the first to write has a copy of the last one"
    assert tables[4][0][0] == 1, "a hit"
    assert sorted(tables[5][0]) == [1, 2, 3, 4, 5, 6], "the hit block was evicted"


def test_it_runs_alone() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "kvkeeper.cache_service.tiny_cache"], capture_output=True, text=True, check=True
    )
    assert [line for line in told.stdout.splitlines() if line[0] != " "] == [text for text, _ in story()]


def test_a_prompt_leaves_a_token_to_compute() -> None:
    cache = TinyCache(num_blocks=4, block_size=2)
    cache.create(1, [5, 6], 4)
    assert cache.step(starts=[Start(1, 2, 2)]).starts == [0]
    cache.create(2, [5, 6], 4)
    reply = cache.step(commits=[Commit(1, 2, (7,))], starts=[Start(2, 2, 2)])
    assert reply.starts == [0], "both tokens are cached, and the last one is computed again"
    cache.check()


class Twins(CoreCache):
    """Both caches under one scheduler: each step goes to both, and their replies have to say the same."""

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int) -> None:
        super().__init__(num_blocks, block_size, max_sequences, eviction_policy="lru", audit_every=50)
        self.tiny = TinyColumns(num_blocks, block_size, max_sequences)
        self.is_compared = True
        self.num_adopted = self.num_hits = self.num_copies = self.num_forks = self.num_evicting = 0

    def create(self, *args: Any, **options: Any) -> int:
        self.tiny.create(*args, **options)
        return super().create(*args, **options)

    def step(self, plan: Plan) -> StepReply:
        plan = plan._replace(start_may_wait=np.zeros_like(plan.start_may_wait))
        num_free, num_cached = len(self.tiny.free), self.tiny.num_cached_blocks
        reply, tiny = super().step(plan), self.tiny.step(plan)
        # The core finds out after its reply that a block has a twin. Until then both take room, and it may evict one more.
        num_adopted = self.manager.queries.stats().num_adopted_blocks
        self.is_compared &= num_adopted == self.num_adopted or reply.num_free > 0
        self.num_adopted = num_adopted
        if not self.is_compared:
            return reply
        for name in ("fork_results", "start_results", "start_hits", "start_reserved", "start_num_blocks", "reserve_reserved"):
            assert getattr(reply, name).tolist() == getattr(tiny, name).tolist(), name
        assert reply.new_block_item_idx.tolist() == tiny.new_block_item_idx.tolist()
        assert len(reply.copy_sources) == len(tiny.copy_sources)
        self.num_hits += int((reply.start_hits > 0).sum())
        self.num_copies += len(reply.copy_sources)
        self.num_forks += len(reply.fork_results)
        self.num_evicting += num_free == 0 and self.tiny.num_cached_blocks < num_cached
        return reply


def test_the_core_gives_the_same() -> None:
    num_hits = num_copies = num_forks = num_evicting = 0
    for seed in range(40):
        dice = random.Random(seed)
        block_size = dice.choice([1, 2, 3, 4])
        running = dice.choice([1, 2, 4])
        # Room for all that runs: where blocks are short, the core goes by claims, which the small cache does not know.
        num_blocks = 1 + (running + 1) * -(-16 // block_size)
        world = World(num_blocks, block_size, chunk_size=dice.choice([2, 5, 64]), max_running=running, make_cache=Twins)
        for _ in range(20):
            prompt = [dice.randrange(2) for _ in range(dice.randrange(1, 10))]
            request = world.submit(make_request(prompt, dice.randrange(1, 7), n=dice.choice([1, 1, 2, 3])))
            if dice.random() < 0.2:
                world.cancel(request, after=dice.randrange(6))
            for _ in range(dice.randrange(3)):
                world.step()
        world.run()
        world.check_outputs()
        assert world.scheduler.state.num_preemptions == 0
        assert world.cache.tiny.num_reusable_blocks == num_blocks - 1
        num_hits, num_copies = num_hits + world.cache.num_hits, num_copies + world.cache.num_copies
        num_forks, num_evicting = num_forks + world.cache.num_forks, num_evicting + world.cache.num_evicting
    assert min(num_hits, num_copies, num_forks, num_evicting) > 50, "what a cache is for was seen"


def test_the_example_of_the_tour_hits_a_block_and_copies_one(capsys: pytest.CaptureFixture[str]) -> None:
    (fence,) = [fence for fence in page("docs/tour.md").fences() if fence.language == "python"]
    exec(fence.body, {})
    _, forked, hit = capsys.readouterr().out.splitlines()
    assert "copies=[(2, 3)]" in forked
    assert "starts=[2]" in hit
