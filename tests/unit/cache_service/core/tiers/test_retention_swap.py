"""Retention of a sequence that goes to the host tier and back: holes stay holes, and what is held comes back (C7, C10, C13)."""

import pytest

from kvkeeper.cache_service.core.values.errors import InvalidField, WrongState
from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.types import SequenceState, TransferKind
from tests.support.tiers.tier_pool import TierPool
from tests.support.worlds.core_pool import A
from tests.support.worlds.retained import KEPT, all_blocks, holes, wholly_unread


def retained(num_tokens: int, sink: int, window: int, **config: object) -> tuple[TierPool, list[int]]:
    """A pool with one such sequence, and what its blocks hold, 0 for a hole."""
    pool = TierPool(**config)
    pool.prefill(1, range(num_tokens), retention=Retention(sink, window))
    pool.fill(1)
    pool.device[0] = 0
    return pool, pool.bytes(1)


@pytest.mark.parametrize("num_tokens", [15, 16, 17])
@pytest.mark.parametrize(("sink", "window"), KEPT)
def test_what_is_held_comes_back_and_holes_stay(num_tokens: int, sink: int, window: int) -> None:
    pool, written = retained(num_tokens, sink, window)
    gone = wholly_unread(num_tokens, sink, window)
    reply = pool.swap_out(1)
    assert len(reply.transfer_ids) == len(written) - len(gone)  # no order for a hole
    assert pool.manager.queries.stats().num_held_host_blocks == len(written) - len(gone)
    pool.manager.prefixes.clear()
    pool.scribble()
    reply = pool.step(ins=[1])
    assert set(reply.transfer_kinds.tolist()) == {TransferKind.SWAP_IN}
    ready = pool.step(done=pool.run(reply))
    assert ready.ready_block_ids.tolist() == pool.table(1)
    assert (holes(pool, 1), pool.bytes(1)) == (gone, written)
    pool.release(1)
    assert sorted(all_blocks(pool)) == list(range(1, 9))
    assert pool.manager.queries.stats().num_held_host_blocks == 0


@pytest.mark.parametrize("is_out", [True, False])
def test_a_window_that_moved_while_its_sequence_was_out_drops_when_it_is_back(is_out: bool) -> None:
    pool, _ = retained(12, 0, 8)
    pool.step(reserves=[(1, 20, 20)])
    pool.fill(1)
    pool.device[0] = 0
    out = pool.step(outs=[1], lag=1)
    pool.step(commits=[(1, 20, range(8))], done=pool.run(out) if is_out else [])
    assert pool.counters(1) == (20, 20, 20)
    reply = pool.step(ins=[1])
    assert (len(reply.transfer_ids) > 0) == is_out
    pool.step(done=pool.run(reply if is_out else out))
    assert holes(pool, 1) == wholly_unread(20, 0, 8) == [0, 1, 2]
    assert pool.bytes(1)[3:] == [104, 105]
    pool.step(reserves=[(1, 21, 21)])
    pool.step(commits=[(1, 21, [9])])
    pool.release(1)
    pool.manager.prefixes.clear()
    assert sorted(all_blocks(pool)) == list(range(1, 9))


def test_a_swapped_sequence_keeps_its_retention_and_is_not_cut() -> None:
    pool, _ = retained(17, 2, 5)
    reply = pool.step(outs=[1])
    for items in ({"forks": [(1, 2, 17)]}, {"truncates": [(1, 16)]}):
        with pytest.raises(WrongState):
            pool.step(**items)
    with pytest.raises(WrongState):
        pool.manager.updates.update(A, 1, retention=Retention(0, 1))
    pool.manager.updates.update(A, 1, priority=3)
    assert (pool.state_of(1), pool.view(1).priority) == (SequenceState.SWAPPED, 3)
    assert pool.view(1).retention == Retention(2, 5)
    pool.step(done=pool.run(reply))
    reply = pool.step(ins=[1])
    pool.step(done=pool.run(reply))
    with pytest.raises(InvalidField):
        pool.step(truncates=[(1, 9)])
    pool.manager.updates.update(A, 1, retention=Retention(0, 1))
    assert holes(pool, 1) == wholly_unread(17, 0, 1)


def test_forks_that_share_holes_swap_by_themselves() -> None:
    pool, written = retained(18, 2, 5)
    pool.step(forks=[(1, 2, 18)])
    pool.swap_out(1)
    assert pool.bytes(2) == written
    reply = pool.step(ins=[1])
    pool.step(done=pool.run(reply))
    assert (pool.bytes(1), pool.bytes(2)) == (written, written)
    assert holes(pool, 1) == holes(pool, 2) == wholly_unread(18, 2, 5)
    pool.release(1, 2)
    pool.manager.prefixes.clear()
    assert sorted(all_blocks(pool)) == list(range(1, 9))
