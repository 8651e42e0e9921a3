"""Reports of many orders that have ended: array work in slices, with an order and an outcome that do not depend on the cuts."""

from collections.abc import Callable

import pytest

from kvkeeper.cache_service.core.blocks.block_pool import BlockPool
from kvkeeper.cache_service.core.values.types import SequenceState
from tests.support.tiers.tier_pool import TierPool, int64
from tests.support.worlds.core_pool import A

NUM_BLOCKS = 24


def swapped_out(at_once: int) -> tuple[TierPool, list[int]]:
    """A pool where session a has swapped out a sequence of many blocks and has run the orders. Returns their ids."""
    pool = TierPool(num_blocks=NUM_BLOCKS + 8, block_size=1, num_host_blocks=NUM_BLOCKS + 8)
    swapper = pool.manager.swapper
    assert swapper is not None
    swapper.at_once = at_once
    pool.prefill(1, range(NUM_BLOCKS))
    pool.fill(1)
    return pool, pool.run(pool.step(outs=[1]))


def num_in_flight(pool: TierPool) -> int:
    swapper = pool.manager.swapper
    assert swapper is not None
    return len(swapper.offloader.transfers.in_flight)


def state(pool: TierPool) -> SequenceState:
    return pool.view(1).state


def test_what_is_left_of_a_report_is_worked_off_in_slices() -> None:
    pool, ids = swapped_out(at_once=5)
    pool.step(done=ids)
    assert num_in_flight(pool) == NUM_BLOCKS - 5
    for left in (12, 5, 0):
        assert pool.manager.maintenance.end_reported_orders(7) == (left > 0)
        pool.audit()
        assert num_in_flight(pool) == left
    assert not pool.manager.maintenance.end_reported_orders(7)
    assert pool.manager.queries.stats().num_referenced_blocks == 0


def test_a_swap_in_is_ready_when_the_last_slice_is_done() -> None:
    pool, ids = swapped_out(at_once=1000)
    pool.step(done=ids)
    content = [100 + place for place in range(1, NUM_BLOCKS + 1)]
    pool.manager.prefixes.clear()
    pool.scribble()
    ids = pool.run(pool.step(ins=[1]))
    swapper = pool.manager.swapper
    assert swapper is not None
    swapper.at_once = 10
    assert pool.step(done=ids).ready_ids.tolist() == []
    assert state(pool) is SequenceState.LOADING
    while pool.manager.maintenance.end_reported_orders(3):
        pool.audit()
        assert state(pool) is SequenceState.LOADING  # told in a call of its own session
    assert pool.step().ready_ids.tolist() == [1]
    assert pool.bytes(1) == content


@pytest.mark.parametrize("column", ["done", "failed"])
def test_a_repeat_of_what_waits_for_its_slice_changes_nothing(column: str) -> None:
    pool, ids = swapped_out(at_once=5)
    pool.step(done=ids)
    pool.step(**{column: ids})
    pool.manager.steps.complete(A, pool.step_ids[A], int64(ids))
    while pool.manager.maintenance.end_reported_orders(4):
        pool.audit()
    stats = pool.manager.queries.stats()
    assert (num_in_flight(pool), stats.num_failed_transfers, stats.num_swapped_sequences) == (0, 0, 1)


def test_a_failure_among_many_brings_the_sequence_back() -> None:
    pool, ids = swapped_out(at_once=5)
    pool.step(done=ids[:12], failed=ids[12:])
    assert state(pool) is SequenceState.SWAPPED
    while pool.manager.maintenance.end_reported_orders(4):
        pool.audit()
    assert pool.step().ready_ids.tolist() == [1]
    assert state(pool) is SequenceState.RUNNING


def test_what_was_reported_before_its_session_ended_was_run() -> None:
    pool, ids = swapped_out(at_once=5)
    pool.step(done=ids[:20])
    assert num_in_flight(pool) == NUM_BLOCKS - 5
    pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    assert num_in_flight(pool) == 0
    stats = pool.manager.queries.stats()
    assert stats.num_failed_transfers == NUM_BLOCKS - 20
    assert stats.num_cached_host_blocks == 20
    pool.manager.sessions.end_quarantine(A)
    pool.audit()


def test_the_work_of_a_report_does_not_grow_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"out": 0}
    end: Callable[..., None] = BlockPool.end_transfers

    def counted(pool: BlockPool, blocks: object) -> None:
        calls["out"] += 1
        end(pool, blocks)

    pool, ids = swapped_out(at_once=1000)
    monkeypatch.setattr(BlockPool, "end_transfers", counted)
    pool.step(done=ids)
    assert calls["out"] == 2  # once for each tier, as array work over all of them
