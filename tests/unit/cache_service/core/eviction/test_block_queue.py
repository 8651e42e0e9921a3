"""The queue of evictable blocks: order over many segments, stale entries skipped and swept, bounded room."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES, EvictionPolicy, make_policy
from kvkeeper.cache_service.core.eviction.block_queue import BlockQueue, Stamps, Sweeper
from kvkeeper.cache_service.core.values.types import Int32Array

MANY = 5000  # several segments


def blocks(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def filled(num_blocks: int = MANY) -> tuple[Stamps, BlockQueue]:
    stamps = Stamps(num_blocks + 1)
    queue = BlockQueue(stamps)
    everything = np.arange(1, num_blocks + 1, dtype=np.int32)
    for part in np.array_split(everything, 7):
        queue.push(part, stamps.give(part))
    return stamps, queue


def num_entries(queue: BlockQueue) -> int:
    return sum(segment.end - segment.start for segment in queue._segments)


def test_first_in_is_first_out_over_many_segments() -> None:
    _, queue = filled()
    assert queue.num_segments > 3
    popped = [queue.pop(count) for count in (1, 63, 64, 65, 1023, 1024, 1025, MANY)]
    assert np.concatenate(popped).tolist() == list(range(1, MANY + 1))
    assert queue.first() is None
    assert queue.pop(3).tolist() == []


def test_entries_that_are_no_longer_evictable_are_skipped() -> None:
    stamps, queue = filled()
    stamps.end_waits(np.arange(1, 3001, dtype=np.int32))
    again = blocks(7, 8)
    queue.push(again, stamps.give(again))
    assert queue.first() == 3001
    assert queue.live().tolist() == [*range(3001, MANY + 1), 7, 8]
    assert queue.pop(MANY).tolist() == [*range(3001, MANY + 1), 7, 8]


def test_pop_stops_at_the_last_stamp_asked_for() -> None:
    stamps, queue = filled()
    stamps.end_waits(blocks(2))
    assert queue.pop(10, until=4).tolist() == [1, 3, 4]
    assert queue.pop(10, until=4).tolist() == []
    assert queue.pop(2, until=4999).tolist() == [5, 6]
    assert len(queue.pop(MANY, until=4999)) == 4993
    assert queue.first() == MANY


def test_sweeping_keeps_the_order_and_drops_stale_entries() -> None:
    stamps, queue = filled()
    kept = [block for block in range(1, MANY + 1) if block % 5 == 0]
    stamps.end_waits(np.setdiff1d(np.arange(1, MANY + 1, dtype=np.int32), np.array(kept, np.int32)))
    queue.pop(1)
    segments_before = queue.num_segments
    Sweeper().pay(MANY, [queue])
    assert queue.num_segments < segments_before
    assert num_entries(queue) < 2 * len(kept)
    assert queue.live().tolist() == kept[1:]


def test_entries_stay_few_however_often_blocks_come_and_go() -> None:
    """Every block is used again and again in any order, and none is ever taken: all entries but one each are stale."""
    rng, num_blocks = np.random.default_rng(0), 4096
    stamps = Stamps(num_blocks)
    queues, sweeper = [BlockQueue(stamps) for _ in range(3)], Sweeper()
    most = 0
    for turn in range(400):
        some = rng.choice(num_blocks, 256, replace=False).astype(np.int32)
        stamps.end_waits(some)
        queue = queues[turn // 50 % 3]
        queue.push(some, stamps.give(some))
        sweeper.pay(len(some), queues)
        most = max(most, sum(num_entries(queue) for queue in queues))
    assert most <= 2.5 * num_blocks
    assert sorted(block for queue in queues for block in queue.live().tolist()) == sorted(np.flatnonzero(stamps.newest))


def waiting(policy: EvictionPolicy) -> list[int]:
    return np.flatnonzero(policy.order().stamps.newest).tolist()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_each_policy_forgets_blocks_that_are_held_again(policy: str) -> None:
    made = make_policy(policy, 64)
    made.add(blocks(4, 3, 2, 1))
    made.hit(blocks(3))
    assert waiting(made) == [1, 2, 4]
    made.forget_blocks(blocks(4))
    assert waiting(made) == [1, 2]
    made.add(blocks(3))
    assert made.take_victims(2).tolist() == [2, 1]
    assert waiting(made) == [3]
    assert made.take_victims(1).tolist() == [3]
