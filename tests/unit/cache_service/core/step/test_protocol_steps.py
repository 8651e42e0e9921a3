"""Counters, the life of a sequence, one step: docs/api/protocol.md, section 1 to 3. Each test is one sentence of it."""

import pytest

from kvkeeper.cache_service.core.values.errors import (
    CacheError,
    DuplicateSequence,
    InvalidField,
    NeverFits,
    OutOfSequences,
    UnknownSequence,
)
from kvkeeper.cache_service.core.values.types import BlockState, ItemResult, SequenceState, StartResult
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32, step_batch

# 1. Counters of a sequence


def test_1_committed_is_at_most_known_and_at_most_reserved() -> None:
    pool = CorePool()
    pool.create(1, range(3))
    pool.step(starts=[(1, 2, 0)])
    for length, new in ((3, []), (4, [9]), (3, [9])):  # past what is reserved, past both
        with pytest.raises(InvalidField) as refused:
            pool.step(commits=[(1, length, new)])
        assert refused.value.metadata["limit"] == "2"
    pool.step(commits=[(1, 2, [9])])
    assert pool.counters(1) == (4, 2, 2)


def test_1_a_committed_length_never_shrinks() -> None:
    pool = CorePool()
    pool.prefill(1, range(5))
    with pytest.raises(InvalidField):
        pool.step(commits=[(1, 4, [])])
    pool.step(commits=[(1, 5, [])])


def test_1_reservations_are_absolute_and_surplus_slots_are_used_next_time() -> None:
    pool = CorePool()
    pool.prefill(1, range(5))
    assert pool.step(reserves=[(1, 7, 7)]).new_block_ids.tolist() == []  # block 2 had room
    assert pool.step(reserves=[(1, 6, 6)]).reserve_reserved.tolist() == [7]  # what is reserved stays
    pool.step(commits=[(1, 6, [5])])
    reply = pool.step(reserves=[(1, 7, 7)])
    assert (reply.reserve_reserved.tolist(), reply.new_block_ids.tolist()) == ([7], [])


# 2. Life of a sequence


def test_2_a_created_sequence_waits_and_holds_nothing() -> None:
    pool = CorePool()
    pool.prefill(1, range(9))
    pool.step(releases=[1])
    available = pool.manager.queries.stats().num_cached_blocks
    assert pool.create(2, range(9)) == 8  # for information
    assert pool.view(2).state is SequenceState.WAITING
    assert (pool.table(2), pool.counters(2)) == ([], (9, 0, 0))
    assert pool.manager.evictions.evict_blocks(8) == available  # no pin


def test_2_create_is_idempotent_by_its_arguments() -> None:
    pool = CorePool()
    args = {"max_tokens": 9, "tenant": "red", "priority": 3}
    pool.create(1, [1, 2, 3], **args)
    revision = pool.manager.queries.stats().revision
    pool.create(1, [1, 2, 3], **args)
    assert pool.manager.queries.stats().revision == revision
    for tokens, changed in (([1, 2], {}), ([1, 2, 4], {}), ([1, 2, 3], {"max_tokens": 8}),
                            ([1, 2, 3], {"tenant": ""}), ([1, 2, 3], {"priority": 0})):  # fmt: skip
        with pytest.raises(DuplicateSequence):
            pool.create(1, tokens, **{**args, **changed})
    assert pool.manager.queries.stats().revision == revision
    pool.create(1, [4], session=B)  # ids are a session's own


def test_2_a_forked_child_is_not_what_a_create_made() -> None:
    pool = CorePool()
    pool.prefill(1, [1, 2, 3])
    pool.step(forks=[(1, 2, 3)])
    with pytest.raises(DuplicateSequence):
        pool.create(2, [1, 2, 3])


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(33, 0), (1, 33), (33, 33)])
def test_2_what_can_never_fit_is_refused_at_create_with_the_limit(num_tokens: int, max_tokens: int) -> None:
    pool = CorePool(num_blocks=9)
    with pytest.raises(NeverFits) as refused:
        pool.create(1, range(num_tokens), max_tokens=max_tokens)
    assert refused.value.metadata == {"requested": "33", "limit": "32"}
    assert len(pool.prefill(1, range(32))) == 8  # exactly the pool: other sessions and watermarks do not count


