"""Replays requests in order against a pool with tiers below the device, what each tier hits, and what is moved.

As in `kvkeeper.cache_service.replay`, a request is the list of its blocks, and ends before the next begins. Here the executor
runs all copies of a step before the next one, and the disk has done what it was asked before it is asked again: hits are those
of tiers that are fast enough, and exact. A hit counts for the tier that the block lay in when the request came.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.tiers.orders import TierRules
from kvkeeper.cache_service.core.values.copies import TierResult
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import NO_INT64, Executor, SequenceId, SessionId, StartResult, TransferKind

_SESSION = SessionId("replay")
_COMPUTED_TOKEN = 2**31 - 1  # ends each prompt, so that all of the request before it can hit
_STORED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Blocks of each tier; 0 is a tier that there is not. A disk needs a host tier."""

    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class TierSums:
    """Sums of one replay, in blocks. The hits are by the tier that a block lay in."""

    num_blocks: int
    num_device_hits: int
    num_host_hits: int
    num_disk_hits: int
    num_to_host: int
    num_from_host: int
    num_to_disk: int

    @property
    def num_hits(self) -> int:
        return self.num_device_hits + self.num_host_hits + self.num_disk_hits

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(self.num_blocks, 1)


def replay_tiers(requests: Iterable[list[int]], sizes: TierSizes, policy: str, *, on_second_use: bool = False) -> TierSums:
    """The device has to hold the longest request, and one block more. on_second_use: what the disk admits, see TierRules."""
    replay = _TierReplay(sizes, policy, on_second_use=on_second_use)
    for request in requests:
        replay.run(request)
    return replay.sums()


class _TierReplay:
    """One pool, one session, one sequence at a time: start, the loads of its hits, commit, release."""

    def __init__(self, sizes: TierSizes, policy: str, *, on_second_use: bool) -> None:
        num_hosts = sizes.host + 1 if sizes.host else 0
        config = PoolConfig(
            sizes.device + 1, 1, 1, sizes.device, watermark=0, eviction_policy=policy, num_host_blocks=num_hosts
        )
        self._manager = PoolManager(config)
        if sizes.disk:
            self._manager.add_disk(b"replay", sizes.disk, 0, (), TierRules(on_second_use=on_second_use))
        self._manager.sessions.open(_SESSION, Executor.ENGINE)
        self._num_requests = self._num_steps = self._num_blocks = self._num_hits = 0
        self._num_to_host = self._num_from_host = 0
        self._done = NO_INT64  # orders that have been run since the last step

    def run(self, request: list[int]) -> None:
        self._num_requests += 1
        self._num_blocks += len(request)
        ids = np.array([self._num_requests])
        tokens = np.array([*request, _COMPUTED_TOKEN], np.int32)
        self._manager.creation.create(_SESSION, SequenceArgs(SequenceId(self._num_requests), tokens))
        self._load()
        whole, none = np.array([len(request)], np.int32), np.zeros(1, np.int32)
        reply = self._step(start_ids=ids, start_max_new=whole + 1, start_max_hit=whole)
        hits = reply.start_hits
        if reply.start_results[0] == StartResult.LOADING:
            hits = self._step().ready_hits
        self._num_hits += int(hits[0])
        self._step(commit_ids=ids, commit_lens=whole, commit_num_new=none)
        self._step(release_ids=ids)
        self._step()  # reports what the release moved
        self._store()

    def sums(self) -> TierSums:
        disk = self._manager.disk.flight.counts if self._manager.disk is not None else None
        from_disk, to_disk = (disk.num_hit_blocks, disk.num_stored_blocks) if disk is not None else (0, 0)
        return TierSums(
            self._num_blocks,
            self._num_hits - self._num_from_host,
            self._num_from_host - from_disk,
            from_disk,
            self._num_to_host,
            self._num_from_host,
            to_disk,
        )

    def _load(self) -> None:
        """What the disk has of the sequence that was created is in the host tier."""
        if (disk := self._manager.disk) is not None:
            for load in disk.loads.take():
                disk.loads.complete(load, [TierResult.DONE] * len(load.orders))

    def _store(self) -> None:
        disk = self._manager.disk
        while disk is not None and (store := disk.stores.prepare(_STORED_AT_ONCE)) is not None:
            disk.stores.complete(store, [TierResult.DONE] * len(store.orders))

    def _step(self, **columns: np.ndarray) -> StepReply:
        self._num_steps += 1
        batch = StepBatch(self._num_steps, self._num_steps - 1, completed_transfers=self._done, **columns)
        reply = self._manager.steps.step(_SESSION, batch)
        self._manager.maintenance.publish_pending()
        self._done = reply.transfer_ids
        num_loads = int(np.count_nonzero(reply.transfer_kinds == TransferKind.SWAP_IN))
        self._num_from_host += num_loads
        self._num_to_host += len(reply.transfer_ids) - num_loads
        return reply
