"""Partial nodes where other rules of a pool meet them: steps in flight, exact starts, limits that are off."""

import pytest

from kvkeeper.cache_service.core.values.kv_spec import WHOLE, ReadSpan, state_span
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import SequenceId
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32

_STATES = (WHOLE, state_span(3))


def _pool(**config: object) -> CorePool:
    return CorePool(**{"num_blocks": 33, "block_size": 4, "takes_partial": True} | config)  # type: ignore[arg-type]


def test_a_block_that_a_step_in_flight_still_writes_is_no_partial_node() -> None:
    """Step 3 writes the slot behind token 10, which the cut takes from the sequence; its session ends without its engine."""
    pool = _pool()
    pool.prefill(1, list(range(10)))
    pool.step(commits=[(1, 10, [10])], reserves=[(1, 11, 11)])
    block = pool.table(1)[-1]
    pool.step(lag=1, truncates=[(1, 10)], releases=[1])
    pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    pool.create(2, [*range(10), 77], session=B)
    pool.step(B, starts=[(2, ALL, ALL)])
    assert block not in pool.table(2, session=B)


@pytest.mark.parametrize("spans", [(WHOLE,), _STATES], ids=["dense", "states"])
def test_a_start_of_exactly_the_tokens_of_a_node(spans: tuple[ReadSpan, ...]) -> None:
    pool = _pool(group_spans=spans)
    pool.prefill(1, list(range(6)))
    pool.release(1)
    args = SequenceArgs(SequenceId(2), int32(range(8)))
    pool.manager.creation.create(A, args)
    pool.manager.one_item.extend(A, 2, 6, look_up=True)
    pool.audit()
    pool.manager.one_item.extend(A, 2, 8, look_up=True)
    pool.audit()


def test_a_pool_that_keeps_no_partial_nodes() -> None:
    pool = _pool(max_partial_nodes=0)
    pool.prefill(1, list(range(6)))
    pool.release(1)
    assert len(pool.manager.state.index.partials) == 0


def test_what_is_left_behind_is_cleared_in_slices() -> None:
    pool = _pool(group_spans=_STATES)
    for number in range(1, 6):
        pool.prefill(number, [number, 50, 51])
        pool.release(number)
    partials, left = pool.manager.state.index.partials, []
    clearing = pool.manager.prefixes.begin_clearing()
    while clearing.clear_some(4):
        left.append(len(partials))
        pool.audit()
    assert [*left, len(partials)] == [3, 1, 0]
    assert clearing.end().num_forgotten_blocks == 10
