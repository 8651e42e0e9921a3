"""Evictions from pools of one and of several groups of layers: block by block, no block goes before those below it."""

from typing import Any

import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from tests.support.reference.read_spans import make_spans
from tests.support.worlds.core_pool import CorePool

_SIZE, _NUM_BLOCKS = 4, 6
_WINDOWS = make_spans(0, 7, 7)
# The groups of a pool, and the blocks that sequences are cut to before they end: with windows nothing of them.
_SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "one group": ({}, 3),
    "windows": ({"group_spans": _WINDOWS}, _NUM_BLOCKS),
    "tails": ({"group_spans": _WINDOWS, "has_tail": True}, 3),
    "chunks": ({"group_spans": (*make_spans(0), ReadSpan(8, is_chunk=True))}, _NUM_BLOCKS),
    "states": ({"group_spans": (*make_spans(0), state_span(2))}, 3),
}


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_block_by_block_none_goes_before_those_below_it(shape: str, policy: str) -> None:
    """Some are cached that no ended sequence had: what sequences were cut off from, and what windows have left behind."""
    groups, num_kept = _SHAPES[shape]
    pool = CorePool(64, _SIZE, eviction_policy=policy, **groups)
    for sequence_id in (1, 2):
        pool.prefill(sequence_id, [sequence_id] * _NUM_BLOCKS * _SIZE)
        pool.step(truncates=[(sequence_id, num_kept * _SIZE)])
    pool.release(1, 2)
    index, blocks = pool.manager.state.index, pool.manager.state.pool
    num_cached = int((index.block_of_node > 0).sum())
    assert num_cached == 2 * _NUM_BLOCKS
    while num_cached:
        assert pool.manager.evictions.evict_count(1) == 1
        pool.audit()
        num_left = int((index.block_of_node > 0).sum())
        assert num_left >= num_cached - 1, "blocks were forgotten with an evicted one"
        num_cached = num_left
    assert not blocks.num_evictable
