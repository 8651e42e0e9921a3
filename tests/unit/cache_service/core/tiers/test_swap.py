"""Swapping sequences out and in: the life of its bytes, what may be done meanwhile, and the mistakes of earlier systems."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.errors import InvalidField, OutOfHostBlocks, WrongState
from kvkeeper.cache_service.core.values.types import BlockState, ItemResult, SequenceId, SequenceState, TransferKind
from tests.support.tiers.tier_pool import TierPool
from tests.support.worlds.core_pool import ALL, A, B

OK, NO_ROOM = ItemResult.OK, ItemResult.NO_ROOM


def churn(pool: TierPool, *, session: str = B) -> None:
    """Uses every free and cached device block once, so that nothing survives by chance."""
    stats = pool.manager.queries.stats()
    tokens = range(5000, 5000 + pool.manager.state.config.block_size * (stats.num_free_blocks + stats.num_cached_blocks))
    if not tokens:
        return
    pool.create(999, tokens, session=session)
    pool.step(session, starts=[(999, ALL, 0)])
    for block in pool.table(999, session=session):
        pool.device[block] = -1
    pool.step(session, releases=[999])
    pool.step(session)
    pool.step(session)
    pool.manager.prefixes.clear()


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_the_bytes_come_back(num_tokens: int) -> None:
    pool = TierPool()
    pool.prefill(1, range(num_tokens))
    written = pool.fill(1)
    pool.swap_out(1)
    assert pool.state_of(1) is SequenceState.SWAPPED
    assert pool.table(1) == []
    churn(pool)
    reply = pool.step(ins=[1])
    assert pool.state_of(1) is SequenceState.LOADING
    assert set(reply.transfer_kinds.tolist()) == {TransferKind.SWAP_IN}
    ready = pool.step(done=pool.run(reply))
    assert ready.ready_ids.tolist() == [1]
    assert ready.ready_reserved.tolist() == [num_tokens]
    assert ready.ready_block_ids.tolist() == pool.table(1)
    assert pool.bytes(1) == written


def test_releasing_a_swapped_sequence_frees_nothing_twice() -> None:
    pool = TierPool(num_blocks=5, num_host_blocks=5)
    pool.prefill(1, range(6))
    pool.swap_out(1)
    pool.release(1)
    stats = pool.manager.queries.stats()
    assert (stats.num_held_host_blocks, stats.num_busy_host_blocks, stats.num_referenced_blocks) == (0, 0, 0)
    pool.create(2, range(50, 66))
    assert sorted(pool.step(starts=[(2, ALL, 0)]).start_block_ids.tolist()) == [1, 2, 3, 4]  # each block has one owner


def test_a_release_in_the_middle_of_a_swap_out_frees_at_completion() -> None:
    pool = TierPool()
    blocks = pool.prefill(1, range(6))
    reply = pool.step(outs=[1])
    pool.release(1)
    assert {pool.state(block) for block in blocks} == {BlockState.IN_TRANSFER}
    assert pool.manager.queries.stats().num_busy_host_blocks == 2
    pool.step(done=pool.run(reply))
    assert pool.manager.queries.stats().num_busy_host_blocks == 0
    assert {pool.state(block) for block in blocks} == {BlockState.CACHED, BlockState.FREE}


def test_saved_data_is_not_dropped_before_there_is_room() -> None:
    pool = TierPool(num_blocks=5)
    pool.prefill(1, range(8))
    written = pool.fill(1)
    pool.swap_out(1)
    pool.manager.prefixes.clear()
    pool.create(2, range(50, 62), session=B)
    pool.step(B, starts=[(2, ALL, 0)])
    for _ in range(3):  # no room: nothing changes, however often it is tried
        reply = pool.step(ins=[1])
        assert reply.swap_in_results.tolist() == [NO_ROOM]
        assert not len(reply.transfer_ids)
        assert pool.view(1).num_host_blocks == 2
    pool.release(2, session=B)
    loads = pool.step(ins=[1])
    assert loads.swap_in_results.tolist() == [OK]
    assert pool.view(1).num_host_blocks == 2  # until the bytes are there
    pool.step(done=pool.run(loads))
    assert pool.view(1).num_host_blocks == 0
    assert pool.bytes(1) == written


def test_a_swapped_sequence_is_not_stepped() -> None:
    pool = TierPool()
    pool.prefill(1, range(6))
    with pytest.raises(WrongState):  # nor is it from the step on that swaps it out
        pool.step(outs=[1], reserves=[(1, 8, 8)])
    assert pool.state_of(1) == SequenceState.RUNNING
    pool.swap_out(1)
    for items in ({"reserves": [(1, 8, 8)]}, {"forks": [(1, 2, 4)]}, {"truncates": [(1, 3)]}, {"starts": [(1, 1, 0)]}):
        with pytest.raises(WrongState):
            pool.step(**items)
    with pytest.raises(WrongState):
        pool.manager.queries.writable_slots(A, SequenceId(1))
    with pytest.raises(WrongState):
        pool.manager.one_item.extend(A, SequenceId(1), 8, look_up=True)
    with pytest.raises(WrongState):  # nor in the step that swaps it
        pool.step(ins=[1], reserves=[(1, 8, 8)])


def test_all_reserved_blocks_move_and_come_back_and_none_more() -> None:
    pool = TierPool(num_blocks=9)
    pool.prefill(1, range(5))
    pool.step(reserves=[(1, 14, 14)])
    reply = pool.swap_out(1)
    assert len(reply.transfer_ids) == 4
    assert pool.view(1).num_host_blocks == 4
    churn(pool)
    pool.step(done=pool.run(pool.step(ins=[1])))
    assert pool.counters(1) == (5, 5, 14)
    assert len(pool.table(1)) == 4
    assert pool.manager.queries.stats().num_referenced_blocks == 4


def test_without_room_on_the_host_a_swap_out_leaves_no_trace() -> None:
    pool = TierPool(num_host_blocks=3)
    table = pool.prefill(1, range(12))
    reply = pool.step(outs=[1])
    assert reply.swap_out_results.tolist() == [NO_ROOM]
    assert not len(reply.transfer_ids)
    assert (pool.table(1), pool.state_of(1)) == (table, SequenceState.RUNNING)
    with pytest.raises(OutOfHostBlocks) as refusal:
        pool.manager.one_item.swap_out(A, SequenceId(1))
    assert refusal.value.metadata == {"requested": "3", "available": "2"}


def test_without_a_host_tier_nothing_can_be_swapped_out() -> None:
    pool = TierPool(num_host_blocks=0)
    pool.prefill(1, range(5))
    assert pool.step(outs=[1]).swap_out_results.tolist() == [NO_ROOM]
    assert pool.step(ins=[1]).swap_in_results.tolist() == [OK]  # it runs
    with pytest.raises(InvalidField):
        pool.step(done=[1])


def test_both_swaps_are_idempotent() -> None:
    pool = TierPool()
    pool.prefill(1, range(6))
    assert pool.step(ins=[1]).swap_in_results.tolist() == [OK]
    first = pool.step(outs=[1])
    again = pool.step(outs=[1])
    assert (again.swap_out_results.tolist(), len(again.transfer_ids)) == ([OK], 0)
    pool.step(done=pool.run(first))
    churn(pool)
    loads = pool.step(ins=[1])
    assert pool.step(ins=[1]).swap_in_results.tolist() == [OK]
    assert len(pool.step(ins=[1], done=pool.run(loads)).transfer_ids) == 0
    assert pool.manager.queries.stats().num_swap_ins == 1


def test_shared_blocks_have_one_copy_and_come_back_shared() -> None:
    pool = TierPool()
    pool.prefill(1, range(6))
    pool.fill(1)
    pool.step(forks=[(1, 2, 6)])
    reply = pool.step(outs=[1, 2])
    assert len(reply.transfer_ids) == 2  # of two blocks, held twice
    pool.step(done=pool.run(reply))
    churn(pool)
    loads = pool.step(ins=[1, 2])
    assert len(loads.transfer_ids) == 2
    pool.step(done=pool.run(loads))
    assert pool.table(1) == pool.table(2)
    assert len(pool.step(reserves=[(2, 8, 8)]).copy_sources) == 1  # still copied before it is written


def test_a_fork_that_stays_keeps_the_device_blocks() -> None:
    pool = TierPool()
    table = pool.prefill(1, range(6))
    pool.step(forks=[(1, 2, 6)])
    pool.swap_out(1)
    assert pool.table(2) == table
    assert {pool.state(block) for block in table} == {BlockState.REFERENCED}


def test_swap_in_reuses_what_is_still_on_the_device() -> None:
    pool = TierPool()
    pool.prefill(1, range(10))
    pool.swap_out(1)
    reply = pool.step(ins=[1])
    assert len(reply.transfer_ids) == 1  # the two full blocks are cached; the partial one was given up
    unfinished = pool.step(done=pool.run(reply), outs=[])
    assert unfinished.ready_ids.tolist() == [1]


def test_swap_in_before_the_swap_out_has_run_needs_no_order() -> None:
    pool = TierPool()
    table = pool.prefill(1, range(6))
    out = pool.step(outs=[1])
    reply = pool.step(ins=[1])
    assert (reply.ready_ids.tolist(), reply.ready_block_ids.tolist()) == ([1], table)
    assert not len(reply.transfer_ids)
    pool.step(reserves=[(1, 8, 8)])
    pool.step(done=pool.run(out))
    assert pool.manager.queries.stats().num_held_host_blocks == 0


def test_what_ran_before_the_swap_out_may_be_committed_after_it() -> None:
    pool = TierPool()
    pool.prefill(1, range(5))
    pool.step(reserves=[(1, 8, 8)])
    pool.step(outs=[1], lag=1)
    pool.step(commits=[(1, 7, [5, 6])])
    assert pool.counters(1) == (7, 7, 8)
    with pytest.raises(InvalidField):
        pool.step(commits=[(1, 9, [7, 8])])
    assert pool.step(ins=[1]).ready_ids.tolist() == [1]
    pool.step(commits=[(1, 8, [7])])
    assert len(pool.matched(range(8))) == 2


def test_a_failed_swap_out_leaves_the_sequence_on_the_device() -> None:
    pool = TierPool()
    table = pool.prefill(1, range(10))
    out = pool.step(outs=[1])
    ids = pool.run(out)
    reply = pool.step(done=ids[:1], failed=ids[1:2])
    assert (reply.ready_ids.tolist(), reply.ready_block_ids.tolist()) == ([1], table)
    pool.step(done=ids[2:])
    stats = pool.manager.queries.stats()
    assert (stats.num_held_host_blocks, stats.num_busy_host_blocks, stats.num_failed_transfers) == (0, 0, 1)
    assert pool.step(reserves=[(1, 12, 12)]).reserve_reserved.tolist() == [12]


def test_a_failed_swap_in_keeps_the_host_copies() -> None:
    pool = TierPool()
    pool.prefill(1, range(10))
    written = pool.fill(1)
    pool.swap_out(1)
    churn(pool)
    ids = pool.step(ins=[1]).transfer_ids.tolist()
    reply = pool.step(done=ids[:2], failed=ids[2:])
    assert reply.ready_ids.tolist() == []
    assert (pool.state_of(1), pool.view(1).num_host_blocks) == (SequenceState.SWAPPED, 3)
    pool.manager.prefixes.clear()
    pool.step(done=pool.run(pool.step(ins=[1])))
    assert pool.bytes(1) == written


def test_reports_are_checked_before_anything_changes_and_repeats_are_ignored() -> None:
    pool = TierPool()
    pool.prefill(1, range(6))
    ids = pool.run(pool.step(outs=[1]))
    for bad in ([0], [ids[-1] + 1], [*ids, 2**40], [-1]):
        with pytest.raises(InvalidField) as refusal:
            pool.step(done=bad)
        assert refusal.value.metadata["field"] == "completed_transfer_ids"
        with pytest.raises(InvalidField) as refusal:
            pool.step(failed=bad)
        assert refusal.value.metadata["field"] == "failed_transfer_ids"
    with pytest.raises(InvalidField):
        pool.step(B, done=ids)  # another session's
    with pytest.raises(InvalidField):
        pool.step(done=ids, failed=ids)
    assert pool.manager.queries.stats().num_transfer_blocks == 0  # they are held, too
    assert pool.manager.queries.stats().num_busy_host_blocks == 0
    assert pool.manager.queries.stats().num_held_host_blocks == 2
    pool.manager.steps.complete(A, pool.step_ids[A], np.array(ids), np.array([], np.int64))
    before = pool.manager.queries.stats()
    pool.step(done=ids, failed=[])
    pool.step(failed=ids)
    pool.step(B, done=ids)  # nothing of it is in flight: a repeat, for all that is known
    assert pool.manager.queries.stats().num_failed_transfers == before.num_failed_transfers == 0
    assert pool.state_of(1) is SequenceState.SWAPPED


def test_a_copy_is_not_shared_once_its_source_may_have_been_written() -> None:
    pool = TierPool()
    pool.prefill(1, range(5))
    pool.fill(1)
    first = pool.run(pool.step(outs=[1]))  # reported late
    pool.step(ins=[1])
    pool.step(reserves=[(1, 8, 8)])
    pool.step(commits=[(1, 6, [5])])
    pool.device[pool.table(1)[1]] = 77
    again = pool.step(outs=[1])
    assert len(again.transfer_ids) == 1  # the partial block was written since
    pool.step(done=[*first, *pool.run(again)])
    churn(pool)
    pool.step(done=pool.run(pool.step(ins=[1])))
    assert pool.bytes(1)[1] == 77


def test_blocks_on_their_way_out_are_not_taken_back_while_an_earlier_sequence_waits_for_blocks() -> None:
    """Else two engines on one pool could wait for ever: one gives back, and takes it again before it has come free."""
    pool = TierPool(num_blocks=6)
    pool.prefill(1, range(8))
    pool.prefill(2, range(100, 112), session=B)
    out = pool.step(B, outs=[2])
    assert pool.step(reserves=[(1, 9, 9)]).reserve_reserved.tolist() == [8]
    assert pool.step(B, ins=[2]).swap_in_results.tolist() == [NO_ROOM]
    assert pool.state_of(2, session=B) is SequenceState.SWAPPED
    pool.step(B, done=pool.run(out))
    pool.step(B)
    assert pool.step(reserves=[(1, 9, 9)]).reserve_reserved.tolist() == [9]
    pool.step(releases=[1])
    assert pool.step(B, ins=[2]).swap_in_results.tolist() == [OK]


def test_blocks_on_their_way_out_are_taken_back_by_the_earliest_sequence_and_without_a_claim() -> None:
    pool = TierPool(num_blocks=6)
    pool.prefill(1, range(12))
    pool.prefill(2, range(100, 108), session=B)
    pool.step(outs=[1])
    assert pool.step(B, reserves=[(2, 9, 9)]).reserve_reserved.tolist() == [8]
    assert pool.step(ins=[1]).swap_in_results.tolist() == [OK]  # it is earlier than the claim
    pool.step(B, outs=[2])
    assert pool.step(B, ins=[2]).swap_in_results.tolist() == [OK]  # there is no claim
