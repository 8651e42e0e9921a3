"""The order of each eviction policy by examples: chains of a few blocks, made and used again through the core."""

import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES, make_policy
from kvkeeper.cache_service.core.values.errors import InvalidField
from tests.support.worlds.core_pool import CorePool

PROMPTS = {"a": [1, 2], "b": [3, 4, 5], "c": [6, 7]}


class Cached:
    """A pool with blocks of one token; each run is one sequence from start to end."""

    def __init__(self, policy: str) -> None:
        self.pool = CorePool(num_blocks=32, block_size=1, eviction_policy=policy, max_sequences=8)
        self.last_id = 0

    def run(self, tokens: list[int], priority: int = 0) -> None:
        self.last_id += 1
        self.pool.prefill(self.last_id, tokens, priority=priority)
        self.pool.step(releases=[self.last_id])
        self.pool.step()  # the release is fenced until the step before has completed

    def evicted(self, *prompts: list[int]) -> list[int]:
        """All tokens of the prompts in the order of their eviction, one at a time."""
        order: list[int] = []
        while left := [prompt for prompt in prompts if self.pool.matched(prompt)]:
            before = [len(self.pool.matched(prompt)) for prompt in left]
            self.pool.manager.evictions.evict_blocks(self.pool.manager.queries.stats().num_free_blocks + 1)
            self.pool.audit()
            after = [len(self.pool.matched(prompt)) for prompt in left]
            prompt, length = next((p, b) for p, b, a in zip(left, before, after, strict=True) if a < b)
            order.append(prompt[length - 1])
        return order


ORDERS = {
    "lru": [5, 4, 3, 7, 6, 2, 1],  # a was used last
    "lfu": [5, 4, 3, 7, 6, 2, 1],  # a was used twice
    "longest_first": [5, 4, 3, 7, 6, 2, 1],  # b is the longest, then c was used less recently
    "priority": [7, 6, 2, 1, 5, 4, 3],  # b had a higher priority
    "adaptive": [5, 4, 3, 7, 6, 2, 1],  # nothing learned yet: least recently used
}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_order(policy: str) -> None:
    cached = Cached(policy)
    cached.run(PROMPTS["a"])
    cached.run(PROMPTS["b"], priority=2)
    cached.run(PROMPTS["c"])
    cached.run(PROMPTS["a"])
    assert cached.evicted(*PROMPTS.values()) == ORDERS[policy]


def test_lfu_counts_uses_before_recency() -> None:
    cached = Cached("lfu")
    for _ in range(3):
        cached.run([1])
    cached.run([2])
    cached.run([2])
    cached.run([3])
    assert cached.evicted([1], [2], [3]) == [3, 2, 1]


def test_a_shared_block_is_as_long_as_its_shortest_sequence() -> None:
    cached = Cached("longest_first")
    cached.run([1, 2, 3, 4])
    cached.run([1])
    cached.run([5, 6])
    assert cached.evicted([1, 2, 3, 4], [5, 6]) == [4, 3, 2, 6, 5, 1]


def test_a_shared_block_has_the_highest_priority_of_its_sequences() -> None:
    cached = Cached("priority")
    cached.run([1, 2], priority=5)
    cached.run([1, 3], priority=-1)
    cached.run([4], priority=1)
    assert cached.evicted([1, 2], [1, 3], [4]) == [3, 4, 2, 1]


def test_a_forgotten_block_starts_anew() -> None:
    """Clearing the index forgets uses too: block numbers come back with other contents."""
    cached = Cached("lfu")
    for _ in range(3):
        cached.run([1])
    cached.pool.manager.prefixes.clear()
    cached.run([2])
    cached.run([1])
    assert cached.evicted([1], [2]) == [2, 1]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_nothing_is_evictable_in_an_empty_pool(policy: str) -> None:
    made = make_policy(policy, 4)
    assert not made.order().stamps.newest.any()
    assert made.take_victims(0).tolist() == []


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidField) as refused:
        make_policy("no_such_policy", 4)
    assert refused.value.metadata["limit"] == ", ".join(POLICY_NAMES)
