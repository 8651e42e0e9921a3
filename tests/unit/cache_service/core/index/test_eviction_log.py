"""Which removals are remembered where blocks share a set of the table."""

from typing import Any

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.eviction_log import CAPACITY, WAYS, EvictionLog
from kvkeeper.cache_service.core.values.types import MatchEnd

CAUSES = [MatchEnd.EVICTED, MatchEnd.EXPIRED, MatchEnd.CLEARED]
NOW = np.zeros(1, np.int64)
NUM_SETS = CAPACITY // WAYS


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_blocks", [2, 4])
def test_the_last_removal_of_each_of_a_few_blocks_in_a_set_is_remembered(seed: int, num_blocks: int) -> None:
    """However often one of them comes and goes: a block has two of the eight places."""
    clock: Any = type("Clock", (), {"now": 0.0})()
    log, rng = EvictionLog(16, 4, 2, clock), np.random.default_rng(seed)
    # Digests of one set, with tags of their own: see _SET_SHIFT and _TAG_SHIFT.
    log._digest_of_node[:num_blocks] = [(7 + 1 + block << 32) + (5 << 16) for block in range(num_blocks)]
    assert len(set(log._sets(log._digest_of_node[:num_blocks]).tolist())) == 1
    last: dict[int, MatchEnd] = {}
    for _ in range(3000):
        block = int(rng.integers(num_blocks)) if rng.random() < 0.3 else 0
        cause = CAUSES[rng.integers(len(CAUSES))]
        log.remove(np.array([block], np.int32), cause)
        last[block] = cause
        if rng.random() < 0.2:
            asked = int(rng.integers(num_blocks))
            found = log.find(log._digest_of_node[[asked]], NOW)
            assert int(found.causes[0]) == last.get(asked, 0), asked


def test_of_many_blocks_of_one_set_in_one_call_the_last_are_remembered() -> None:
    clock: Any = type("Clock", (), {"now": 0.0})()
    log = EvictionLog(64, 4, 2, clock)
    digests = np.array([(9 + block << 32) + (5 << 16) for block in range(20)], np.uint64)
    log._digest_of_node[:20] = digests
    log.remove(np.arange(20, dtype=np.int32), MatchEnd.CLEARED)
    found = log.find(digests, np.zeros(20, np.int64)).causes > 0
    assert found.tolist() == [False] * (20 - WAYS) + [True] * WAYS
