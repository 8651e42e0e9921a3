"""Retention sink + window: exactly the first and the last tokens stay, at their positions."""

import pytest

from kvkeeper.cache_service.core.values.errors import DuplicateSequence, InvalidField, NeverFits
from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.types import BlockState, SequenceId, StartResult
from tests.support.reference.shadow_memory import Contents, Read, ShadowMemory
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32
from tests.support.worlds.retained import KEPT, all_blocks, grow, holes, wholly_unread

EDGES = [n for k in (1, 2, 3, 4) for n in (4 * k - 1, 4 * k, 4 * k + 1)]  # kB - 1, kB, kB + 1 of block size 4


@pytest.mark.parametrize(("sink", "window"), KEPT)
def test_a_block_is_dropped_when_its_last_token_leaves_the_window_and_not_before(sink: int, window: int) -> None:
    pool = CorePool(num_blocks=17)
    pool.create(1, [7], retention=Retention(sink, window))
    pool.step(starts=[(1, 1, 0)])
    for length in range(1, 30):
        grow(pool, 1, length)
        assert holes(pool, 1) == wholly_unread(length, sink, window), length
        assert len(pool.table(1)) == -(-length // 4)


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize(("sink", "window"), [(0, 4), (3, 2), (5, 5)])
def test_positions_do_not_drift_and_an_append_overwrites_no_live_token(length: int, sink: int, window: int) -> None:
    pool, contents, memory = CorePool(num_blocks=17), Contents(), ShadowMemory(17, 4)
    pool.create(1, [7], retention=Retention(sink, window))
    pool.step(starts=[(1, 1, 0)])
    for position in range(length + 5):
        grow(pool, 1, position)
        pool.step(reserves=[(1, position + 1, position + 1)])
        spelled = contents.spell("", [7, *[0] * position])
        memory.write(memory.slot(pool.table(1), position), spelled[position])
        read = Read("1", pool.table(1), spelled, range(sink, position + 1 - window))
        assert memory.check("", [read]) == []


def test_what_is_dropped_is_told_and_waits_for_the_step_in_flight() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, range(12), retention=Retention(0, 4))
    table = pool.step(starts=[(1, 12, 0)]).start_block_ids.tolist()
    pool.step(reserves=[(1, 13, 13)])
    reply = pool.step(lag=1, commits=[(1, 12, [])])
    found = (reply.update_ids.tolist(), reply.update_table_idx.tolist(), reply.update_block_ids.tolist())
    assert tuple(map(sorted, found)) == ([1, 1], [0, 1], [0, 0])
    assert reply.num_fenced == 2
    assert [pool.state(block) for block in table[:2]] == [BlockState.FENCED] * 2
    assert pool.step(lag=1).num_fenced == 0
    assert [pool.state(block) for block in table[:2]] == [BlockState.CACHED, BlockState.FREE]  # the first was published


def test_drops_are_counted_as_evictions() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, range(20), retention=Retention(0, 4))
    pool.step(starts=[(1, 20, 0)])
    pool.step(commits=[(1, 20, [])])
    stats = pool.manager.queries.stats()
    assert (stats.num_retention_dropped_blocks, stats.num_evicted_blocks) == (4, 4)
    assert (stats.num_referenced_blocks, stats.slot_utilization) == (1, 1.0)


def test_a_block_with_another_holder_is_only_let_go() -> None:
    pool = CorePool(num_blocks=9)
    table = pool.prefill(1, range(12))
    pool.create(2, range(12), retention=Retention(0, 8), session=B)
    assert pool.step(B, starts=[(2, ALL, ALL)]).start_hits.tolist() == [8]
    pool.step(B, commits=[(2, 12, [])])
    assert pool.table(2, session=B)[:2] == [0, table[1]]
    assert (pool.table(1), pool.state(table[0])) == (table, BlockState.REFERENCED)


@pytest.mark.parametrize(("sink", "window"), KEPT)
def test_only_blocks_below_sink_plus_window_are_hit_and_published(sink: int, window: int) -> None:
    shared = (sink + window) // 4
    pool = CorePool(num_blocks=33)
    pool.prefill(1, range(21), retention=Retention(sink, window))
    assert len(pool.matched(range(21))) == min(shared, 5)
    pool.manager.prefixes.clear()
    pool.prefill(2, range(21))
    assert len(pool.matched(range(21))) == 5
    pool.create(3, range(21), retention=Retention(sink, window))
    assert pool.step(starts=[(3, ALL, ALL)]).start_hits.tolist() == [4 * min(shared, 5)]