def test_2_slots_for_sequences_run_out_with_the_limit() -> None:
    pool = CorePool(max_sequences=2)
    pool.create(1, [1])
    pool.create(2, [1], session=B)
    with pytest.raises(OutOfSequences) as refused:
        pool.create(3, [1])
    assert refused.value.metadata == {"limit": "2"}


def test_2_look_up_and_hold_are_one_decision() -> None:
    pool = CorePool(num_blocks=4)
    hit = pool.prefill(1, range(8))
    pool.step(releases=[1])
    pool.create(2, range(9))
    pool.create(3, range(20, 32), session=B)
    reply = pool.step(starts=[(2, 1, ALL)])  # of three blocks it needs one new, and the two hit are not taken for it
    assert reply.start_block_ids.tolist()[:2] == hit
    assert pool.step(B, starts=[(3, ALL, 0)]).start_results.tolist() == [StartResult.NO_ROOM]


def test_2_a_start_takes_whole_blocks_up_to_its_most_hit() -> None:
    pool = CorePool(num_blocks=17)
    pool.prefill(1, range(13))
    for most, hit in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (ALL, 12)):
        pool.create(2, range(13))
        reply = pool.step(starts=[(2, ALL, most)])
        assert (reply.start_hits.tolist(), reply.start_reserved.tolist()) == ([hit], [13])
        assert pool.view(2).num_hit_tokens == hit
        assert pool.counters(2) == (13, hit, 13)
        pool.step(releases=[2])


@pytest.mark.parametrize(("most_new", "reserved"), [(1, 5), (3, 7), (4, 8), (5, 9), (ALL, 9)])
def test_2_a_start_computes_no_more_than_it_asked_for_nor_than_it_knows(most_new: int, reserved: int) -> None:
    pool = CorePool()
    pool.prefill(1, range(4))
    pool.create(2, range(9))
    reply = pool.step(starts=[(2, most_new, ALL)])
    assert (reply.start_hits.tolist(), reply.start_reserved.tolist()) == ([4], [reserved])


def test_2_a_start_is_granted_what_fits_and_without_room_holds_nothing() -> None:
    pool = CorePool(num_blocks=4)
    pool.create(1, range(9))
    pool.create(2, range(8))
    pool.create(3, range(8))
    assert pool.step(starts=[(1, 1, 0)]).start_reserved.tolist() == [1]
    reply = pool.step(starts=[(2, 3, 0), (3, ALL, 0)])
    assert (reply.start_results.tolist(), reply.start_reserved.tolist()) == ([1, 1], [3, 4])
    pool.create(4, range(8))
    reply = pool.step(starts=[(4, ALL, 0)])
    assert reply.start_results.tolist() == [StartResult.NO_ROOM]
    assert (reply.start_num_blocks.tolist(), reply.start_reserved.tolist(), reply.start_hits.tolist()) == ([0], [0], [0])
    assert pool.view(4).state is SequenceState.WAITING


def test_2_a_refused_start_keeps_no_hold_on_its_hit() -> None:
    pool = CorePool(num_blocks=4)
    cached = pool.prefill(1, range(4))[0]
    pool.step(releases=[1])
    pool.create(2, range(20, 28))
    pool.step(starts=[(2, ALL, 0)])
    pool.create(3, range(5))
    assert pool.step(starts=[(3, ALL, ALL)]).start_results.tolist() == [StartResult.NO_ROOM]
    assert pool.state(cached) is BlockState.CACHED


# 3. Step


