"""Copies-on-write that an engine was told to make and that may not have run.

A commit for the step before may cover the block that such a copy fills, and a fork or a move may carry it into other tables.
Wherever it is named, until its step is completed no other sequence may have the block (R6), find it (R4) or read it.
"""

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.types import BlockState, Executor, SequenceId, SessionId
from tests.support.tiers.tier_pool import TierPool
from tests.support.worlds.core_pool import ALL, A, B, CorePool


def pool_with_a_copy_in_flight(**config: object) -> tuple[CorePool, int]:
    """Step 4 of session a copies block 1 of its sequence, which the commit for step 3 has filled. Returns the destination."""
    pool = CorePool(**config)
    pool.prefill(1, range(6))
    return pool, copy_in_flight(pool)


def copy_in_flight(pool: CorePool) -> int:
    pool.step(reserves=[(1, 8, 8)])  # step 3 computes tokens 6 and 7
    reply = pool.step(lag=1, commits=[(1, 6, [6, 7])], forks=[(1, 2, 6)], reserves=[(1, 9, 9)])
    destination = int(reply.copy_destinations[reply.copy_sources > 0][0])
    pool.step(lag=1, commits=[(1, 8, [])])  # for step 3; the copy belongs to step 4
    assert pool.table(1)[1] == destination
    assert pool.counters(1)[1] == 8
    return destination


def test_what_a_copy_fills_is_in_quarantine_when_its_session_ends() -> None:
    pool, destination = pool_with_a_copy_in_flight()
    pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    assert pool.state(destination) is BlockState.QUARANTINED
    pool.manager.sessions.end_quarantine(A)
    pool.audit()
    assert pool.state(destination) is BlockState.FREE


def test_what_a_copy_may_not_have_filled_is_cleared_for_its_next_tenant_even_the_same() -> None:
    """The block held another tenant's tokens; the copy that should have written over them may never have run (R8)."""
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(50, 66), session=B, tenant="other")
    pool.step(B, releases=[1])
    pool.manager.evictions.evict_blocks(4)
    pool.prefill(1, range(6))
    destination = copy_in_flight(pool)
    cleared = pool.manager.queries.stats().num_cleared_blocks
    pool.manager.sessions.close(A, may_still_write=False)
    pool.audit()
    pool.create(2, range(20, 36), session=B)
    reply = pool.step(B, starts=[(2, ALL, 0)])
    assert destination in reply.start_block_ids.tolist()
    assert destination in reply.copy_destinations[reply.copy_sources == 0].tolist()
    assert pool.manager.queries.stats().num_cleared_blocks > cleared


def test_a_session_with_copies_run_by_the_service_reads_all_that_is_committed() -> None:
    pool, session = CorePool(), SessionId("c")
    pool.manager.sessions.open(session, Executor.CACHE)
    pool.step_ids[session] = 0
    pool.prefill(1, range(6), session=session)
    pool.step(session, forks=[(1, 2, 6)], reserves=[(1, 8, 8)])
    assert pool.manager.queries.readable(session, SequenceId(1)).num_tokens == 6


def test_what_a_copy_fills_is_not_found_until_it_has_run() -> None:
    pool, destination = pool_with_a_copy_in_flight()
    for _ in range(3):  # however often is asked what can be published
        pool.manager.maintenance.publish_pending()
        pool.audit()
        assert len(pool.matched(range(8))) == 1
    pool.step(lag=1)
    assert pool.matched(range(8))[1] == destination