def test_a_published_block_is_still_hit_after_its_sequence_dropped_it() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(12), retention=Retention(0, 8))
    grow(pool, 1, 20, chunk=4)
    assert holes(pool, 1) == [0, 1, 2]
    assert len(pool.matched(range(12))) == 2
    pool.create(2, range(12), session=B)
    assert pool.step(B, starts=[(2, ALL, ALL)]).start_hits.tolist() == [8]


def test_a_prompt_longer_than_the_pool_is_computed_in_chunks() -> None:
    pool = CorePool(num_blocks=6, max_tokens_per_sequence=200)
    pool.create(1, range(120), retention=Retention(4, 8))
    reply = pool.step(starts=[(1, 8, ALL)])
    assert reply.start_results.tolist() == [StartResult.STARTED]
    pool.step(commits=[(1, 8, [])])
    grow(pool, 1, 200, chunk=4)
    assert holes(pool, 1) == list(range(1, 48))
    assert pool.manager.queries.stats().peak_used_blocks <= 5
    pool.step(releases=[1])
    assert sorted(all_blocks(pool)) == [1, 2, 3, 4, 5]


def test_a_sequence_with_a_sink_and_window_that_do_not_fit_never_fits() -> None:
    pool = CorePool(num_blocks=6, max_tokens_per_sequence=200)
    with pytest.raises(NeverFits) as refused:
        pool.create(1, range(21), retention=Retention(4, 13))
    assert refused.value.metadata == {"requested": "21", "limit": "20"}
    pool.create(1, range(20), retention=Retention(4, 13))
    pool.create(2, range(200), retention=Retention(4, 12))
    with pytest.raises(NeverFits):
        pool.create(3, range(201), retention=Retention(4, 12))
    with pytest.raises(NeverFits):
        pool.create(3, range(21))


def test_a_reservation_that_the_pool_can_never_hold_at_once_is_refused_and_claims_nothing() -> None:
    pool = CorePool(num_blocks=6, max_tokens_per_sequence=200)
    pool.create(1, range(120), retention=Retention(4, 8))
    pool.step(starts=[(1, 20, 0)])
    pool.create(2, range(120), retention=Retention(4, 8))
    with pytest.raises(InvalidField) as refused:
        pool.manager.one_item.extend(A, SequenceId(2), 21, look_up=True)
    assert refused.value.metadata == {"field": "num_tokens", "limit": "20"}
    for items in ({}, {"truncates": [(1, 20)]}):
        with pytest.raises(InvalidField) as refused:
            pool.step(reserves=[(1, 21, 21)], **items)
        assert refused.value.metadata == {"field": "reserve_min_tokens", "limit": "20"}
        with pytest.raises(InvalidField) as refused:  # two blocks come back by this commit
            pool.step(commits=[(1, 20, [])], reserves=[(1, 29, 29)], **items)
        assert refused.value.metadata["limit"] == "28"
    reply = pool.step(commits=[(1, 20, [])], reserves=[(1, 28, 29)])
    assert reply.reserve_reserved.tolist() == [28]


def test_admission_asks_for_what_is_held_at_once() -> None:
    pool = CorePool(num_blocks=6, max_tokens_per_sequence=200)
    assert not pool.manager.admission.check("", None, 100, 50).can_ever
    answer = pool.manager.admission.check("", None, 100, 50, Retention(4, 8))
    assert (answer.can_ever, answer.can_now, answer.num_required_blocks, answer.limit_tokens) == (True, True, 4, 200)
    assert pool.manager.admission.check("", int32(range(3)), 0, 50, Retention(4, 8)).num_required_blocks == 1
    assert not pool.manager.admission.check("", None, 100, 101, Retention(4, 8)).can_ever
    pool.prefill(1, range(6))
    assert not pool.manager.admission.check("", None, 100, 50, Retention(4, 8)).can_now


