"""What hints of reuse do to the eviction order, by examples of a few blocks of one token each, under every policy."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.cache_service.core.blocks.hint_record import LEAST_ENDED
from kvkeeper.cache_service.core.blocks.reuse_order import SOON_SECONDS, ReuseOrder
from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.values.errors import InvalidField
from kvkeeper.cache_service.core.values.types import ReuseHint
from kvkeeper.cache_service.replay import replay_core, replay_optimum
from tests.benchmarks.hints import OPPOSITE, right_hints
from tests.support.reference.workloads import WORKLOADS
from tests.support.slices import todays
from tests.support.worlds.core_pool import A, B, CorePool

ANY, NONE, SOON = ReuseHint.UNSPECIFIED, ReuseHint.NONE, ReuseHint.SOON


class Hinted:
    """A pool with blocks of one token; each run is one sequence from start to end."""

    def __init__(self, policy: str = "lru", num_blocks: int = 33, **config: object) -> None:
        self.pool = CorePool(num_blocks, 1, eviction_policy=policy, max_sequences=8, **config)
        self.last_id = 0

    def start(self, tokens: list[int], hint: ReuseHint = ReuseHint.UNSPECIFIED, tenant: str = "", seconds: float = 0.0) -> int:
        self.last_id += 1
        self.pool.prefill(self.last_id, tokens, reuse_hint=hint, tenant=tenant, retain_seconds=seconds)
        return self.last_id

    def end(self, *sequence_ids: int) -> None:
        self.pool.step(releases=sequence_ids)
        self.pool.step()  # the release is fenced until the step before has completed

    def run(self, tokens: list[int], hint: ReuseHint = ReuseHint.UNSPECIFIED, tenant: str = "") -> None:
        self.end(self.start(tokens, hint, tenant))

    @property
    def counts(self) -> tuple[int, int]:
        stats = self.pool.manager.queries.stats()
        return stats.num_no_reuse_blocks, stats.num_soon_blocks

    @property
    def order(self) -> ReuseOrder:
        order = self.pool.manager.state.pool.reuse
        assert order is not None
        return order


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_nothing_will_use_goes_first_and_what_is_used_soon_goes_last(policy: str) -> None:
    hinted = Hinted(policy)
    hinted.run([1, 2], SOON)
    hinted.run([3, 4])
    hinted.run([5, 6], NONE)
    hinted.run([7, 8], NONE)
    assert hinted.counts == (4, 2)
    blocks = [hinted.pool.matched(prompt)[-1] for prompt in ([1, 2], [3, 4], [5, 6])]
    hints = [hinted.pool.manager.queries.block_view(block).reuse_hint for block in blocks]
    assert hints == [SOON, ReuseHint.UNSPECIFIED, NONE]
    assert hinted.pool.evicted([1, 2], [3, 4], [5, 6], [7, 8]) == [6, 5, 8, 7, 4, 3, 2, 1]


def test_without_a_hint_nothing_is_made_of_hints() -> None:
    hinted = Hinted()
    hinted.run([1, 2])
    assert hinted.pool.manager.state.pool.reuse is None
    assert hinted.counts == (0, 0)


@pytest.mark.parametrize(
    ("runs", "counts", "order"),
    [
        pytest.param([([1, 2, 3], ANY), ([1, 2, 4], NONE)], [(0, 0), (1, 0)], [4, 3, 2, 1],
                     id="the end of one conversation leaves a shared prompt alone"),
        pytest.param([([1, 2, 3], ANY), ([1, 2], NONE)], [(0, 0), (0, 0)], [3, 2, 1],
                     id="an end inside what another one has cached marks nothing"),
        pytest.param([([9], ANY), ([1, 2], SOON), ([1, 2, 3, 4], NONE)], [(0, 0), (0, 2), (4, 0)], [4, 3, 2, 1, 9],
                     id="a conversation that has ended goes with all its turns"),
        pytest.param([([1, 2], SOON), ([1, 2, 3], ANY), ([4], ANY)], [(0, 2), (0, 0), (0, 0)], [3, 2, 1, 4],
                     id="a turn that came and says nothing is no longer awaited"),
        pytest.param([([1, 2, 3], SOON), ([1, 2, 4], NONE), ([5], ANY)], [(0, 3), (1, 3), (1, 3)], [4, 5, 3, 2, 1],
                     id="another branch leaves what is awaited alone"),
        pytest.param([([1, 2], NONE), ([1, 2, 3], ANY), ([1, 2, 4], NONE), ([5], NONE)],
                     [(2, 0), (0, 0), (1, 0), (2, 0)], [4, 5, 3, 2, 1],
                     id="a sequence that counts on it makes a prompt normal again"),
    ],
)  # fmt: skip
def test_what_sequences_say_one_after_the_other(
    runs: list[tuple[list[int], ReuseHint]], counts: list[tuple[int, int]], order: list[int]
) -> None:
    hinted, told = Hinted(), []
    for tokens, hint in runs:
        hinted.run(tokens, hint)
        told.append(hinted.counts)
    assert told == counts
    assert hinted.pool.evicted(*(tokens for tokens, _ in runs)) == order


def test_a_prompt_that_was_shared_stays_shared_when_its_other_conversations_are_gone() -> None:
    hinted = Hinted()
    for last in (3, 4):
        hinted.run([1, 2, last], NONE)
    hinted.run([1, 2, 5])  # it counts on the prompt
    hinted.run([1, 2, 6])
    hinted.pool.manager.evictions.evict_count(4)
    assert hinted.pool.matched([1, 2]) != []
    hinted.run([1, 2, 7], NONE)  # alone below the prompt now
    hinted.run([8])
    assert hinted.counts == (1, 0)
    assert hinted.pool.evicted([1, 2, 7], [8])[0] == 7


def test_a_pin_makes_a_prompt_normal_again() -> None:
    hinted = Hinted()
    hinted.run([1, 2], NONE)
    pinned = hinted.pool.manager.prefixes.pin(A, "p" * 32, "", np.array([1, 2], np.int32), 10.0)
    hinted.pool.manager.prefixes.unpin(A, pinned.pin_id)
    hinted.pool.audit()
    assert hinted.counts == (0, 0)


def test_while_another_sequence_holds_it_a_block_stays_normal() -> None:
    hinted = Hinted()
    first, second = hinted.start([1, 2]), hinted.start([1, 2, 3], NONE)
    hinted.end(second)
    hinted.end(first)
    assert hinted.counts == (1, 0)


def test_a_sequence_is_retained_for_its_time_and_so_are_its_forks_until_it_says_otherwise() -> None:
    hinted = Hinted()
    parent = hinted.start([1, 2], SOON, seconds=600.0)
    hinted.pool.step(forks=[(parent, 20, 2)])
    hinted.end(parent, 20)
    other = hinted.start([3, 4], SOON, seconds=600.0)
    hinted.pool.manager.updates.update(A, other, reuse_hint=NONE)
    hinted.pool.manager.updates.update(A, other, reuse_hint=SOON)
    hinted.end(other)
    assert hinted.counts == (0, 4)
    hinted.pool.manager.state.tick(599.9)
    hinted.pool.manager.maintenance.do_due_work()
    assert hinted.counts == (0, 2)
    assert hint_of(hinted, [1, 2]) is SOON
    hinted.pool.manager.state.tick(600.1)
    hinted.pool.manager.maintenance.do_due_work()
    assert hinted.counts == (0, 0)


def test_a_time_counts_also_where_nearly_all_sequences_have_one() -> None:
    hinted = Hinted(num_blocks=400)
    for number in range(2 * LEAST_ENDED):
        hinted.end(hinted.start([2 * number, 2 * number + 1], SOON, seconds=61.0))
    assert hinted.counts == (0, 4 * LEAST_ENDED)


def test_forks_say_what_their_parent_says() -> None:
    hinted = Hinted()
    parent = hinted.start([1, 2], NONE)
    hinted.pool.step(forks=[(parent, 20, 2)])
    assert hinted.pool.view(20).reuse_hint is NONE
    hinted.end(parent)
    assert hinted.counts == (0, 0)
    hinted.end(20)
    assert hinted.counts == (2, 0)


def test_a_hint_may_change_while_the_sequence_runs() -> None:
    hinted = Hinted()
    running = hinted.start([1, 2], NONE)
    hinted.pool.manager.updates.update(A, running, reuse_hint=SOON)
    assert hinted.pool.view(running).reuse_hint is SOON
    hinted.end(running)
    assert hinted.counts == (0, 2)
    other = hinted.start([3])
    hinted.pool.manager.updates.update(A, other, reuse_hint=NONE)
    hinted.end(other)
    assert hinted.counts == (1, 2)


def test_a_sequence_keeps_its_hint_when_it_changes_its_session() -> None:
    hinted = Hinted()
    running = hinted.start([1, 2], NONE)
    hinted.pool.step()
    offer = hinted.pool.manager.hand_offs.offer(A, running, b"o" * 16)
    hinted.pool.manager.hand_offs.take(B, offer, 7)
    assert hinted.pool.view(7, session=B).reuse_hint is NONE


def test_the_same_create_with_another_hint_is_another_sequence() -> None:
    hinted = Hinted()
    hinted.pool.create(1, [1, 2], reuse_hint=NONE)
    hinted.pool.create(1, [1, 2], reuse_hint=NONE)
    with pytest.raises(Exception, match="sequence 1 exists"):
        hinted.pool.create(1, [1, 2], reuse_hint=SOON)


def test_only_a_share_of_the_pool_is_awaited_and_the_oldest_is_given_up() -> None:
    hinted = Hinted(num_blocks=17)  # 4 blocks of 16
    for prompt in ([1, 2, 3], [4, 5]):
        hinted.run(prompt, SOON)
    hinted.run([6])
    assert hinted.counts == (0, 4)
    assert hinted.pool.evicted([1, 2, 3], [4, 5], [6]) == [3, 6, 2, 1, 5, 4]


def test_nothing_is_awaited_for_longer_than_its_time() -> None:
    hinted = Hinted()
    hinted.run([1, 2], SOON)
    hinted.run([3])
    hinted.pool.manager.state.tick(SOON_SECONDS[0] - 0.1)
    assert not hinted.pool.manager.maintenance.do_due_work()
    assert hinted.counts == (0, 2)
    hinted.pool.manager.state.tick(SOON_SECONDS[0] + 0.1)
    assert not hinted.pool.manager.maintenance.do_due_work()
    hinted.pool.audit()
    assert hinted.counts == (0, 0)


def test_a_share_of_0_awaits_nothing() -> None:
    hinted = Hinted(soon_share=0.0)
    hinted.run([1, 2], SOON)
    assert hinted.counts == (0, 0)
    with pytest.raises(InvalidField, match="soon_share"):
        Hinted(soon_share=1.5)


def test_a_long_awaited_chain_lapses_in_slices() -> None:
    hinted = Hinted(num_blocks=2000, soon_share=1.0, max_tokens_per_sequence=1999)
    hinted.run(list(range(1500)), SOON)
    hinted.pool.manager.state.tick(SOON_SECONDS[0] + 1)
    left = []
    while hinted.pool.manager.maintenance.do_due_work():
        left.append(hinted.counts[1])
    assert left == [988, 476]


@pytest.mark.parametrize("hint", [NONE, SOON])
def test_what_nearly_all_sequences_say_counts_for_nothing(hint: ReuseHint) -> None:
    hinted = Hinted()
    for _ in range(LEAST_ENDED):
        hinted.run([1, 2], hint)
        assert hinted.counts[hint - 1] == 2
    hinted.run([1, 2], hint)
    assert hinted.counts[hint - 1] == 0
    hinted.run([3])
    hinted.run([1, 2], hint)
    assert hinted.counts[hint - 1] == 2


def test_what_waits_as_soon_lapses_once_all_others_say_the_same() -> None:
    hinted = Hinted(num_blocks=400)
    for number in range(2 * LEAST_ENDED):
        assert hinted.counts == (0, 3 * min(number, 2 * LEAST_ENDED - number))
        hinted.run([3 * number, 3 * number + 1, 3 * number + 2], SOON)
    assert hinted.counts == (0, 0)


@pytest.mark.parametrize(("name", "hint"), todays([(name, hint) for name in sorted(WORKLOADS) for hint in (NONE, SOON)], 3))
def test_where_every_sequence_says_the_same_lru_stays_lru(name: str, hint: ReuseHint) -> None:
    requests = WORKLOADS[name](1)[:1000]
    plain = replay_core(requests, 300, "lru")
    hinted = replay_core(requests, 300, "lru", hints=[hint] * len(requests))
    assert hinted.hit_rate >= plain.hit_rate - 0.001


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda order, blocks: order._classes.__setitem__(blocks[1], 1), "is expected sooner than the one above it"),
        (lambda order, blocks: order._classes.__setitem__(blocks[0], -1), "is expected later than one below it"),
        (lambda order, blocks: order._classes.__setitem__(30, 1), "block 30 has a class without being indexed"),
        (lambda order, blocks: setattr(order, "num_soon", 1), "the numbers of blocks that are not expected back, or soon"),
        (lambda order, blocks: setattr(order, "_most_soon", -1), "more blocks are expected soon than may be"),
    ],
)
def test_the_audit_tells(damage: Callable[[ReuseOrder, list[int]], None], found: str) -> None:
    hinted = Hinted()
    hinted.run([9], NONE)
    hinted.run([1, 2])
    damage(hinted.order, hinted.pool.matched([1, 2]))
    assert any(found in text for text in hinted.pool.manager.queries.check_invariants())


def hint_of(hinted: Hinted, prompt: list[int]) -> ReuseHint:
    return hinted.pool.manager.queries.block_view(hinted.pool.matched(prompt)[-1]).reuse_hint


def test_a_prompt_is_normal_as_soon_as_a_sequence_counts_on_it() -> None:
    hinted = Hinted()
    hinted.run([1, 2], NONE)
    hinted.start([1, 2, 3])
    assert hint_of(hinted, [1, 2]) is ReuseHint.UNSPECIFIED
    running = hinted.start([4], NONE)
    assert hint_of(hinted, [4]) is NONE
    hinted.pool.manager.updates.update(A, running, reuse_hint=SOON)
    assert hint_of(hinted, [4]) is ReuseHint.UNSPECIFIED


def test_a_block_that_is_adopted_is_normal() -> None:
    hinted = Hinted()
    for sequence_id, hint in ((1, NONE), (2, ReuseHint.UNSPECIFIED)):
        hinted.pool.create(sequence_id, [1], reuse_hint=hint)
    hinted.pool.step(starts=[(1, 10, 10), (2, 10, 10)])
    hinted.pool.step(commits=[(1, 1, [])])
    assert hint_of(hinted, [1]) is NONE
    hinted.pool.step(commits=[(2, 1, [])])
    assert hint_of(hinted, [1]) is ReuseHint.UNSPECIFIED


class Retained(Hinted):
    """A pool that gets hints of prefixes."""

    def hint(self, tokens: list[int], hint: ReuseHint, seconds: float = 0.0, tenant: str = "") -> int:
        return self.pool.manager.prefixes.hint(A, tenant, np.array(tokens, np.int32), hint, seconds)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_hint_of_a_prefix_counts_as_the_end_of_a_sequence_that_had_it(policy: str) -> None:
    pool = Retained(policy)
    for prompt in ([1, 2], [3, 4], [5, 6], [7, 8]):
        pool.run(prompt)
    assert pool.hint([1, 2, 99], SOON) == 2
    assert pool.hint([7, 8], NONE) == 2
    assert pool.hint([98], SOON) == 0
    assert pool.counts == (2, 2)
    assert pool.pool.evicted([1, 2], [3, 4], [5, 6], [7, 8]) == [8, 7, 4, 3, 6, 5, 2, 1]


def test_what_is_shared_stays_when_one_end_of_it_is_demoted_or_released() -> None:
    pool = Retained()
    pool.run([1, 2, 3])
    pool.run([1, 2, 4])
    pool.hint([1, 2, 3], NONE)
    assert pool.counts == (1, 0)
    pool.hint([1, 2, 3], SOON)
    pool.hint([1, 2, 4], SOON)
    assert pool.counts == (0, 4)
    pool.hint([1, 2, 4], ANY)
    assert pool.counts == (0, 3)


@pytest.mark.parametrize(
    ("seconds", "waits"), [(0, 60), (60, 60), (60.001, 600), (600, 600), (601, 3600), (3600, 3600), (9e9, 3600)]
)
def test_what_is_retained_waits_for_the_first_time_that_is_as_long(seconds: float, waits: float) -> None:
    pool = Retained()
    pool.run([1, 2])
    pool.hint([1, 2], SOON, seconds)
    pool.pool.manager.state.tick(waits - 0.1)
    pool.pool.manager.maintenance.do_due_work()
    assert pool.counts == (0, 2)
    pool.pool.manager.state.tick(waits + 0.1)
    pool.pool.manager.maintenance.do_due_work()
    assert pool.counts == (0, 0)


def test_what_has_the_shortest_time_yields_first_and_a_shorter_hint_takes_nothing_away() -> None:
    pool = Retained(num_blocks=9, soon_share=0.5)
    pool.run([1, 2])
    pool.run([3, 4])
    pool.run([5, 6])
    pool.hint([1, 2], SOON, 3600)
    pool.hint([1, 2], SOON)
    pool.hint([3, 4], SOON)
    pool.hint([5, 6], SOON, 600)  # beyond the share
    assert pool.counts == (0, 4)
    assert pool.pool.evicted([1, 2], [3, 4], [5, 6]) == [4, 3, 6, 5, 2, 1]


def test_a_hint_leaves_what_a_sequence_holds_where_it_is() -> None:
    pool = Retained()
    sequence_id = pool.start([1, 2, 3])
    assert pool.hint([1, 2, 3], SOON) == 3
    assert pool.counts == (0, 0)
    pool.end(sequence_id)
    assert pool.counts == (0, 0)  # it says nothing, so that its tail is no longer expected


STEPS = st.lists(
    st.tuples(
        st.sampled_from([[90 + number, *range(100, 100 + length)] for number in range(4) for length in range(4)]),
        st.sampled_from([ANY, NONE, SOON]),
        st.sampled_from([None, 0.0, 61.0, 3600.0]),  # a hint of the prefix for so long; None: a sequence ends
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS, st.sampled_from(POLICY_NAMES), st.sampled_from([0.0, 61.0]))
def test_whatever_another_tenant_hints_what_a_tenant_retains_within_its_share_stays(
    steps: list[tuple[list[int], ReuseHint, float | None]], policy: str, seconds: float
) -> None:
    pool = Retained(policy)  # 8 of 32 blocks are retained, so 4 for each of two tenants
    pool.run([1, 2, 3, 4], tenant="a")
    pool.hint([1, 2, 3, 4], SOON, seconds, tenant="a")
    for tokens, hint, retained in steps:
        if retained is None:
            pool.run(tokens, hint, tenant="b")
        else:
            pool.hint(tokens, hint, retained, tenant="b")
        blocks = pool.pool.matched([1, 2, 3, 4], "a")
        assert [pool.order.get_hint(block) for block in blocks] == [SOON] * 4
    pool.pool.audit()


def test_hints_of_another_tenant_that_count_for_nothing_end_no_wait_but_its_own() -> None:
    pool = Retained(num_blocks=400)
    pool.run([1, 2, 3, 4], tenant="a")
    pool.hint([1, 2, 3, 4], SOON, tenant="a")
    for number in range(10, 10 + 4 * LEAST_ENDED):
        pool.run([number], SOON, tenant="b")
    assert hints_of(pool, [1, 2, 3, 4], "a") == [SOON] * 4
    assert pool.counts == (0, 4)


def test_of_tenants_that_retain_too_much_the_one_with_most_yields() -> None:
    pool = Retained()  # 8 blocks
    for tenant, tokens in (("a", [1, 2, 3]), ("b", [*range(10, 16)]), ("c", [20])):
        pool.run(tokens, tenant=tenant)
        pool.hint(tokens, SOON, 3600.0 if tenant == "b" else 0.0, tenant=tenant)
    held = {
        tenant: hints_of(pool, tokens, tenant) for tenant, tokens in (("a", [1, 2, 3]), ("b", [*range(10, 16)]), ("c", [20]))
    }
    assert held == {"a": [SOON] * 3, "b": [SOON] * 4 + [ANY] * 2, "c": [SOON]}
    assert pool.counts == (0, 8)


def test_under_pressure_what_tenants_retain_goes_until_they_have_as_much() -> None:
    pool = Retained(num_blocks=9, soon_share=1.0)
    for tenant, tokens in (("a", [1, 2]), ("b", [10, 11, 12, 13, 14])):
        pool.run(tokens, tenant=tenant)
        pool.hint(tokens, SOON, 3600.0 if tenant == "b" else 0.0, tenant=tenant)
    pool.pool.manager.evictions.evict_count(3)
    assert [len(pool.pool.matched(*each)) for each in (([1, 2], "a"), ([10, 11, 12, 13, 14], "b"))] == [2, 2]
    pool.pool.manager.evictions.evict_count(2)
    assert [len(pool.pool.matched(*each)) for each in (([1, 2], "a"), ([10, 11, 12, 13, 14], "b"))] == [1, 1]
    pool.pool.audit()


def test_what_nearly_all_sequences_of_others_say_takes_no_hint_from_a_tenant() -> None:
    hinted = Hinted(num_blocks=400)
    for number in range(4 * LEAST_ENDED):
        hinted.run([number], SOON, tenant="b")
        hinted.run([9], ANY, tenant="a") if not number else None
    hinted.run([5, 6], SOON, tenant="a")
    assert hints_of(hinted, [5, 6], "a") == [SOON, SOON]


def hints_of(hinted: Hinted, prompt: list[int], tenant: str = "") -> list[ReuseHint]:
    return [hinted.pool.manager.queries.block_view(block).reuse_hint for block in hinted.pool.matched(prompt, tenant)]


def test_many_tenants_that_retain_lapse_in_slices() -> None:
    pool = Retained(num_blocks=400, soon_share=1.0)
    for number in range(300):
        pool.run([1], tenant=str(number))
        pool.hint([1], SOON, tenant=str(number))
    assert pool.counts == (0, 300)
    pool.pool.manager.state.tick(SOON_SECONDS[0] + 1)
    assert pool.pool.manager.maintenance.do_due_work()
    assert 0 < pool.counts[1] < 300
    while pool.pool.manager.maintenance.do_due_work():
        pass
    assert pool.counts == (0, 0)


@pytest.mark.parametrize("policy", todays(["lru", "adaptive"], 1))
def test_right_hints_of_agents_are_near_the_optimum_and_wrong_ones_cost_little(policy: str) -> None:
    requests = WORKLOADS["agents"](0)
    right = right_hints(requests)
    hints = {"right": right, "wrong": [OPPOSITE[hint] for hint in right]}
    rates = {kind: replay_core(requests, 200, policy, hints=given).hit_rate for kind, given in hints.items()}
    assert rates["right"] >= 0.97 * replay_optimum(requests, 200).hit_rate
    assert rates["wrong"] >= replay_core(requests, 200, "lru").hit_rate - 0.05
