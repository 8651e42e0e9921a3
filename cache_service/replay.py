"""Replays requests in order against the core, and against what the best policy could have done.

A request is a list of numbers, one per block, equal numbers for equal prefixes (`hash_ids` of a Mooncake trace). It hits its
leading cached blocks, computes the others, and ends before the next begins. The hit rate is hit blocks over all blocks. Both
ways count alike. The core computes at least one token of a request that is cached whole, so its pool has one block more.
No part of the service: `kvkeeper bench`, benchmarks and tests are built of it.
"""

import heapq
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .core.manager import PoolManager
from .core.values.pool_config import PoolConfig
from .core.values.sequence_args import SequenceArgs
from .core.values.step_columns import StepBatch
from .core.values.types import Executor, ReuseHint, SequenceId, SessionId

Requests = list[list[int]]

_SESSION = SessionId("replay")
_COMPUTED_TOKEN = 2**31 - 1  # ends each prompt, so that all of the request before it can hit


@dataclass(frozen=True, slots=True)
class Replayed:
    """Sums of one replay, and the seconds of each step of the core."""

    num_requests: int
    num_blocks: int
    num_hits: int
    num_evicted: int
    step_seconds: npt.NDArray[np.float64]

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(self.num_blocks, 1)


def replay_core(
    requests: Iterable[list[int]],
    num_blocks: int,
    policy: str,
    *,
    block_size: int = 1,
    hints: Iterable[ReuseHint] = itertools.repeat(ReuseHint.UNSPECIFIED),
) -> Replayed:
    """Against a PoolManager; a token is the number of its block. num_blocks has to hold the longest request.

    hints: one for each request.
    """
    replay = CoreReplay(num_blocks, policy, block_size)
    for request, hint in zip(requests, hints, strict=False):
        replay.run(request, hint)
    return replay.sums()


class CoreReplay:
    """One pool, one session, one sequence at a time, in three steps each: start, commit, release.

    The executor is the cache, so each step is complete at once.
    """

    def __init__(self, num_blocks: int, policy: str, block_size: int = 1) -> None:
        most_tokens = (num_blocks + 1) * block_size
        self.manager = PoolManager(PoolConfig(num_blocks + 2, block_size, 1, most_tokens, watermark=0, eviction_policy=policy))
        self.manager.sessions.open(_SESSION, Executor.CACHE)
        self._block_size = block_size
        self._num_requests = self._num_blocks = self._num_hits = 0
        self._step_seconds: list[float] = []

    def run(self, request: list[int], hint: ReuseHint = ReuseHint.UNSPECIFIED) -> int:
        """The number of hit blocks."""
        self._num_requests += 1
        self._num_blocks += len(request)
        ids = np.array([self._num_requests])
        tokens = np.array([*np.repeat(request, self._block_size), _COMPUTED_TOKEN], np.int32)
        self.manager.creation.create(_SESSION, SequenceArgs(SequenceId(self._num_requests), tokens, reuse_hint=hint))
        whole, none = np.array([len(tokens) - 1], np.int32), np.zeros(1, np.int32)
        hits = int(self._step(start_ids=ids, start_max_new=whole + 1, start_max_hit=whole).start_hits[0]) // self._block_size
        self._step(commit_ids=ids, commit_lens=whole, commit_num_new=none)
        self._step(release_ids=ids)
        self._num_hits += hits
        return hits

    def sums(self) -> Replayed:
        evicted = self.manager.queries.stats().num_evicted_blocks
        return Replayed(self._num_requests, self._num_blocks, self._num_hits, evicted, np.array(self._step_seconds))

    def _step(self, **columns: np.ndarray):  # type: ignore[no-untyped-def]
        step_id = len(self._step_seconds) + 1
        batch = StepBatch(step_id, step_id - 1, **columns)
        begin = time.perf_counter()
        reply = self.manager.steps.step(_SESSION, batch)
        self._step_seconds.append(time.perf_counter() - begin)
        self.manager.maintenance.publish_pending()
        return reply


def replay_optimum(requests: Requests, num_blocks: int) -> Replayed:
    """The offline optimum: the block whose next use is farthest goes first (Belady, IBM Systems Journal 1966).

    Among blocks that are used next by one request, or never, the deepest goes first: what is behind another is found no more.
    """
    never = len(requests)
    coming: dict[int, list[int]] = {}
    for at in range(len(requests) - 1, -1, -1):
        for content in requests[at]:
            coming.setdefault(content, []).append(at)
    next_use: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []  # next use and depth, both negative, and block
    num_asked = num_hits = num_evicted = 0
    for request in requests:
        hits = 0
        while hits < len(request) and request[hits] in next_use:
            hits += 1
        num_asked += len(request)
        num_hits += hits
        for content in request:
            coming[content].pop()
        held = set(request[:hits])
        for _ in range(len(next_use) + len(request) - hits - num_blocks):
            while True:
                at, _, content = heapq.heappop(farthest)
                if next_use.get(content) == -at and content not in held:
                    break
            del next_use[content]
            num_evicted += 1
        for depth, content in enumerate(request):
            next_use[content] = coming[content][-1] if coming[content] else never
            heapq.heappush(farthest, (-next_use[content], -depth, content))
    return Replayed(len(requests), num_asked, num_hits, num_evicted, np.zeros(0))
