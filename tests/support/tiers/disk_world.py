"""A tiny pool with host tier and disk tier, and a slab that fails, tears, lies, hangs and outlives the pool.

Owns what each slot holds, and the orders of the disk in flight. Rules: an order moves its content when it is run, which is any
time after it was made, and is reported any time after that; a slot that was torn or flipped does not have its digest, as the
real slab would find; a kill loses what was not run, and tears what was being written.
"""

from dataclasses import dataclass, field

import numpy as np

from kvkeeper.cache_service.core.tiers.orders import Load, Store, TierRules
from kvkeeper.cache_service.core.values.copies import StoredBlock, TierOrder, TierResult
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.step_columns import StepBatch
from kvkeeper.cache_service.core.values.types import Int64Array
from tests.support.reference.shadow_memory import Contents
from tests.support.reference.tier_memory import GARBAGE
from tests.support.tiers.tier_engine import TierEngine, TierItems
from tests.support.tiers.tier_world import TierWorld
from tests.support.worlds.engine_model import Choose

KEY = b"of a test"


@dataclass(slots=True)
class Slot:
    """What a slot of the slab holds."""

    order: TierOrder  # that stored it
    content: list[int]
    is_intact: bool = True

    @property
    def stored_block(self) -> StoredBlock:
        """As a scan of the slab would find it."""
        order = self.order
        seen = (order.block_name, order.parent_block_name, order.tokens) if order.block_name else ()
        return StoredBlock(order.slot, order.name, order.number, *seen)


@dataclass(slots=True)
class DiskCounts:
    """What a run has seen; each proves that a fault fired or a path was on."""

    stored: int = 0
    loaded: int = 0
    waits: int = 0
    late: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    flipped: int = 0
    damaged: int = 0
    evicted: int = 0
    rests: int = 0
    cancelled: int = 0
    cleared: int = 0
    restarts: int = 0
    restored: int = 0
    dropped: int = 0  # loads that found no parent any more, or no need
    orders: int = 0
    grouped: int = 0  # blocks that were loaded in a pool of several groups of layers

    def add(self, other: "DiskCounts") -> None:
        for name in DiskCounts.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True, eq=False)
class _Job:
    """A load or a store in flight; results of the orders that were run."""

    what: Load | Store
    results: list[TierResult] = field(default_factory=list)

    @property
    def next_order(self) -> TierOrder | None:
        orders = self.what.orders
        return orders[len(self.results)] if len(self.results) < len(orders) else None


class DiskWorld(TierWorld):
    """A TierWorld with a disk tier. slab and contents: of a world that was killed."""

    def __init__(
        self,
        config: PoolConfig,
        num_slots: int,
        rules: TierRules,
        *,
        slab: dict[int, Slot] | None = None,
        contents: Contents | None = None,
        written: dict[str, set[int]] | None = None,
        era: int = 0,
        **sizes: int,
    ) -> None:
        super().__init__(config, **sizes)
        self.slab: dict[int, Slot] = slab if slab is not None else {}
        self.contents = contents or self.contents
        self.written = written or self.written
        self.disk_counts = DiskCounts()
        self.now = 0.0
        self._jobs: list[_Job] = []
        stored = [slot.stored_block for slot in self.slab.values() if slot.order.era == era]
        self.disk_counts.restored += len(stored)
        self.disk = self.manager.add_disk(KEY, num_slots, era, stored, rules)

    # Events

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.manager.state.tick(self.now)
        self.disk.flight.tend()

    def store_some(self, max_blocks: int) -> None:
        store = self.disk.stores.prepare(max_blocks)
        if store is not None:
            self._jobs.append(_Job(store))

    def work(self, choose: Choose, faults: int) -> None:
        """One order of any job is run, or all that were run of one are reported."""
        self._take_loads()
        if not self._jobs:
            return
        job = self._jobs[choose(len(self._jobs))]
        order = job.next_order
        if order is None:
            self._report(job)
        elif choose(4 * faults) == 1:
            job.results += [TierResult.CANCELLED] * (len(job.what.orders) - len(job.results))
            self.disk_counts.cancelled += 1
        else:
            job.results.append(self._run(job.what, order, fails=choose(faults) == 1))

    def flip(self, choose: Choose) -> None:
        """A stored block is not any more what was stored."""
        if self.slab:
            slot = self.slab[list(self.slab)[choose(len(self.slab))]]
            self.disk_counts.flipped += slot.is_intact
            slot.content, slot.is_intact = [GARBAGE] * self.config.block_size, False

    def clear(self) -> None:
        super().clear()
        self.disk_counts.cleared += 1

    def finish_disk(self) -> None:
        """Everything in flight is run and reported."""
        self._take_loads()
        for job in list(self._jobs):
            while (order := job.next_order) is not None:
                job.results.append(self._run(job.what, order, fails=False))
            self._report(job)

    def drain(self) -> None:
        self.finish_disk()
        for engine in list(self.engines):
            self.close(engine, may_still_write=False)
        while self.disk.stats()["num_queued_disk_blocks"]:  # what the last sequences left is stored as well
            self.store_some(4)
            if not self._jobs:
                break
            self.finish_disk()
            self.audit()
        stats = self.manager.queries.stats()
        counts = self.disk_counts
        counts.late, counts.evicted = stats.num_late_disk_loads, stats.num_evicted_disk_blocks
        counts.rests, counts.damaged = stats.num_disk_rests, stats.num_damaged_disk_blocks
        counts.waits = stats.num_computing_answers
        super().drain()

    def kill(self, choose: Choose) -> None:
        """The service is gone, and with it all but the slab."""
        self.manager.queries.check_invariants()
        for job in self._jobs:
            order = job.next_order
            if isinstance(job.what, Store) and order is not None and choose(2):
                self.slab[order.slot] = Slot(order, [GARBAGE] * self.config.block_size, False)
        self.disk_counts.restarts += 1

    # Parts

    def _batch(self, engine: TierEngine, items: TierItems, done: Int64Array, failed: Int64Array) -> StepBatch:
        batch = super()._batch(engine, items, done, failed)
        return batch._replace(start_may_wait=np.ones(len(batch.start_ids), np.int32))

    def _take_loads(self) -> None:
        self._jobs += [_Job(load) for load in self.disk.loads.take()]

    def _run(self, what: Load | Store, order: TierOrder, *, fails: bool) -> TierResult:
        counts, host = self.disk_counts, self.memory.host
        counts.orders += 1
        if isinstance(what, Store):
            content = list(host[order.host])
            if fails:
                self.slab[order.slot] = Slot(order, [GARBAGE] * len(content), False)
                counts.failed_stores += 1
                return TierResult.FAILED
            self.slab[order.slot] = Slot(order, content)
            counts.stored += 1
            return TierResult.DONE
        host[order.host] = [GARBAGE] * self.config.block_size
        if fails:
            counts.failed_loads += 1
            return TierResult.FAILED
        slot = self.slab[order.slot]
        if not slot.is_intact or slot.order.name != order.name:
            return TierResult.DAMAGED
        host[order.host] = list(slot.content)
        return TierResult.DONE

    def _report(self, job: _Job) -> None:
        self._jobs.remove(job)
        if isinstance(job.what, Store):
            self.disk.stores.complete(job.what, job.results)
            return
        num_loaded = self.disk.loads.complete(job.what, job.results)
        self.disk_counts.loaded += num_loaded
        self.disk_counts.grouped += num_loaded if len(self.spans) > 1 else 0
        self.disk_counts.dropped += num_loaded < job.results.count(TierResult.DONE)
