"""Orders that several sequences or sessions have an interest in: which waits for which, and what the end of a session means."""

from kvkeeper.cache_service.core.values.types import BlockState, Executor, SequenceState, SessionId, StartResult
from tests.support.tiers.tier_pool import TierPool, cached, demoted, push_out
from tests.support.worlds.core_pool import ALL, A, B


def test_a_second_start_waits_for_the_load_of_the_first() -> None:
    pool = demoted(range(8), num_blocks=7)
    for sequence_id, session in ((2, A), (3, B)):
        pool.create(sequence_id, range(9), session=session)
    first = pool.step(A, starts=[(2, ALL, ALL)])
    second = pool.step(B, starts=[(3, ALL, ALL)])
    assert (len(first.transfer_ids), len(second.transfer_ids)) == (2, 0)
    assert second.start_results.tolist() == [StartResult.LOADING]
    pool.step(A, done=pool.run(first))
    assert pool.state_of(3, session=B) is SequenceState.LOADING  # its session has not been told yet
    ready = pool.step(B)
    assert (ready.ready_ids.tolist(), ready.ready_hits.tolist()) == ([3], [8])
    assert pool.table(2)[:2] == pool.table(3, session=B)[:2]


def test_when_the_session_that_loads_ends_the_others_have_a_shorter_hit() -> None:
    pool = demoted(range(8), num_blocks=7)
    for sequence_id, session in ((2, A), (3, B)):
        pool.create(sequence_id, range(9), session=session)
        pool.step(session, starts=[(sequence_id, ALL, ALL)])
    loading = set(pool.table(3, session=B)[:2])
    pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    ready = pool.step(B)
    assert (ready.ready_ids.tolist(), ready.ready_hits.tolist()) == ([3], [0])
    pool.step(B)
    pool.step(B)
    assert {pool.state(block) for block in loading} == {BlockState.QUARANTINED}  # the dead one may still fill them
    again = pool.step(B, reserves=[(3, 9, 9)])
    assert again.reserve_reserved.tolist() == [9]
    assert not loading & set(pool.table(3, session=B))
    pool.manager.sessions.end_quarantine(A)
    pool.audit()
    assert {pool.state(block) for block in loading} == {BlockState.FREE}
    assert len(pool.matched(range(8))) == 2  # the copies are as good as before


def test_a_swap_out_waits_for_no_copy_that_another_session_makes() -> None:
    pool = TierPool(num_blocks=9)
    pool.prefill(1, range(4))
    pool.create(2, range(5), session=B)
    pool.step(B, starts=[(2, ALL, ALL)])
    mine = pool.step(A, outs=[1])
    theirs = pool.step(B, outs=[2])
    assert (len(mine.transfer_ids), len(theirs.transfer_ids)) == (1, 2)
    pool.step(B, done=pool.run(theirs))
    assert pool.view(2, session=B).num_host_blocks == 2
    pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    assert pool.state_of(2, session=B) is SequenceState.SWAPPED


def test_a_swap_in_waits_for_no_load_that_another_session_makes() -> None:
    pool = TierPool(num_blocks=8)
    pool.prefill(1, range(8))
    written = pool.fill(1)
    pool.swap_out(1)
    push_out(pool, 28)
    pool.create(2, range(9), session=B)
    theirs = pool.step(B, starts=[(2, 1, ALL)])
    mine = pool.step(A, ins=[1])
    assert (len(theirs.transfer_ids), len(mine.transfer_ids)) == (2, 2)
    pool.manager.sessions.close(B, may_still_write=True)
    pool.step(A, done=pool.run(mine))
    assert (pool.state_of(1), pool.bytes(1)) == (SequenceState.RUNNING, written)


def test_a_session_that_is_answered_at_once_waits_for_no_load_of_another() -> None:
    pool = TierPool(num_blocks=8)
    written = cached(pool, 1, range(8))
    push_out(pool, 28)
    pool.create(2, range(9))
    pool.step(starts=[(2, 1, ALL)])
    one = SessionId("c")
    pool.step_ids[one] = 0
    pool.manager.sessions.open(one, Executor.CACHE)
    pool.create(3, range(9), session=one)
    reply = pool.step(one, starts=[(3, 1, ALL)])
    assert (reply.start_results.tolist(), reply.start_hits.tolist()) == ([StartResult.STARTED], [8])
    pool.run(reply)
    assert pool.bytes(3, session=one)[:2] == written
