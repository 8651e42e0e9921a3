"""Exactly once (docs/api/protocol.md, section 3) and sessions (docs/api/protocol.md, section 6), in the core.

Gates, leases, epochs, death and quarantine.
"""

import pytest

from kvkeeper.cache_service.core.values.errors import (
    InvalidField,
    OutOfSequences,
    UnknownSession,
)
from kvkeeper.cache_service.core.values.types import BlockState, Executor, SessionId
from kvkeeper.cache_service.runtime.lease import Session, SessionTable
from tests.support.worlds.core_pool import ALL, A, B, CorePool


def open_session(executor: Executor = Executor.ENGINE, ttl: float = 10.0) -> tuple[SessionTable, Session]:
    table = SessionTable(epoch=100, max_sessions=2)
    return table, table.open(SessionId("a"), executor, ttl, "test", now=0.0)


# Exactly once


def test_once_at_most_two_steps_are_in_flight_and_completions_do_not_shrink() -> None:
    _, session = open_session()
    for step_id, completed in ((1, 0), (2, 0), (3, 1), (4, 3)):
        session.check_completed(step_id, completed)
        session.record(step_id, completed, b"", b"")
    for completed in (2, 5, -1):
        with pytest.raises(InvalidField):
            session.check_completed(5, completed)
    session.complete(4)
    session.complete(2)  # by RenewSession: an old one is ignored
    session.check_completed(5, 3)  # a step that was lost comes again with the same bytes
    session.record(5, 3, b"", b"")
    assert session.completed_step_id == 4
    session.check_completed(6, 4)
    for completed in (6, -1):
        with pytest.raises(InvalidField):
            session.complete(completed)


# Leases and epochs


def test_6_a_session_that_ended_never_returns() -> None:
    table, session = open_session()
    table.end_session(session)
    table.end_session(session)  # a client and a lease may both end it
    with pytest.raises(UnknownSession):
        table.require("a", session.epoch, 0.0)
    again = table.open(SessionId("c"), Executor.ENGINE, 10.0, "", now=0.0)
    assert again.epoch > session.epoch
    assert (again.step_id, again.last_reply) == (0, b"")


def test_6_a_lease_ends_with_its_ttl_unless_messages_renew_it() -> None:
    table, session = open_session(ttl=10.0)
    for now in (9.9, 19.8, 29.7):
        assert table.expired(now) == []
        table.renew(table.require("a", session.epoch, now), now)
    assert table.next_deadline() == pytest.approx(39.7)
    table.require("a", session.epoch, 39.0)  # to be asked for is not to be renewed
    assert table.expired(39.8) == [session]
    with pytest.raises(UnknownSession):
        table.require("a", session.epoch, 39.8)
    assert len(table) == 1  # until its owner has reclaimed it


def test_6_a_lost_stream_leaves_half_a_second_and_a_message_ends_the_grace() -> None:
    table, session = open_session()
    table.start_grace(session, 5.0)
    assert table.next_deadline() == 5.5
    assert table.expired(5.4) == []
    table.renew(table.require("a", session.epoch, 5.4), 5.4)
    assert table.expired(15.3) == []
    table.start_grace(session, 15.3)
    assert table.expired(15.4) == [session]  # a grace does not lengthen the lease
    table.renew(session, 15.3)
    table.start_grace(session, 16.0)
    assert table.expired(16.5) == [session]


# Death and quarantine


def test_6_the_committed_cache_survives_its_session() -> None:
    pool = CorePool(num_blocks=9)
    blocks = pool.prefill(1, range(10))
    result = pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    assert result.num_released_sequences == 1
    assert [pool.state(block) for block in blocks] == [BlockState.CACHED, BlockState.CACHED, BlockState.QUARANTINED]
    pool.create(2, range(10), session=B)
    assert pool.step(B, starts=[(2, ALL, ALL)]).start_hits.tolist() == [8]


@pytest.mark.parametrize("reserved", [8, 9, 12, 13, 16])
def test_6_what_a_dead_session_may_still_write_is_not_reused_before_quarantine_ends(reserved: int) -> None:
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(6))
    pool.step(reserves=[(1, reserved, reserved)])
    writable = pool.table(1)[1:]
    result = pool.manager.sessions.close(A, may_still_write=True)
    assert result.num_quarantined_blocks == len(writable)
    pool.create(2, range(50, 66), session=B)
    granted = pool.step(B, starts=[(2, ALL, 0)]).start_block_ids.tolist()
    assert not set(granted) & set(writable)
    assert pool.manager.sessions.end_quarantine(A) == len(writable)
    pool.audit()
    assert pool.manager.sessions.end_quarantine(A) == 0
    reply = pool.step(B, reserves=[(2, 1, 16)])
    assert reply.reserve_reserved.tolist() == [16]


def test_6_a_block_cut_short_under_a_running_step_is_quarantined() -> None:
    """The step in flight writes behind the cut, though nothing behind it is reserved any more."""
    pool = CorePool(num_blocks=3)
    pool.prefill(1, range(5))
    pool.step(reserves=[(1, 8, 8)])
    pool.step(lag=1, truncates=[(1, 5)])
    written = pool.table(1)[1]
    pool.manager.sessions.close(A, may_still_write=True)
    assert pool.state(written) is BlockState.QUARANTINED