def test_a_fork_shares_the_holes() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(18), retention=Retention(2, 5))
    pool.step(forks=[(1, 2, 18), (2, 3, 17)])
    assert pool.table(1) == pool.table(2) == pool.table(3)
    assert holes(pool, 1) == [1, 2]
    pool.step(reserves=[(2, 19, 19), (3, 18, 18)])  # copies the tail that all of them share
    pool.step(commits=[(2, 19, [1]), (3, 18, [2])])
    assert holes(pool, 2) == holes(pool, 3) == [1, 2]
    pool.step(releases=[1, 3])
    grow(pool, 2, 30)
    assert holes(pool, 2) == wholly_unread(30, 2, 5)
    pool.step(releases=[2])
    assert sorted(all_blocks(pool)) == list(range(1, 9))


def test_a_fork_sees_the_holes_of_commits_in_the_same_step() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, range(18), retention=Retention(0, 4))
    pool.step(starts=[(1, 18, 0)])
    with pytest.raises(InvalidField) as refused:
        pool.step(commits=[(1, 18, [])], forks=[(1, 2, 15)])
    assert refused.value.metadata == {"field": "fork_num_tokens", "limit": "16"}
    pool.step(commits=[(1, 18, [])], forks=[(1, 2, 16)])
    assert holes(pool, 2) == [0, 1, 2]


@pytest.mark.parametrize("length", range(9, 13))
def test_a_commit_that_drops_nothing_yet_allows_any_cut_in_its_step(length: int) -> None:
    """With 12 tokens the window of 4 begins where the sink ends, so there is no hole."""
    pool = CorePool(num_blocks=17)
    pool.create(1, range(12), retention=Retention(8, 4))
    pool.step(starts=[(1, 12, 0)])
    pool.step(commits=[(1, 12, [])], truncates=[(1, length)])
    assert (pool.counters(1)[0], holes(pool, 1)) == (length, [])


@pytest.mark.parametrize(("sink", "window"), KEPT)
def test_nothing_is_cut_to_a_length_with_a_window_that_reaches_into_a_hole(sink: int, window: int) -> None:
    for length in range(1, 19):
        pool = CorePool(num_blocks=9)
        pool.prefill(1, range(18), retention=Retention(sink, window))
        gone = {4 * idx + i for idx in holes(pool, 1) for i in range(4)}
        lawful = [n for n in range(1, 19) if not gone & {i for i in range(n) if i < sink or i >= n - window}]
        if length in lawful:
            pool.step(forks=[(1, 2, length)], truncates=[(1, length)])
            assert pool.counters(1) == pool.counters(2) == (length, length, length)
            continue
        before = pool.table(1), pool.manager.queries.stats()
        for field, items in (("fork", {"forks": [(1, 2, length)]}), ("truncate", {"truncates": [(1, length)]})):
            with pytest.raises(InvalidField) as refused:
                pool.step(**items)
            assert refused.value.metadata == {
                "field": f"{field}_num_tokens",
                "limit": str(min(n for n in lawful if n > length)),
            }
        assert (pool.table(1), pool.manager.queries.stats()) == before


def test_a_sequence_cut_before_its_holes_has_none_and_grows_new_ones() -> None:
    pool = CorePool(num_blocks=9)
    table = pool.prefill(1, range(18), retention=Retention(6, 4))
    assert holes(pool, 1) == [2]
    pool.step(truncates=[(1, 7)])
    assert pool.table(1) == table[:2]
    grow(pool, 1, 30)
    assert holes(pool, 1) == wholly_unread(30, 6, 4)


def test_retention_is_one_of_the_arguments_that_a_repeat_must_have() -> None:
    pool = CorePool()
    pool.create(1, range(6), retention=Retention(1, 2))
    pool.create(1, range(6), retention=Retention(1, 2))
    for other in (None, Retention(1, 3), Retention(2, 2)):
        with pytest.raises(DuplicateSequence):
            pool.create(1, range(6), retention=other)
    assert pool.view(1).retention == Retention(1, 2)
    pool.step(releases=[1])
    pool.prefill(1, range(18))  # the slot that had retention has none
    assert (holes(pool, 1), pool.view(1).retention) == ([], None)


def test_a_session_that_ends_gives_back_what_is_between_its_holes() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(18), retention=Retention(2, 5))
    pool.step(reserves=[(1, 19, 19)])
    result = pool.manager.sessions.close(A, may_still_write=True)
    assert (result.num_released_sequences, result.num_quarantined_blocks) == (1, 1)
    pool.audit()
    pool.manager.sessions.end_quarantine(A)
    pool.audit()
    assert sorted(all_blocks(pool)) == list(range(1, 9))
