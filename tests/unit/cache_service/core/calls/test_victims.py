"""Which sequence to preempt, and what garbage is: SelectVictims and CollectGarbage on the core."""

import pytest

from kvkeeper.cache_service.core.values.errors import InvalidField
from kvkeeper.cache_service.core.values.types import Executor, SessionId
from tests.support.worlds.core_pool import ALL, A, CorePool, int32

POLICIES = ["priority", "lru", "lfu", "longest_first", "adaptive"]


def victims(pool: CorePool, policy: str = "priority", num_blocks: int = 0, share: float | None = None) -> list[int]:
    chosen = pool.manager.victims.select(A, policy, num_blocks, share)
    assert chosen.num_freed == sorted(chosen.num_freed)
    return pool.manager.state.sequences.ids[chosen.slots].tolist() if chosen.slots else []


def crowd() -> CorePool:
    """1: old, 3 blocks, of low priority; 2: 2 blocks, used last; 3: young, 1 block, used most."""
    pool = CorePool(num_blocks=20)
    pool.prefill(1, range(12), priority=-1)
    pool.prefill(2, range(100, 108))
    pool.prefill(3, range(200, 204))
    for now, named in ((1.0, 3), (2.0, 3), (3.0, 1), (4.0, 2)):
        pool.manager.state.tick(now)
        length = pool.counters(named)[2]
        pool.step(reserves=[(named, length, length)])
    pool.step()
    return pool


@pytest.mark.parametrize(
    ("policy", "order"),
    [("priority", [1, 3, 2]), ("lru", [3, 1, 2]), ("lfu", [2, 1, 3]), ("longest_first", [1, 2, 3])],
)
def test_each_policy_has_its_order(policy: str, order: list[int]) -> None:
    assert victims(crowd(), policy, num_blocks=6) == order
    assert victims(crowd(), policy) == order[:1]


def test_adaptive_prefers_what_is_cheap_to_lose() -> None:
    pool = CorePool(num_blocks=20)
    pool.prefill(1, range(8))
    pool.create(2, range(100, 103))
    pool.step(starts=[(2, ALL, 0)])
    pool.step(reserves=[(2, 8, 8)])  # two blocks, nothing of it computed
    pool.step()
    assert victims(pool, "adaptive") == [2]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fork_that_frees_nothing_is_no_victim_and_two_that_share_all_are_only_together(policy: str) -> None:
    pool = CorePool(num_blocks=20)
    pool.prefill(1, range(8))
    pool.step(forks=[(1, 2, 8), (1, 3, 8)])
    pool.step()
    pool.prefill(4, range(100, 104))
    assert victims(pool, policy) == [4]
    assert sorted(victims(pool, policy, num_blocks=3)) == [1, 2, 3, 4]
    assert sorted(victims(pool, policy, num_blocks=1)) == [4]
    chosen = pool.manager.victims.select(A, policy, 3)
    assert chosen.num_freed[-1] == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_last_step_writes_is_no_victim(policy: str) -> None:
    pool = CorePool()
    pool.prefill(1, range(4))
    pool.prefill(2, range(100, 104))
    pool.step(reserves=[(1, 5, 5)])
    assert victims(pool, policy, num_blocks=9) == [2]
    pool.step()
    assert sorted(victims(pool, policy, num_blocks=9)) == [1, 2]


def test_only_what_would_come_free_counts() -> None:
    pool = CorePool(num_blocks=20)
    pool.prefill(1, range(9))
    pool.manager.prefixes.pin(A, "p", "", int32(range(8)), 60.0)
    assert pool.manager.victims.select(A, "longest_first", 9).num_freed == [1]
    pool.manager.prefixes.unpin(A, "p")
    assert pool.manager.victims.select(A, "longest_first", 9).num_freed == [3]  # cached then: to be had


def test_a_share_of_the_pool_may_stay_held() -> None:
    pool = crowd()  # 6 of 19 blocks
    assert victims(pool, "longest_first", share=0.5) == []
    assert victims(pool, "longest_first", share=0.2) == [1]
    assert victims(pool, "longest_first", share=0.0) == [1, 2, 3]
    with pytest.raises(InvalidField):
        pool.manager.victims.select(A, "best", 1)


def one_item_pool() -> tuple[CorePool, SessionId]:
    """Beside A and B, which step, session c makes calls: 4 known tokens, 12 reserved ones."""
    pool, session = CorePool(num_blocks=20), SessionId("c")
    pool.manager.sessions.open(session, Executor.CACHE)
    pool.create(1, range(4), session=session)
    pool.manager.one_item.extend(session, 1, 12, look_up=False)
    return pool, session


def test_another_sessions_sequence_is_cut_only_when_it_was_not_used_for_long() -> None:
    pool, _ = one_item_pool()
    assert pool.manager.garbage.collect(A).num_trimmed_blocks == 0
    pool.manager.state.tick(pool.manager.state.now + 10.0)
    assert pool.manager.garbage.collect(A).num_trimmed_blocks == 2


def test_what_a_stepping_session_has_reserved_stays_its_own() -> None:
    pool = CorePool()
    pool.create(1, range(4))
    pool.step(starts=[(1, ALL, 0)])
    pool.step(reserves=[(1, 12, 12)])
    pool.step()
    pool.manager.state.tick(pool.manager.state.now + 100.0)
    assert pool.manager.garbage.collect(A).num_trimmed_blocks == 0
    assert len(pool.table(1)) == 3


def test_garbage_is_also_what_has_outlived_its_time() -> None:
    pool = CorePool(num_blocks=20, prefix_ttl=5.0)
    pool.prefill(1, range(12))
    pool.manager.prefixes.pin(A, "p", "", int32(range(4)), 1.0)
    pool.step(releases=[1])
    pool.manager.state.tick(pool.manager.state.now + 6.0)
    garbage = pool.manager.garbage.collect(A)
    # What was pinned has been in use until now, so its time begins now.
    assert (garbage.num_expired_pins, garbage.num_expired_blocks, garbage.num_freed_blocks) == (1, 2, 2)
    assert pool.manager.queries.stats().num_cached_blocks == 1
    pool.audit()


def test_of_two_families_of_forks_only_the_one_that_goes_whole_is_chosen() -> None:
    pool = CorePool(num_blocks=20)
    pool.prefill(1, range(8))
    pool.prefill(2, range(100, 108))
    pool.step(forks=[(1, 3, 8), (2, 4, 8)])
    for now, named in enumerate((1, 2, 3, 4), start=1):
        pool.manager.state.tick(float(now))
        pool.step(reserves=[(named, 8, 8)])
    pool.step()
    assert victims(pool, "lru", num_blocks=2) == [1, 3]  # 2 is used less than 3, and frees nothing without 4
    assert victims(pool, "lru", num_blocks=3) == [1, 2, 3, 4]
