"""The one-item swaps: complete when they answer, all or nothing, with numbers in the refusal."""

import pytest

from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.core.values.errors import OutOfBlocks, OutOfHostBlocks, UnknownSequence
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SequenceState, SessionId, TransferKind
from tests.support.tiers.tier_pool import TierPool
from tests.support.worlds.core_pool import ALL, B

C = SessionId("c")


def pool_with_calls(**config: object) -> TierPool:
    pool = TierPool(**config)  # type: ignore[arg-type]
    pool.manager.sessions.open(C, Executor.CACHE)
    pool.step_ids[C] = 0
    return pool


def computed(pool: TierPool, sequence_id: int, num_tokens: int) -> list[int]:
    pool.create(sequence_id, range(100 * sequence_id, 100 * sequence_id + num_tokens), session=C)
    run(pool, pool.manager.one_item.extend(C, SequenceId(sequence_id), num_tokens, look_up=True))
    written = pool.fill(sequence_id, session=C)
    pool.manager.one_item.commit(C, SequenceId(sequence_id), num_tokens, num_tokens, [])  # type: ignore[arg-type]
    pool.audit()
    return written


def run(pool: TierPool, copies: Copies) -> int:
    for kind, source, destination in zip(
        copies.transfer_kinds.tolist(),
        copies.transfer_sources.tolist(),
        copies.transfer_destinations.tolist(),
        strict=True,
    ):
        if kind == TransferKind.SWAP_OUT:
            pool.host[destination] = pool.device[source]
        else:
            pool.device[destination] = pool.host[source]
    return len(copies.transfer_kinds)


def test_a_sequence_goes_out_and_comes_back_at_once() -> None:
    pool = pool_with_calls()
    written = computed(pool, 1, 10)
    assert run(pool, pool.manager.one_item.swap_out(C, SequenceId(1))) == 3
    assert pool.state_of(1, session=C) is SequenceState.SWAPPED
    assert pool.manager.queries.stats().num_busy_host_blocks == 0
    assert run(pool, pool.manager.one_item.swap_out(C, SequenceId(1))) == 0
    pool.manager.prefixes.clear()
    pool.device = [0] * len(pool.device)
    assert run(pool, pool.manager.one_item.swap_in(C, SequenceId(1))) == 3
    assert pool.state_of(1, session=C) is SequenceState.RUNNING
    assert pool.bytes(1, session=C) == written
    assert run(pool, pool.manager.one_item.swap_in(C, SequenceId(1))) == 0
    pool.audit()


def test_an_extend_that_hits_the_host_tier_loads_at_once() -> None:
    pool = pool_with_calls(num_blocks=4)
    written = computed(pool, 1, 12)
    pool.manager.one_item.release(C, SequenceId(1))
    with pool.manager.evictions.demoting(C) as moved:
        assert pool.manager.evictions.evict_blocks(3) == 3
    assert (moved.num_blocks, run(pool, moved.copies)) == (3, 3)
    pool.device = [0] * len(pool.device)
    pool.create(2, range(100, 112), session=C)
    assert run(pool, pool.manager.one_item.extend(C, SequenceId(2), 12, look_up=True)) == 2
    assert pool.view(2, session=C).num_hit_tokens == 8
    assert pool.bytes(2, session=C)[:2] == written[:2]
    pool.audit()


def test_refusals_tell_what_was_needed_and_leave_no_trace() -> None:
    pool = pool_with_calls(num_blocks=4, num_host_blocks=3)
    computed(pool, 1, 12)
    with pytest.raises(OutOfHostBlocks) as no_host:
        pool.manager.one_item.swap_out(C, SequenceId(1))
    assert no_host.value.metadata == {"requested": "3", "available": "2"}
    pool.manager.one_item.truncate(C, SequenceId(1), 8)
    run(pool, pool.manager.one_item.swap_out(C, SequenceId(1)))
    pool.manager.prefixes.clear()
    pool.create(2, range(8), session=B)
    pool.step(B, starts=[(2, ALL, 0)])
    with pytest.raises(OutOfBlocks) as no_device:
        pool.manager.one_item.swap_in(C, SequenceId(1))
    assert no_device.value.metadata == {"requested": "2", "available": "1"}
    assert pool.view(1, session=C).num_host_blocks == 2
    with pytest.raises(UnknownSequence):
        pool.manager.one_item.swap_in(C, SequenceId(3))
    pool.audit()
