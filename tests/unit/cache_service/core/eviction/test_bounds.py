"""The memory of eviction policies is bounded by the pool, however long they run: counted in parts, never in time or bytes."""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES, EvictionPolicy, Use, make_policy
from kvkeeper.cache_service.core.eviction.adaptive import AdaptivePolicy
from kvkeeper.cache_service.core.eviction.keyed import KeyedPolicy
from kvkeeper.cache_service.core.values.types import Int32Array
from tests.support.worlds.core_pool import ALL, CorePool

NUM_BLOCKS = 64
PREFIX_LEN = 4
NUM_ROUNDS = 2400


def num_parts(root: object) -> int:
    """Numbers and objects that hang from this one, each counted once."""
    seen: set[int] = set()
    left, count = [root], 0
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, (type, str)):
            continue
        seen.add(id(part))
        count += 1 + part.size if isinstance(part, np.ndarray) else 1
        if isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, set, deque)):
            left += list(part)
        names: Iterable[str] = getattr(type(part), "__slots__", ())
        left += [getattr(part, name) for name in names if not isinstance(part, tuple) and hasattr(part, name)]
        left += list(getattr(part, "__dict__", {}).values())
    return count


def use(policy: EvictionPolicy, blocks: Int32Array, turn: int) -> None:
    policy.use(Use(blocks, np.repeat(blocks, 2), -1, turn % 7, len(blocks)))


def hit_again_and_again(policy: EvictionPolicy, turn: int) -> None:
    """One prefix that every request shares, while others wait."""
    prefix = np.arange(1, 1 + PREFIX_LEN, dtype=np.int32)
    if turn:
        policy.hit(prefix)
    else:
        others = np.arange(40, 60, dtype=np.int32)
        use(policy, others, turn)
        policy.add(others[::-1])
    use(policy, prefix, turn)
    policy.add(prefix[::-1])


def outlive(policy: EvictionPolicy, turn: int) -> None:
    """All that is cached is forgotten when its time to live is over, and never evicted."""
    blocks = (1 + (turn * PREFIX_LEN + np.arange(PREFIX_LEN)) % (NUM_BLOCKS - 1)).astype(np.int32)
    use(policy, blocks, turn)
    policy.add(blocks[::-1])
    policy.forget_blocks(blocks)


def use_what_is_pinned(policy: EvictionPolicy, turn: int) -> None:
    """Nothing is ever evictable."""
    use(policy, np.arange(1, NUM_BLOCKS, dtype=np.int32), turn)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("workload", "slack"), [(hit_again_and_again, 2000), (outlive, 2000), (use_what_is_pinned, 20)])
def test_a_policy_does_not_grow(policy: str, workload: Callable[[EvictionPolicy, int], None], slack: int) -> None:
    made = make_policy(policy, NUM_BLOCKS)
    found: list[int] = []
    for turn in range(NUM_ROUNDS):
        workload(made, turn)
        made.prepare()
        if turn > NUM_ROUNDS // 3 and not turn % 29:
            if isinstance(made, AdaptivePolicy):
                made._catch_up()  # the events that it puts off are bounded, and their number varies
            found.append(num_parts(made))
    assert max(found[len(found) // 2 :]) <= max(found[: len(found) // 2]) + slack
    if isinstance(made, KeyedPolicy):
        live = [queue.live() for queue in made._queues.values()]
        assert all(len(blocks) for blocks in live)
        assert {key: len(queue.live()) for key, queue in made._queues.items()} == made._num_waiting
        assert sorted(set(made._order).intersection(made._queues)) == sorted(made._queues)


@pytest.mark.parametrize("policy", ["lfu", "longest_first", "priority"])
def test_a_queue_ends_with_its_last_block_and_returns_with_the_next(policy: str) -> None:
    made = make_policy(policy, NUM_BLOCKS)
    assert isinstance(made, KeyedPolicy)
    for turn in range(300):
        hit_again_and_again(made, turn)
    assert len(made._queues) <= 2  # the prefix's, and that of the others
    assert len(made._order) <= 200
    order = [int(block) for block in made.take_victims(PREFIX_LEN + 20)]
    if policy == "lfu":  # the hot prefix last, and leaves before parents
        assert order == [*range(59, 39, -1), 4, 3, 2, 1]
    assert sorted(order) == [*range(1, 1 + PREFIX_LEN), *range(40, 60)]
    assert made._queues == {}
    hit = np.array([7], np.int32)
    use(made, hit, 0)
    made.add(hit)
    assert made.take_victims(1).tolist() == [7]


def test_a_queue_with_few_live_entries_gives_its_room_back() -> None:
    made = make_policy("lfu", 2000)
    assert isinstance(made, KeyedPolicy)
    blocks = np.arange(1, 1001, dtype=np.int32)
    use(made, blocks, 0)
    made.add(blocks[::-1])
    made.hit(blocks[:-1])  # all but the last one
    assert made._num_waiting == {1: 1}
    assert sum(len(segment.blocks) for segment in made._queues[1]._segments) < 200
    assert made.take_victims(1).tolist() == [1000]


def test_a_tenant_without_cached_blocks_has_no_queue() -> None:
    pool = CorePool(num_blocks=9, block_size=2, tenant_quota=0.5, max_sequences=4)
    for number in range(1, 40):
        pool.prefill(number, [1, 2, 3, 4, 5], tenant=f"t{number}")
        pool.step(releases=[number])
    limits = pool.manager.state.pool.limits
    assert 0 < len(limits._queues) <= 4  # two blocks of each tenant, in a pool of eight
    pool.manager.prefixes.clear()
    pool.audit()
    assert limits._queues == {}
    pool.create(100, [1, 2, 3], tenant="t1")
    assert pool.step(starts=[(100, ALL, ALL)]).start_hits.tolist() == [0]
