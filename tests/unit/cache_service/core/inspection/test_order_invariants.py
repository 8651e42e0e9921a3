"""The audit of free list and eviction order: each fault is told, in any slice, and what changes between slices is none."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvkeeper.cache_service.core.blocks.block_pool import BlockPool
from kvkeeper.cache_service.core.eviction import POLICY_NAMES, EvictionPolicy
from kvkeeper.cache_service.core.eviction.adaptive import AdaptivePolicy
from kvkeeper.cache_service.core.eviction.block_queue import BlockQueue
from kvkeeper.cache_service.core.eviction.keyed import KeyedPolicy
from kvkeeper.cache_service.core.eviction.lru import LruPolicy
from kvkeeper.cache_service.core.inspection import order_invariants, slices
from tests.support.slices import todays
from tests.support.worlds.core_pool import CorePool

MISPLACED = "an evictable block is not in the eviction order once"
UNKNOWN = "the eviction policy knows of other blocks than the indexed ones that nothing holds"


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BLOCKS", 3)
    monkeypatch.setattr(order_invariants, "_ROWS_AT_ONCE", 1)


@pytest.fixture(params=POLICY_NAMES)
def cached(request: pytest.FixtureRequest) -> CorePool:
    """Blocks 1 to 6 of 12 are cached, of two prompts; 7 and 8 are held, and 7 is indexed."""
    pool = CorePool(13, 1, eviction_policy=request.param)
    for sequence_id, tokens in ((1, [1, 2, 3]), (2, [4, 5, 6])):
        pool.prefill(sequence_id, tokens)
    pool.release(1, 2)
    pool.prefill(3, [7])
    return pool


def lose_one(policy: EvictionPolicy) -> None:
    if isinstance(policy, AdaptivePolicy):
        policy._catch_up()
        policy._leaves._size -= 1
    else:
        queues(policy)[-1]._segments[-1].end -= 1


def have_one_twice(policy: EvictionPolicy) -> None:
    if isinstance(policy, AdaptivePolicy):
        policy._catch_up()
        policy._unused.push(leaf := policy._leaves.entries()[:1], policy._stamps.newest[leaf])
    else:
        blocks, stamps = queues(policy)[0].rows()[0]
        queues(policy)[0].push(blocks[:1].copy(), stamps[:1].copy())


def queues(policy: EvictionPolicy) -> list[BlockQueue]:
    if isinstance(policy, KeyedPolicy):
        return list(policy._queues.values())
    assert isinstance(policy, LruPolicy)
    return [policy._queue]


def blocks_pool(pool: CorePool) -> BlockPool:
    return pool.manager.state.pool


def violations(pool: CorePool) -> set[str]:
    return set(pool.manager.queries.check_invariants())


def test_a_block_that_the_order_lost_is_told(cached: CorePool) -> None:
    lose_one(blocks_pool(cached).policy)
    assert violations(cached) == {MISPLACED}


def test_a_block_that_the_order_has_twice_is_told(cached: CorePool) -> None:
    have_one_twice(blocks_pool(cached).policy)
    assert violations(cached) == {MISPLACED}


@pytest.mark.parametrize("waits", [False, True])
def test_a_policy_that_is_wrong_about_a_block_is_told(cached: CorePool, waits: bool) -> None:
    pool = blocks_pool(cached)
    stamps = pool.policy.order().stamps
    held = int(np.flatnonzero(pool.ref_counts)[0])
    if waits:
        stamps.newest[held] = stamps.clock + 1
    else:
        stamps.newest[1] = 0
    assert violations(cached) == {UNKNOWN}


@pytest.mark.parametrize(
    ("damage", "differ"),
    [
        (lambda stack, size: np.copyto(stack[:1], stack[1:2]), 2),  # one twice, and one not
        (lambda stack, size: np.copyto(stack[:1], 1), 2),  # one that is cached
        (lambda stack, size: np.copyto(stack[size - 1 : size], 0), 2),  # the null block
    ],
)
def test_a_free_list_of_other_blocks_is_told(cached: CorePool, damage: Callable[..., None], differ: int) -> None:
    free = blocks_pool(cached).free
    damage(free._stack, len(free))
    found = violations(cached)
    assert len(found) == differ
    assert all(text.endswith("has the wrong number of places in the free list") for text in found)


def test_a_number_that_does_not_add_up_is_told(cached: CorePool) -> None:
    pool = blocks_pool(cached)
    pool.busy_counts[np.flatnonzero(pool.ref_counts)] = 1
    assert violations(cached) == {"quarantines and transfers do not add up"}


@pytest.mark.parametrize("policy", todays(POLICY_NAMES, 2))
def test_what_changes_between_slices_is_no_error(policy: str) -> None:
    """Prompts come, are shared, go and are evicted while one audit after the other is under way."""
    rng = random.Random(policy)
    pool = CorePool(25, 1, eviction_policy=policy, max_sequences=8)
    num_done, next_id, live = -1, 1, list[int]()
    audit: Iterator[list[str]] = iter(())
    evicted = pool.manager.queries.stats().num_evicted_blocks
    while num_done < 12:
        for _ in range(rng.randrange(1, 12)):
            wrong = next(audit, None)
            if wrong is None:
                audit, num_done = pool.manager.queries.audit(), num_done + 1
            else:
                assert wrong == []
        if len(live) > 2:
            pool.release(live.pop(rng.randrange(len(live))))
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        pool.prefill(next_id, prompt)
        live.append(next_id)
        next_id += 1
    assert pool.manager.queries.stats().num_evicted_blocks > evicted
