"""Replays requests against an eviction policy with a dictionary as its index; counts as kvkeeper.cache_service.replay does."""

import time
from collections.abc import Iterable

import numpy as np

from kvkeeper.cache_service.core.eviction import Use, make_policy
from kvkeeper.cache_service.replay import Replayed


def replay_policy(requests: Iterable[list[int]], num_blocks: int, policy: str) -> Replayed:
    """Several times faster than against the core, and the same hits."""
    replay = _PolicyReplay(num_blocks, policy)
    num_asked = num_hits = 0
    seconds: list[float] = []
    for request in requests:
        num_asked += len(request)
        begin = time.perf_counter()
        num_hits += replay.run(request)
        seconds.append(time.perf_counter() - begin)
    return Replayed(len(seconds), num_asked, num_hits, replay.num_evicted, np.array(seconds))


class _PolicyReplay:
    def __init__(self, num_blocks: int, policy: str) -> None:
        self._policy = make_policy(policy, num_blocks + 1)
        self._block_of: dict[int, int] = {}
        self._contents = [0] * (num_blocks + 1)
        self._free = list(range(1, num_blocks + 1))
        self.num_evicted = 0

    def run(self, request: list[int]) -> int:
        blocks: list[int] = []
        for content in request:
            block = self._block_of.get(content)
            if block is None:
                break
            blocks.append(block)
        num_hits, num_new = len(blocks), len(request) - len(blocks)
        held = np.array(blocks, np.int32)
        self._policy.hit(held)
        if num_new > len(self._free):
            self._evict(num_new - len(self._free))
        for content in request[num_hits:]:
            block = self._free.pop()
            self._block_of[content], self._contents[block] = block, content
            blocks.append(block)
        held = np.array(blocks, np.int32)
        self._policy.use(Use(held, np.array(request, np.int32), root=-1, priority=0, num_blocks=len(held)))
        self._policy.add(held[::-1])
        self._policy.prepare()
        return num_hits

    def _evict(self, count: int) -> None:
        victims = self._policy.take_victims(count)
        self.num_evicted += count
        for block in victims.tolist():
            del self._block_of[self._contents[block]]
            self._free.append(block)