def test_blocks_before_a_copy_are_shared_and_those_behind_it_follow() -> None:
    """A slice at a time: what waits for a copy is not forgotten, however often it is put back."""
    pool = CorePool(num_blocks=17)
    pool.prefill(1, range(6))
    pool.step(reserves=[(1, 14, 14)])
    pool.step(lag=1, commits=[(1, 6, range(6, 14))], forks=[(1, 2, 6)], reserves=[(1, 15, 15)])  # copies block 1
    pool.step(lag=1, commits=[(1, 10, [])], forks=[(1, 3, 10)], reserves=[(1, 16, 16)])  # and this one block 2
    pool.create(4, range(50, 70))
    pool.step(lag=1, publish=False, commits=[(1, 14, [])], starts=[(4, ALL, 0)])  # the first copy has run
    for _ in range(3):
        pool.manager.maintenance.publish_pending(1)
        pool.audit()
        assert len(pool.matched(range(14))) == 2
    pool.step(publish=False, commits=[(4, 20, [])])
    for num_other, num_matched in ((0, 3), (1, 3), (2, 3), (3, 3)):
        pool.manager.maintenance.publish_pending(1)
        pool.audit()
        assert (len(pool.matched(range(50, 70))), len(pool.matched(range(14)))) == (num_other, num_matched)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_what_waits_for_a_copy_is_left_out_wherever_it_stands_among_sequences_with_more_to_publish(at: int) -> None:
    """One commit in which others have one block to publish, or several, and this one none yet."""
    pool, prompts = CorePool(num_blocks=17), [range(20, 24), range(30, 42), range(50, 54)]
    pool.prefill(1, range(6))
    for sequence_id, prompt in enumerate(prompts, start=3):
        pool.create(sequence_id, prompt)
    pool.step(reserves=[(1, 8, 8)], starts=[(3, ALL, 0), (4, ALL, 0), (5, ALL, 0)])
    reply = pool.step(lag=1, commits=[(1, 6, [6, 7])], forks=[(1, 2, 6)], reserves=[(1, 9, 9)])
    destination = int(reply.copy_destinations[reply.copy_sources > 0][0])
    commits = [(sequence_id, len(prompt), []) for sequence_id, prompt in enumerate(prompts, start=3)]
    pool.step(lag=1, commits=[*commits[:at], (1, 8, []), *commits[at:]])
    assert [len(pool.matched(prompt)) for prompt in prompts] == [1, 3, 1]
    assert len(pool.matched(range(8))) == 1
    reply = pool.step(lag=1)
    pool.manager.maintenance.publish_pending()
    assert pool.matched(range(8)) == [pool.table(1)[0], destination]
    assert len(reply.update_ids) == 0


def test_a_fork_that_is_swapped_out_and_in_at_once_shares_nothing_that_is_not_there() -> None:
    pool = TierPool()
    pool.prefill(1, range(6))
    pool.step(reserves=[(1, 8, 8)])
    copy = pool.step(lag=1, commits=[(1, 6, [6, 7])], forks=[(1, 2, 6)], reserves=[(1, 9, 9)])
    reply = pool.step(lag=1, commits=[(1, 8, [])], forks=[(1, 3, 8)], outs=[3], ins=[3])
    assert reply.ready_ids.tolist() == [3]
    assert pool.table(3)[1] == int(copy.copy_destinations[0])
    assert len(pool.matched(range(8))) == 1  # the copy of step 4 may not have run
    pool.create(1, range(9), session=B)
    assert pool.step(B, starts=[(1, ALL, ALL)]).start_hits.tolist() == [4]
    pool.step(lag=1)
    assert len(pool.matched(range(8))) == 2


@pytest.mark.parametrize("released", [False, True])
def test_nor_does_it_when_the_parent_is_gone(released: bool) -> None:
    """What counts is the block, whichever table names it."""
    pool = TierPool()
    pool.prefill(1, range(6))
    pool.step(reserves=[(1, 8, 8)])
    copy = pool.step(lag=1, commits=[(1, 6, [6, 7])], forks=[(1, 2, 6)], reserves=[(1, 9, 9)])
    reply = pool.step(
        lag=1, commits=[(1, 8, [])], forks=[(1, 3, 8), (3, 4, 8)], releases=[1] if released else [], outs=[4], ins=[4]
    )
    assert reply.ready_ids.tolist() == [4]
    assert len(pool.matched(range(8))) == 1
    pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    assert pool.state(int(copy.copy_destinations[0])) is BlockState.QUARANTINED
    assert len(pool.matched(range(8))) == 1


def test_a_steady_step_keeps_no_account_of_copies() -> None:
    pool = CorePool()
    pool.prefill(1, range(6))
    pool.step(reserves=[(1, 7, 7)])
    owner = pool.manager.state.session(A)
    assert not owner.copies
    for _ in range(3):
        pool.step(forks=[(1, 2, 6)], reserves=[(1, 7, 7)])
        assert len(owner.copies) == 1
        assert np.count_nonzero(pool.manager.state.pool.is_filling) == 1
        pool.step(releases=[2])
        assert not owner.copies