def test_3_lists_are_applied_in_the_protocols_order() -> None:
    """Commit 1, fork it, truncate it, release 2, start 3 in its block, reserve for 1: all in one step."""
    pool = CorePool(num_blocks=5, max_sequences=3)
    pool.create(1, range(6))
    pool.prefill(2, range(20, 28))
    pool.step(starts=[(1, ALL, 0)])
    pool.step(truncates=[(2, 4)])
    pool.create(3, range(30, 34))
    reply = pool.step(
        commits=[(1, 6, [])],
        forks=[(1, 4, 6)],
        truncates=[(1, 4)],
        releases=[2],
        starts=[(3, ALL, 0)],
        reserves=[(1, 5, 5)],
    )
    assert reply.fork_results.tolist() == [ItemResult.NO_ROOM]  # the release that makes a slot comes later
    assert reply.start_results.tolist() == [StartResult.STARTED]
    assert reply.reserve_reserved.tolist() == [5]
    assert pool.counters(1) == (4, 4, 5)


def test_3_a_commit_is_bounded_by_what_was_reserved_as_of_the_completed_step() -> None:
    pool = CorePool()
    pool.prefill(1, range(4))
    pool.step(reserves=[(1, 5, 5)])
    pool.step(reserves=[(1, 6, 6)], lag=1)
    with pytest.raises(InvalidField) as refused:
        pool.step(lag=1, commits=[(1, 6, [7, 8])])
    assert refused.value.metadata["limit"] == "5"
    pool.step(lag=1, commits=[(1, 5, [7, 8])])
    pool.step(commits=[(1, 6, [])])


def test_3_a_truncate_lowers_what_an_earlier_step_had_reserved() -> None:
    pool = CorePool()
    pool.prefill(1, range(4))
    pool.step(reserves=[(1, 8, 8)])
    pool.step(lag=1, truncates=[(1, 4)], reserves=[(1, 8, 8)])
    with pytest.raises(InvalidField) as refused:  # the step that writes the new tokens still runs
        pool.step(lag=1, commits=[(1, 5, [7])])
    assert refused.value.metadata["limit"] == "4"


def test_3_the_child_of_an_earlier_fork_may_be_a_parent() -> None:
    pool = CorePool()
    blocks = pool.prefill(1, range(9))
    reply = pool.step(forks=[(1, 2, 9), (2, 3, 6), (3, 4, 4)])
    assert reply.fork_results.tolist() == [ItemResult.OK] * 3
    assert [pool.table(i) for i in (2, 3, 4)] == [blocks, blocks[:2], blocks[:1]]
    assert [pool.counters(i) for i in (2, 3, 4)] == [(9, 9, 9), (6, 6, 6), (4, 4, 4)]


def test_3_a_fork_shares_committed_tokens_only() -> None:
    pool = CorePool()
    pool.create(1, range(9))
    pool.step(starts=[(1, ALL, 0)])
    pool.step(commits=[(1, 5, [])])
    with pytest.raises(InvalidField) as refused:
        pool.step(forks=[(1, 2, 6)])
    assert refused.value.metadata["limit"] == "5"
    pool.step(commits=[(1, 6, [])], forks=[(1, 2, 6)])  # commits come first


def test_3_of_a_fork_without_a_slot_later_items_do_nothing() -> None:
    pool = CorePool(max_sequences=2)
    pool.prefill(1, range(5))
    reply = pool.step(
        forks=[(1, 2, 5), (1, 3, 5), (3, 4, 5)], truncates=[(3, 1)], releases=[4], reserves=[(3, 6, 6), (1, 6, 6)]
    )
    assert reply.fork_results.tolist() == [ItemResult.OK, ItemResult.NO_ROOM, ItemResult.NO_ROOM]
    assert reply.reserve_reserved.tolist() == [0, 6]  # and it does not hold up the others
    with pytest.raises(UnknownSequence):
        pool.view(3)


