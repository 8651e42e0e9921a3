"""The order of each eviction policy by examples: chains of a few blocks, made and used again through the core."""

import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES, make_policy
from kvkeeper.cache_service.core.values.errors import InvalidField
from tests.support.worlds.core_pool import CorePool

PROMPTS = {"a": [1, 2], "b": [3, 4, 5], "c": [6, 7]}


def empty(policy: str) -> CorePool:
    """Blocks of one token."""
    return CorePool(num_blocks=32, block_size=1, eviction_policy=policy, max_sequences=8)


ORDERS = {
    "lru": [5, 4, 3, 7, 6, 2, 1],  # a was used last
    "lfu": [5, 4, 3, 7, 6, 2, 1],  # a was used twice
    "longest_first": [5, 4, 3, 7, 6, 2, 1],  # b is the longest, then c was used less recently
    "priority": [7, 6, 2, 1, 5, 4, 3],  # b had a higher priority
    "adaptive": [5, 4, 3, 7, 6, 2, 1],  # nothing learned yet: least recently used
}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_order(policy: str) -> None:
    pool = empty(policy)
    pool.cache(PROMPTS["a"])
    pool.cache(PROMPTS["b"], priority=2)
    pool.cache(PROMPTS["c"])
    pool.cache(PROMPTS["a"])
    assert pool.evicted(*PROMPTS.values()) == ORDERS[policy]


def test_lfu_counts_uses_before_recency() -> None:
    pool = empty("lfu")
    for _ in range(3):
        pool.cache([1])
    pool.cache([2])
    pool.cache([2])
    pool.cache([3])
    assert pool.evicted([1], [2], [3]) == [3, 2, 1]


def test_a_shared_block_is_as_long_as_its_shortest_sequence() -> None:
    pool = empty("longest_first")
    pool.cache([1, 2, 3, 4])
    pool.cache([1])
    pool.cache([5, 6])
    assert pool.evicted([1, 2, 3, 4], [5, 6]) == [4, 3, 2, 6, 5, 1]


def test_a_shared_block_has_the_highest_priority_of_its_sequences() -> None:
    pool = empty("priority")
    pool.cache([1, 2], priority=5)
    pool.cache([1, 3], priority=-1)
    pool.cache([4], priority=1)
    assert pool.evicted([1, 2], [1, 3], [4]) == [3, 4, 2, 1]


def test_a_forgotten_block_starts_anew() -> None:
    """Clearing the index forgets uses too: block numbers come back with other contents."""
    pool = empty("lfu")
    for _ in range(3):
        pool.cache([1])
    pool.manager.prefixes.clear()
    pool.cache([2])
    pool.cache([1])
    assert pool.evicted([1], [2]) == [2, 1]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_nothing_is_evictable_in_an_empty_pool(policy: str) -> None:
    made = make_policy(policy, 4)
    assert not made.order().stamps.newest.any()
    assert made.take_victims(0).tolist() == []


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidField) as refused:
        make_policy("no_such_policy", 4)
    assert refused.value.metadata["limit"] == ", ".join(POLICY_NAMES)