def test_6_fenced_blocks_that_nothing_caches_are_quarantined_and_cached_ones_stay_cached() -> None:
    pool = CorePool(num_blocks=9)
    blocks = pool.prefill(1, range(6))
    pool.step(reserves=[(1, 8, 8)])
    pool.step(lag=1, releases=[1])
    pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    assert [pool.state(block) for block in blocks] == [BlockState.CACHED, BlockState.QUARANTINED]


def test_6_a_drained_session_leaves_nothing_behind() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(6))
    pool.step(reserves=[(1, 20, 20)])
    pool.step(lag=1, truncates=[(1, 7)])
    result = pool.manager.sessions.close(A, may_still_write=False)
    assert result.num_quarantined_blocks == 0
    pool.audit()
    stats = pool.manager.queries.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks, stats.num_running_sequences) == (7, 1, 0)


def test_6_one_sessions_end_is_nothing_to_another() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(6))
    pool.prefill(1, range(6), session=B)
    before = pool.table(1, session=B), pool.counters(1, session=B)
    pool.manager.sessions.close(A, may_still_write=True)
    pool.manager.sessions.end_quarantine(A)
    assert (pool.table(1, session=B), pool.counters(1, session=B)) == before
    manager = pool.manager
    for call in (lambda: pool.create(2, [1]), lambda: pool.view(1), lambda: manager.sessions.close(A, may_still_write=True)):
        with pytest.raises(UnknownSession):
            call()
    pool.audit()


def test_a_large_session_is_gone_at_once_and_given_back_in_slices() -> None:
    pool = CorePool(num_blocks=17)
    pool.manager.reclaim.at_once = 1
    tables = [pool.prefill(i, range(10 * i, 10 * i + 8)) for i in (1, 2, 3)]
    assert pool.manager.sessions.close(A, may_still_write=False).num_released_sequences == 3
    with pytest.raises(UnknownSession):
        pool.view(2)
    num_referenced, is_left = 5, True  # one block went with the end
    while is_left:
        is_left = pool.manager.sessions.reclaim_blocks(1)
        pool.audit()
        states = [pool.state(block) for table in tables for block in table]
        assert num_referenced - states.count(BlockState.REFERENCED) <= 1
        num_referenced = states.count(BlockState.REFERENCED)
        assert states.count(BlockState.CACHED) == 6 - num_referenced
        # Of a sequence the end goes first, so that no cached block is below one in use.
        assert all(
            (pool.state(first), pool.state(last)) != (BlockState.CACHED, BlockState.REFERENCED) for first, last in tables
        )
    assert not num_referenced
    assert pool.matched(range(20, 28)) == tables[1]


def long_prefill(pool: CorePool, sequence_id: int) -> list[int]:
    """Two blocks are committed, three more may be written."""
    pool.create(sequence_id, range(20 * sequence_id, 20 * sequence_id + 20))
    pool.step(starts=[(sequence_id, 20, 0)])
    pool.step(commits=[(sequence_id, 8, [])])
    return pool.table(sequence_id)


@pytest.mark.parametrize("num_slices", [0, 3, 7, 100])
def test_a_large_session_may_write_its_blocks_until_its_quarantine_ends(num_slices: int) -> None:
    pool = CorePool(num_blocks=17)
    pool.manager.reclaim.at_once = 1
    tables = [long_prefill(pool, 1), long_prefill(pool, 2)]
    pool.manager.sessions.close(A, may_still_write=True)
    for _ in range(num_slices):
        pool.manager.sessions.reclaim_blocks(1)
        pool.audit()
        for table in tables:
            assert {pool.state(block) for block in table[:2]} <= {BlockState.REFERENCED, BlockState.CACHED}
            assert {pool.state(block) for block in table[2:]} <= {BlockState.REFERENCED, BlockState.QUARANTINED}
    if num_slices == 100:
        assert {pool.state(block) for table in tables for block in table[2:]} == {BlockState.QUARANTINED}
    pool.manager.sessions.end_quarantine(A)
    while pool.manager.sessions.reclaim_blocks(1):
        pool.audit()
    pool.audit()
    assert {pool.state(block) for table in tables for block in table[2:]} == {BlockState.FREE}
    assert {pool.state(block) for table in tables for block in table[:2]} == {BlockState.CACHED}


def test_a_sequence_of_an_ended_session_gives_way_to_a_new_one() -> None:
    pool = CorePool(num_blocks=17, max_sequences=3)
    pool.manager.reclaim.at_once = 0
    pool.prefill(1, range(8))
    pool.create(2, [1])
    pool.create(3, [1])
    pool.manager.sessions.close(A, may_still_write=True)
    for sequence_id in (1, 2, 3):
        pool.create(sequence_id, [5], session=B)
        pool.audit()
    with pytest.raises(OutOfSequences):
        pool.create(4, [5], session=B)