def test_3_a_truncate_gives_back_the_blocks_behind_and_is_idempotent() -> None:
    pool = CorePool()
    blocks = pool.prefill(1, range(13))
    for _ in range(2):
        pool.step(truncates=[(1, 8)])
        assert (pool.table(1), pool.counters(1)) == (blocks[:2], (8, 8, 8))
    pool.step(truncates=[(1, 100)])
    assert pool.counters(1) == (8, 8, 8)
    assert pool.state(blocks[2]) is BlockState.CACHED


def test_3_reservations_get_the_largest_count_that_fits_in_list_order() -> None:
    pool = CorePool(num_blocks=6)
    pool.prefill(1, range(4))
    pool.prefill(2, range(20, 24))
    reply = pool.step(reserves=[(2, 5, 12), (1, 5, 16)])
    assert reply.reserve_reserved.tolist() == [12, 8]
    assert reply.new_block_item_idx.tolist() == [0, 0, 1]
    assert pool.table(2)[1:] + pool.table(1)[1:] == reply.new_block_ids.tolist()


def test_3_after_one_refused_reservation_no_smaller_one_overtakes() -> None:
    pool = CorePool(num_blocks=6)
    for sequence_id in (1, 2, 3):
        pool.prefill(sequence_id, range(20 * sequence_id, 20 * sequence_id + 3))
    reply = pool.step(reserves=[(1, 16, 16), (2, 5, 5), (3, 4, 4)])  # two blocks left
    assert reply.reserve_reserved.tolist() == [3, 3, 4]  # 3 needs no new block
    assert reply.num_free == 2
    assert pool.step(reserves=[(2, 5, 5), (1, 16, 16)]).reserve_reserved.tolist() == [3, 3]  # nor in the next step
    assert pool.step(reserves=[(2, 5, 5), (1, 11, 11)]).reserve_reserved.tolist() == [3, 11]  # what is kept is for 1


@pytest.mark.parametrize(
    "items",
    [
        {"commits": [(1, 5, []), (1, 5, [])]}, {"truncates": [(1, 5), (1, 5)]}, {"releases": [1, 1]},
        {"starts": [(2, 1, 0), (2, 1, 0)]}, {"reserves": [(1, 5, 5), (1, 5, 5)]},
    ],
)  # fmt: skip
def test_3_the_same_sequence_twice_in_one_list_is_invalid(items: dict[str, list[object]]) -> None:
    pool = CorePool()
    pool.prefill(1, range(5))
    pool.create(2, range(5))
    with pytest.raises(InvalidField):
        pool.step(**items)


def test_3_a_start_is_not_reserved_in_the_same_step() -> None:
    pool = CorePool()
    pool.create(1, range(5))
    with pytest.raises(CacheError):
        pool.step(starts=[(1, 1, 0)], reserves=[(1, 2, 2)])


def test_3_columns_that_do_not_add_up_are_invalid() -> None:
    pool = CorePool()
    pool.prefill(1, range(5))
    good = step_batch(3, 2, commits=[(1, 5, [6, 7])])
    for num_new in (1, 3, -1):
        bad = {name: getattr(good, name) for name in good._fields} | {"commit_num_new": int32([num_new])}
        with pytest.raises(InvalidField):
            pool.manager.steps.step(A, type(good)(**bad))


def test_3_renewing_carries_completions_too() -> None:
    pool = CorePool(num_blocks=2)
    block = pool.prefill(1, range(3))[0]
    pool.step(reserves=[(1, 4, 4)])
    pool.step(lag=1, releases=[1])
    pool.manager.steps.complete(A, pool.step_ids[A] - 1)
    assert pool.state(block) is BlockState.FREE
    pool.manager.steps.complete(A, 0)  # an old one changes nothing
    pool.audit()


def test_3_evictable_counts_what_an_eviction_could_free_now() -> None:
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(8))
    pool.step(reserves=[(1, 9, 9)])
    reply = pool.step(lag=1, releases=[1])
    assert (reply.num_free, reply.num_evictable, reply.num_fenced) == (1, 0, 3)
    reply = pool.step()
    assert (reply.num_free, reply.num_evictable, reply.num_fenced) == (2, 2, 0)
