"""UpdateSequence: retention set and made narrower while a sequence lives, and its priority."""

import pytest

from kvkeeper.cache_service.core.values.errors import InvalidField, UnknownSequence
from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.types import BlockState
from tests.support.worlds.core_pool import ALL, A, B, CorePool
from tests.support.worlds.retained import KEPT, all_blocks, grow, holes, wholly_unread


@pytest.mark.parametrize(("sink", "window"), KEPT)
def test_retention_set_on_a_running_sequence_drops_at_once_and_tells_in_the_next_reply(sink: int, window: int) -> None:
    pool = CorePool(num_blocks=9)
    table = pool.prefill(1, range(18))
    pool.manager.updates.update(A, 1, retention=Retention(sink, window))
    pool.audit()
    gone = wholly_unread(18, sink, window)
    assert holes(pool, 1) == gone
    assert len(pool.matched(range(18))) == 4  # computed with whole attention, so shared
    reply = pool.step(reserves=[(1, 19, 19)])
    assert sorted(reply.update_table_idx.tolist()) == gone
    assert [block for idx, block in enumerate(table) if idx not in gone] == [block for block in pool.table(1) if block]
    pool.manager.updates.update(A, 1, retention=Retention(sink, window))  # the same again changes nothing
    assert holes(pool, 1) == gone
    grow(pool, 1, 30)
    assert holes(pool, 1) == wholly_unread(30, sink, window)


def test_what_an_update_drops_waits_for_the_last_step() -> None:
    pool = CorePool(num_blocks=9, prefix_caching=False)
    table = pool.prefill(1, range(16))
    pool.step(reserves=[(1, 17, 17)])  # may still read all of it
    pool.manager.updates.update(A, 1, retention=Retention(0, 4))
    assert {pool.state(block) for block in table[:3]} == {BlockState.FENCED}
    pool.step(lag=1)
    assert {pool.state(block) for block in table[:3]} == {BlockState.FENCED}
    pool.step()
    assert {pool.state(block) for block in table[:3]} == {BlockState.FREE}


def test_retention_is_made_narrower_and_never_wider() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(30), retention=Retention(9, 9))
    assert holes(pool, 1) == [3, 4]
    for wanted, field, limit in ((Retention(10, 9), "num_sink_tokens", "9"), (Retention(9, 10), "num_window_tokens", "9"),
                                 (Retention(0, 10), "num_window_tokens", "9")):  # fmt: skip
        with pytest.raises(InvalidField) as refused:
            pool.manager.updates.update(A, 1, retention=wanted)
        assert refused.value.metadata == {"field": f"retention.{field}", "limit": limit}
    for wanted in (Retention(8, 9), Retention(4, 9), Retention(4, 3), Retention(0, 1)):
        pool.manager.updates.update(A, 1, retention=wanted)
        pool.audit()
        assert holes(pool, 1) == wholly_unread(30, wanted.num_sink_tokens, wanted.num_window_tokens)
    pool.step(releases=[1])
    assert sorted(all_blocks(pool)) == list(range(1, 9))


def test_a_waiting_sequence_hits_by_its_new_retention() -> None:
    pool = CorePool(num_blocks=17)
    pool.prefill(1, range(18))
    pool.create(2, range(18))
    pool.manager.updates.update(A, 2, priority=-7, retention=Retention(0, 8))
    assert (pool.view(2).priority, pool.view(2).retention) == (-7, Retention(0, 8))
    assert pool.step(starts=[(2, ALL, ALL)]).start_hits.tolist() == [8]
    for wrong in ({"priority": 1001}, {"priority": -1001}, {"priority": 3, "retention": Retention(1, 8)}):
        with pytest.raises(InvalidField):
            pool.manager.updates.update(A, 2, **wrong)
    assert pool.view(2).priority == -7
    with pytest.raises(UnknownSequence):
        pool.manager.updates.update(B, 2, priority=1)
