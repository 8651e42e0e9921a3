"""Loads that would take longer than computing: they are not ordered, told by `explain`, counted, and tried now and then."""

import pytest

from kvkeeper.cache_service.core.inspection.explain import in_words
from kvkeeper.cache_service.core.tiers.content_tier import ContentTier
from kvkeeper.cache_service.core.tiers.orders import TierRules
from kvkeeper.cache_service.core.tiers.worth import NEVER
from kvkeeper.cache_service.core.values.copies import TierResult
from kvkeeper.cache_service.core.values.types import MatchEnd
from tests.support.tiers.tier_pool import TierPool, cached, push_out
from tests.support.worlds.core_pool import ALL, int32

TOKENS = range(12)


class SlowTier:
    """A pool whose disk or remote tier has three blocks that host and device have not."""

    def __init__(self, *, weighs: bool = True, tenants: frozenset[str] | None = None, most_asked: int = 0) -> None:
        self.pool = TierPool(num_blocks=5, num_host_blocks=9)
        name = "remote" if most_asked else "disk"
        rules = TierRules(deadline=1_000.0, weighs=weighs, tenants=tenants, most_asked=most_asked, name=name)
        manager = self.pool.manager
        self.tier: ContentTier = manager.add_remote(b"key", rules) if most_asked else manager.add_disk(b"key", 9, 0, (), rules)
        self.next_id, self.now = 100, 0.0

    def fill(self) -> None:
        watch = self.pool.manager._prompts
        watch.is_on = False  # these take no time at all
        cached(self.pool, 1, TOKENS)
        push_out(self.pool, 16, sequence_id=40)
        watch.is_on = True
        self.answer(0)
        while (store := self.tier.stores.prepare(9)) is not None:
            self.tier.stores.complete(store, [TierResult.DONE] * len(store.orders))
        self.forget_hosts()

    def forget_hosts(self) -> None:
        """What the host tier has cached makes room."""
        host = self.pool.manager.swapper.host  # type: ignore[union-attr]
        blocks = host.take_blocks(host.pool.num_available, held=False)
        host.return_blocks(blocks)

    def answer(self, num_stored: int) -> None:
        """What is asked is told."""
        for question in self.tier.questions.take():
            self.tier.complete_question(question, num_stored)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.pool.manager.state.tick(self.now)

    def measure_prompts(self, seconds_a_token: float) -> None:
        """Some prompts are computed, each token in so long."""
        for num_tokens in (4, 8, 2, 6, 4):
            self.next_id += 1
            self.pool.create(self.next_id, [self.next_id] * num_tokens)
            self.answer(0)
            moved = self.pool.run(self.pool.step(starts=[(self.next_id, ALL, 0)]))
            self.pass_time(seconds_a_token * num_tokens)
            self.pool.step(commits=[(self.next_id, num_tokens, [])], done=moved)
            self.pool.release(self.next_id)

    def measure_loads(self, seconds_a_block: float) -> None:
        for count in (1, 2, 3, 1):
            self.tier.worth.note_load(count, seconds_a_block * count, self.now)

    def ask(self) -> int:
        """How many loads a new sequence with the tokens leads to; they are run at once, and forgotten again."""
        self.next_id += 1
        self.pool.create(self.next_id, [*TOKENS, 5])
        self.answer(3)
        loads = self.tier.loads.take()
        for load in loads:
            self.pass_time(0.5 * len(load.orders))
            self.tier.loads.complete(load, [TierResult.DONE] * len(load.orders))
        self.forget_hosts()
        self.pool.step(releases=[self.next_id])
        return len(loads)


def test_prompts_are_measured_from_start_to_commit() -> None:
    world = SlowTier()
    world.measure_prompts(0.25)
    assert world.pool.manager.queries.stats().prefill_rate_tokens == 4


def test_a_pool_without_lower_tiers_measures_nothing() -> None:
    pool = TierPool()
    cached(pool, 1, TOKENS)
    assert pool.manager.queries.stats().prefill_rate_tokens == 0


def test_loads_are_measured_from_wish_to_end_and_pay_where_computing_takes_longer() -> None:
    world = SlowTier()
    world.fill()
    world.measure_prompts(1.0)  # four seconds a block
    assert [world.ask() for _ in range(5)] == [1] * 5
    stats = world.pool.manager.queries.stats()
    assert (stats.num_disk_loads, stats.num_unworthy_disk_loads) == (5, 0)
    assert world.tier.worth.loads.each == pytest.approx(0.5)
    assert stats.disk_break_even_tokens == 4


def test_loads_that_take_longer_than_computing_are_not_ordered_but_for_a_trial() -> None:
    world = SlowTier()
    world.fill()
    world.measure_prompts(0.01)
    assert [world.ask() for _ in range(4)] == [1] * 4  # the first four are how it is found out
    assert sum(world.ask() for _ in range(16)) == 1
    stats = world.pool.manager.queries.stats()
    assert (stats.num_disk_loads, stats.num_unworthy_disk_loads, stats.disk_break_even_tokens) == (5, 15, NEVER)
    found = world.pool.manager.queries.explain_match("", int32(TOKENS))
    assert found.end is MatchEnd.NOT_WORTH_LOADING
    assert "later than it is computed" in in_words(found)


def test_without_the_switch_they_are_ordered_all_the_same() -> None:
    world = SlowTier(weighs=False)
    world.fill()
    world.measure_prompts(0.01)
    assert sum(world.ask() for _ in range(20)) == 20
    assert world.pool.manager.queries.explain_match("", int32(TOKENS)).end is MatchEnd.ON_DISK


def test_a_store_is_not_even_asked_where_no_answer_would_pay() -> None:
    world = SlowTier(most_asked=8)
    world.fill()
    world.measure_prompts(0.01)
    world.measure_loads(9.0)
    assert sum(world.ask() for _ in range(16)) == 1
    assert world.pool.manager.queries.stats().num_unworthy_remote_loads == 15


def test_the_time_of_the_question_counts_for_the_load() -> None:
    world = SlowTier(most_asked=8)
    world.fill()
    world.pool.create(50, [*TOKENS, 5])
    (question,) = world.tier.questions.take()
    world.pass_time(3.0)
    world.tier.complete_question(question, 3)
    (load,) = world.tier.loads.take()
    world.pass_time(2.0)
    world.tier.loads.complete(load, [TierResult.DONE] * len(load.orders))
    assert world.tier.worth.loads.seconds(3) == pytest.approx(5.0)


def test_loads_that_lost_a_block_are_not_measured() -> None:
    world = SlowTier()
    world.fill()
    world.pool.create(50, [*TOKENS, 5])
    (load,) = world.tier.loads.take()
    world.tier.loads.complete(load, [TierResult.DONE, TierResult.FAILED, TierResult.DONE])
    assert world.tier.worth.loads.num_samples == 0


@pytest.mark.parametrize(("tenants", "num_stored"), [(None, 3), (frozenset({""}), 3), (frozenset({"b"}), 0)])
def test_blocks_of_the_named_tenants_are_stored(tenants: frozenset[str] | None, num_stored: int) -> None:
    world = SlowTier(tenants=tenants)
    world.fill()
    assert world.pool.manager.queries.stats().num_disk_stored_blocks == num_stored
