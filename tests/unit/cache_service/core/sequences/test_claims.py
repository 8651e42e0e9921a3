"""Claims (docs/api/protocol.md, section 5), by hand: which sequence waits for blocks, and which gets those that come free.

The machine holds the core to all of it.
"""

import numpy as np
import pytest

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.sequences.claims import PATIENCE_SECONDS, PATIENCE_STEPS, StartNumbers
from kvkeeper.cache_service.core.values.errors import InvalidField, OutOfBlocks
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId, StartResult
from tests.support.worlds.core_pool import ALL, A, B, CorePool

STARTED, NO_ROOM = StartResult.STARTED, StartResult.NO_ROOM


def test_places_are_service_wide_and_kept_by_a_sequence_that_is_created_again() -> None:
    numbers, session = StartNumbers(), SessionId("s")
    pools = [PoolManager(PoolConfig(9, 4), numbers) for _ in range(2)]
    for pool in pools:
        pool.sessions.open(session, Executor.ENGINE)

    def create(pool: PoolManager, sequence_id: int, start_number: int = 0) -> int:
        tokens = np.array([1], np.int32)
        pool.creation.create(session, SequenceArgs(SequenceId(sequence_id), tokens, start_number=start_number))
        return pool.queries.start_number(session, sequence_id)

    assert [create(pool, 1) for pool in pools] == [1, 2]
    assert create(pools[1], 2, start_number=1) == 1
    assert create(pools[1], 2) == 1  # the same again: it was not asked for another place
    with pytest.raises(InvalidField):
        create(pools[0], 3, start_number=4)  # not given out yet
    assert create(pools[0], 3) == 3


def test_a_fork_is_as_old_as_its_parent() -> None:
    pool = CorePool()
    pool.prefill(1, range(3))
    pool.create(2, [7])
    pool.step(forks=[(1, 3, 3)])
    assert [pool.view(i).start_number for i in (1, 2, 3)] == [1, 2, 1]


def full_pool() -> CorePool:
    """Eight blocks, all held by sequence 1 of session A; 2 of A and 3 of B wait, in this order."""
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(32))
    pool.create(2, range(100, 108))
    pool.create(3, [9], session=B)
    assert pool.step(starts=[(2, ALL, 0)]).start_results.tolist() == [NO_ROOM]
    return pool


def test_a_refused_start_is_not_sent_to_the_back_of_the_queue() -> None:
    pool = full_pool()
    pool.step(truncates=[(1, 28)])
    assert pool.manager.queries.stats().num_claimed_blocks == 2
    reply = pool.step(B, starts=[(3, 1, 0)])  # there is room for it, but not before 2
    assert (reply.num_free + reply.num_evictable, reply.start_results.tolist()) == (1, [NO_ROOM])
    assert pool.step(starts=[(2, ALL, 0)]).start_results.tolist() == [STARTED]


def test_an_earlier_start_and_a_more_important_one_need_not_wait() -> None:
    for args in ({"start_number": 1}, {"priority": 1}):
        pool = full_pool()
        pool.step(truncates=[(1, 28)])
        pool.create(4, [8], session=B, **args)
        assert pool.step(B, starts=[(4, 1, 0)]).start_results.tolist() == [STARTED]


def test_what_comes_free_is_kept_from_later_reservations_and_not_from_earlier_ones() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(20))
    pool.create(2, range(100, 112))
    pool.prefill(3, range(200, 212), session=B)  # later than 2
    assert pool.step(starts=[(2, ALL, 0)]).start_results.tolist() == [NO_ROOM]
    pool.step(truncates=[(1, 16)])
    assert pool.step(B, reserves=[(3, 13, 13)]).reserve_reserved.tolist() == [12]
    assert pool.step(B, reserves=[(3, 12, 12)]).reserve_reserved.tolist() == [12]  # takes nothing
    assert pool.step(reserves=[(1, 17, 17)]).reserve_reserved.tolist() == [17]


@pytest.mark.parametrize(
    ("num_tokens", "wanted"), [(8, (5, 8)), (12, (17, 17))], ids=["of an earlier claim", "for more than there is"]
)
def test_a_later_item_that_is_refused_does_not_starve_an_earlier_one(num_tokens: int, wanted: tuple[int, int]) -> None:
    pool = CorePool(num_blocks=3 + num_tokens // 4)
    pool.prefill(1, range(8))
    pool.prefill(2, range(100, 100 + num_tokens))
    assert pool.step(reserves=[(1, 9, 9)]).reserve_reserved.tolist() == [8]
    pool.step(truncates=[(2, num_tokens - 4)])
    reply = pool.step(reserves=[(2, *wanted), (1, 9, 9)])  # the later one stands first
    assert reply.reserve_reserved.tolist() == [num_tokens - 4, 9]


def test_an_item_that_is_refused_for_an_earlier_claim_holds_up_no_item_behind_it() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(20), priority=1)
    pool.prefill(2, range(100, 108))
    pool.prefill(3, range(200, 204))
    assert pool.step(reserves=[(1, 21, 21)]).reserve_reserved.tolist() == [20]
    pool.step(truncates=[(1, 8)])  # 3 blocks come free, 1 of them is reserved
    reply = pool.step(reserves=[(2, 20, 20), (3, 8, 8)])
    assert reply.reserve_reserved.tolist() == [8, 8]


def test_a_change_of_priority_changes_the_oldest_claim() -> None:
    pool = full_pool()
    pool.step(truncates=[(1, 28)])
    assert pool.step(B, starts=[(3, 1, 0)]).start_results.tolist() == [NO_ROOM]
    pool.manager.updates.update(B, 3, priority=5)
    pool.audit()
    assert pool.step(B, starts=[(3, 1, 0)]).start_results.tolist() == [STARTED]


def test_blocks_are_asked_back_only_from_sessions_that_run_later_sequences() -> None:
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(8))
    pool.prefill(2, range(100, 108), session=B)
    reply = pool.step(reserves=[(1, 9, 12)])
    assert (reply.reserve_reserved.tolist(), reply.num_reclaim_hint) == ([8], 0)
    assert pool.step(B).num_reclaim_hint == 1
    assert pool.manager.sessions.reclaim_hint(B) == 1
    pool.step(B, releases=[2])
    assert pool.step(reserves=[(1, 9, 12)]).reserve_reserved.tolist() == [12]
    assert pool.manager.queries.stats().num_claimed_blocks == 0


def test_what_is_fenced_is_not_asked_back_again() -> None:
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(8))
    pool.prefill(2, range(100, 104), session=B)
    pool.prefill(3, range(200, 204), session=B)
    pool.step(reserves=[(1, 9, 9)])
    pool.step(B, reserves=[(2, 4, 4), (3, 4, 4)])
    assert pool.step(B, lag=1, releases=[3]).num_reclaim_hint == 0


@pytest.mark.parametrize("end", ["release", "close", "steps", "time"])
def test_a_client_that_gave_up_does_not_block_the_pool(end: str) -> None:
    pool = full_pool()
    pool.step(truncates=[(1, 24)])
    assert pool.step(B, starts=[(3, 1, 0)]).start_results.tolist() == [NO_ROOM]
    if end == "release":
        pool.step(releases=[2])
    elif end == "close":
        pool.manager.sessions.close(A, may_still_write=False)
    elif end == "steps":
        for _ in range(PATIENCE_STEPS):
            pool.step()
    else:
        pool.manager.state.tick(pool.manager.state.now + PATIENCE_SECONDS)
    assert pool.step(B, starts=[(3, 1, 0)]).start_results.tolist() == [STARTED]


def test_a_call_that_is_refused_with_an_error_claims_nothing() -> None:
    pool = CorePool(num_blocks=3)
    pool.prefill(1, range(8))
    pool.create(2, range(4), session=B)
    with pytest.raises(OutOfBlocks):
        pool.manager.one_item.extend(B, 2, 4, look_up=False)
    assert pool.manager.queries.stats().num_claimed_blocks == 0


def test_admission_says_now_only_where_a_start_would_be_granted() -> None:
    pool = CorePool(num_blocks=101, watermark=0.1)
    assert pool.manager.admission.check("", None, 400, 0).can_now  # nothing runs: nothing is to be left free
    pool.prefill(1, range(4))
    answer = pool.manager.admission.check("", None, 4 * 90, 0)
    assert (answer.can_now, answer.num_available_blocks) == (False, 89)
    assert pool.manager.admission.check("", None, 4 * 89, 0).can_now
    pool = full_pool()
    pool.step(truncates=[(1, 24)])
    answer = pool.manager.admission.check("", None, 4, 0)
    assert (answer.can_now, answer.can_ever, answer.num_available_blocks) == (False, True, 0)
