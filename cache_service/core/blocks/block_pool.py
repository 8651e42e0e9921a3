"""The blocks of one pool: the holders of each, and which are available.

Owns reference counts (tables that name a block), fence counts (steps in flight that may touch it), transfer counts (orders
in flight with an end at it), quarantine counts (ended sessions that may still write it), the free list and the eviction
order. Rules: a block is in exactly one BlockState, derived from its counts (R1); a block reaches the free list or the
eviction order only when all its counts are 0. Does not know sequences, tokens or sessions; callers report which blocks are
indexed. The host tier keeps its blocks in a BlockPool too.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from ..eviction import EvictionPolicy, make_policy
from ..index.prefix_index import PrefixIndex
from ..values.distinct import distinct, has_repeats
from ..values.memory import written_zeros
from ..values.pool_config import PoolConfig
from ..values.types import NO_TENANT, BlockState, Int32Array, MatchEnd
from .cache_limits import CacheLimits
from .free_list import FreeList
from .reuse_order import ReuseOrder

_ONE = np.int32(1)  # of the counts' own type: ufunc.at then takes 3 ns an entry, with another type 40
_NONE: Int32Array = np.empty(0, np.int32)
_FEW = 64  # blocks that a set of Python's counts sooner than numpy


class BlockPool:
    """The blocks of a pool or of a host tier. Counts are arrays over block ids; block 0 is the null block and has none."""

    def __init__(self, config: PoolConfig, index: PrefixIndex, forget: Callable[[Int32Array, MatchEnd], Int32Array]) -> None:
        """forget(blocks, why) removes blocks from the index and returns the other blocks that lost their entry with them."""
        self.num_blocks = config.num_blocks
        self.ref_counts: Int32Array = written_zeros(config.num_blocks, np.int32)
        self.fence_counts: Int32Array = written_zeros(config.num_blocks, np.int32)
        self.quarantine_counts: Int32Array = written_zeros(config.num_blocks, np.int32)
        self.transfer_counts: Int32Array = written_zeros(config.num_blocks, np.int32)
        # Quarantines and transfers together, because the path of a step needs only their sum.
        self.busy_counts: Int32Array = written_zeros(config.num_blocks, np.int32)
        self.pin_counts: Int32Array = written_zeros(config.num_blocks, np.int32)  # the references that are pins
        self.indexed: npt.NDArray[np.bool_] = written_zeros(config.num_blocks, np.bool_)
        # Blocks that a copy in flight fills. Their content is not there yet, so they are neither shared nor read.
        self.is_filling: npt.NDArray[np.bool_] = written_zeros(config.num_blocks, np.bool_)
        self.free = FreeList(config.num_blocks)
        self.policy: EvictionPolicy = make_policy(config.eviction_policy, config.num_blocks)
        self._num_busy = 0  # the sum of busy_counts
        self.num_quarantined = 0  # blocks in no table that an ended session may still write to
        self.num_in_transfer = 0  # blocks in no table and not quarantined that are an end of a transfer order in flight
        self.num_evictable = 0
        self.num_referenced = 0
        self.num_indexed = 0
        self.num_shared = 0  # blocks in more than one table
        self.num_evicted = 0
        self.peak_used = 0
        self._forget = forget
        self.limits = CacheLimits(config, index)
        self.reuse: ReuseOrder | None = None  # from the first hint on it is the policy, around the one before
        self._index = index
        self._most_soon = int(config.soon_share * config.num_usable_blocks)
        self._watcher = self.limits if self.limits.wants_order else None

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can get now: free and evictable ones."""
        return len(self.free) + self.num_evictable

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_available

    @property
    def num_fenced(self) -> int:
        """Blocks in no table, neither quarantined nor in transfer, that wait for steps in flight."""
        return self.num_used - self.num_referenced - self.num_quarantined - self.num_in_transfer

    def heed_hints(self) -> None:
        """A client says what it knows of reuse: from now on this counts."""
        if self.reuse is None:
            num_evictable = partial(getattr, self, "num_evictable")
            self.reuse = ReuseOrder(self.policy, self._index, self.ref_counts, self._most_soon, num_evictable)
            self.policy = self.reuse

    def num_revived(self, blocks: Int32Array) -> int:
        """How many of these distinct blocks are evictable, so that a table with them leaves fewer available."""
        return int(np.count_nonzero(self._is_evictable(blocks)))

    def restore(self, cached: Int32Array, withheld: Int32Array) -> None:
        """Restores a pool without holders: cached [n] are indexed, leaves before parents; withheld [m] may still be written.

        The caller notes which sessions withhold them, and ends it with `end_quarantine`.
        """
        self.free.take_out(np.concatenate([cached, withheld]))
        self.mark_indexed(cached)
        self._settle(cached)
        self.quarantine(withheld, fences=_NONE)

    def allocate(self, count: int) -> Int32Array:
        """[count] blocks with one reference each; evicts where the free ones are too few. Needs count <= num_available."""
        victims = self._evict(count - len(self.free)) if count > len(self.free) else _NONE
        blocks = self.free.take_blocks(count - len(victims))
        if len(victims):  # granted at once: orders that move their contents away run before the new holder writes
            blocks = np.concatenate([victims[::-1], blocks])
            self._count_busy(victims, -1)
        self.ref_counts[blocks] = 1
        self.num_referenced += count
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def acquire(self, blocks: Int32Array, *, is_found: bool = True) -> None:
        """Adds a table's reference per entry to blocks that are referenced, cached or fenced. is_found: see EvictionPolicy."""
        if not len(blocks):  # most starts find nothing
            return
        in_tables = self._num_tables(blocks)
        self._acquire(blocks, is_found=is_found)
        self.num_shared += self._num_distinct_where(blocks, (in_tables < 2) & (self._num_tables(blocks) > 1))

    def pin(self, blocks: Int32Array) -> None:
        """Adds a pin's reference to each of these distinct cached or referenced blocks."""
        self._acquire(blocks)
        if self.reuse is not None:
            self.reuse.claim(blocks)
        self.pin_counts[blocks] += 1

    def unpin(self, blocks: Int32Array) -> None:
        """Takes a pin's references away, deepest first."""
        self.pin_counts[blocks] -= 1
        np.subtract.at(self.ref_counts, blocks, _ONE)
        self._let_go(blocks[self.ref_counts[blocks] == 0])

    def _acquire(self, blocks: Int32Array, *, is_found: bool = True) -> None:
        idle = distinct(blocks[self.ref_counts[blocks] == 0])
        revived = idle[self._is_evictable(idle)]
        if len(revived):
            self.policy.hit(revived, is_found=is_found)
            self._lose(revived)
        self.num_referenced += len(idle)
        self._count_busy(idle, -1)
        np.add.at(self.ref_counts, blocks, _ONE)
        self.peak_used = max(self.peak_used, self.num_used)

    def drop_references(self, blocks: Int32Array, *, fenced: bool) -> None:
        """Takes away a table's reference per entry; a block occurs once per table, deepest first within each table.

        A fenced drop also adds a step in flight per entry, which lift_fences takes away.
        """
        in_tables = self._num_tables(blocks) if self.num_shared else None
        np.subtract.at(self.ref_counts, blocks, _ONE)
        if in_tables is not None:
            self.num_shared -= self._num_distinct_where(blocks, (in_tables > 1) & (self._num_tables(blocks) < 2))
        if fenced:
            np.add.at(self.fence_counts, blocks, _ONE)
        self._let_go(self._last_occurrences(blocks[self.ref_counts[blocks] == 0]))

    def _let_go(self, unreferenced: Int32Array) -> None:
        """The last reference of each of these distinct blocks has gone."""
        self.num_referenced -= len(unreferenced)
        self._count_busy(unreferenced, 1)
        self._settle(unreferenced)

    def _num_tables(self, blocks: Int32Array) -> Int32Array:
        """[n] tables that name each of these blocks."""
        return self.ref_counts[blocks] - self.pin_counts[blocks]

    def _num_distinct_where(self, blocks: Int32Array, chosen: npt.NDArray[np.bool_]) -> int:
        return len(self._distinct(blocks[chosen])) if chosen.any() else 0

    def lift_fences(self, blocks: Int32Array) -> None:
        """Steps that might have touched these entries have completed."""
        np.subtract.at(self.fence_counts, blocks, _ONE)
        self._settle(self._last_occurrences(blocks))

    def quarantine(self, blocks: Int32Array, *, fences: Int32Array) -> None:
        """Counts an ended session on the blocks that it may still write, and turns its fences into quarantines."""
        entries = np.concatenate([blocks, fences])
        self._add_busy(self.quarantine_counts, entries, 1)
        np.subtract.at(self.fence_counts, fences, _ONE)

    def end_quarantine(self, blocks: Int32Array) -> int:
        """The ended session cannot write any more. Returns how many blocks became available."""
        before = self.num_available
        self._add_busy(self.quarantine_counts, blocks, -1)
        self._settle(self._last_occurrences(blocks))
        return self.num_available - before

    def begin_transfers(self, blocks: Int32Array) -> None:
        """Adds an order in flight per entry, with its source or destination at the block."""
        revived = distinct(blocks[self._is_evictable(blocks)])
        if len(revived):
            self.policy.hit(revived)
            self._lose(revived)
        self._add_busy(self.transfer_counts, blocks, 1)
        self.peak_used = max(self.peak_used, self.num_used)

    def end_transfers(self, blocks: Int32Array) -> None:
        """Orders with these ends were run, or will never be run."""
        self._add_busy(self.transfer_counts, blocks, -1)
        self._settle(self._last_occurrences(blocks))

    def evict(self, count: int, *, is_ahead: bool = False) -> None:
        """Evicts count blocks in eviction order, those of tenants above their quota first. Needs count <= num_evictable.

        is_ahead: for the next steps, of the tenants that got blocks last; else for no tenant.
        """
        log = self._index.eviction_log
        needed_by, log.needed_by = log.needed_by, log.needed_by if is_ahead else NO_TENANT
        victims = self._evict(count)
        log.needed_by = needed_by
        self.free.put_blocks(victims[self.transfer_counts[victims] == 0])

    def _evict(self, count: int) -> Int32Array:
        """[count] victims, in neither the index nor the free list; victims whose contents are moved away are in transfer."""
        if self.limits.has_quotas and self.limits.over:
            victims = self.limits.take_above_quota(count)
            self._lose(victims)
            self._unmark(victims)
            self.policy.forget_blocks(victims)
            others = self.policy.take_victims(count - len(victims))
            self._lose(others)
            victims = np.concatenate([victims, others])
        else:
            victims = self.policy.take_victims(count)
            self._lose(victims)
        self._unmark(victims)
        self.num_evicted += len(victims) + self.unindex(self._forget(victims, MatchEnd.EVICTED))
        return victims

    def expire(self, blocks: Int32Array) -> int:
        """Frees evictable blocks that outlived their time, and the cached blocks below them. Returns how many came free."""
        return self.unindex(np.concatenate([blocks, self._forget(blocks, MatchEnd.EXPIRED)]))

    def unindex(self, blocks: Int32Array) -> int:
        """Distinct blocks lost their index entry: the cached ones become free. Returns how many became free."""
        cached = blocks[self._is_evictable(blocks)]
        self._unmark(blocks)
        self.policy.forget_blocks(blocks)
        self._lose(cached)
        self.free.put_blocks(cached)
        return len(cached)

    def state(self, block: int) -> BlockState:
        if block == 0:
            return BlockState.NULL
        if self.ref_counts[block]:
            return BlockState.REFERENCED
        if self.quarantine_counts[block]:
            return BlockState.QUARANTINED
        if self.transfer_counts[block]:
            return BlockState.IN_TRANSFER
        if self.fence_counts[block]:
            return BlockState.FENCED
        return BlockState.CACHED if self.indexed[block] else BlockState.FREE

    def mark_indexed(self, blocks: Int32Array) -> int:
        """The index names these blocks from now on; it may have named some before. Returns how many are new."""
        new = blocks[~self.indexed[blocks]]
        self.indexed[new] = True
        num_new = self.num_distinct(new)
        self.num_indexed += num_new
        return num_new

    def _unmark(self, blocks: Int32Array) -> None:
        """The index names these distinct blocks no more; some may have been unmarked already."""
        self.num_indexed -= int(np.count_nonzero(self.indexed[blocks]))
        self.indexed[blocks] = False

    def _add_busy(self, counts: Int32Array, blocks: Int32Array, change: int) -> None:
        """Adds a quarantine or an end of an order in flight per entry, or takes it away."""
        affected = self._distinct(blocks)
        self._count_busy(affected, -1)
        for each in (counts, self.busy_counts):
            np.add.at(each, blocks, np.int32(change))
        self._num_busy += change * len(blocks)
        self._count_busy(affected, 1)

    def _count_busy(self, blocks: Int32Array, change: int) -> None:
        """Counts those of these distinct blocks that are in no table, and quarantined or in transfer."""
        if self._num_busy:
            busy = blocks[(self.ref_counts[blocks] == 0) & (self.busy_counts[blocks] > 0)]
            num_quarantined = int(np.count_nonzero(self.quarantine_counts[busy]))
            self.num_quarantined += change * num_quarantined
            self.num_in_transfer += change * (len(busy) - num_quarantined)

    def num_distinct(self, blocks: Int32Array) -> int:
        return len(set(blocks.tolist())) if len(blocks) <= _FEW else len(self._distinct(blocks))

    def _distinct(self, blocks: Int32Array) -> Int32Array:
        """Each block once, in order."""
        if len(blocks) < self.num_blocks // 64:
            return distinct(blocks)
        there = np.zeros(self.num_blocks, np.bool_)  # a look at every block costs less than sorting so many
        there[blocks] = True
        return there.nonzero()[0].astype(np.int32)

    def _last_occurrences(self, blocks: Int32Array) -> Int32Array:
        """Each block once, at its last place, so that a parent in several tables comes after the leaves of all of them."""
        if len(set(blocks.tolist())) == len(blocks) if len(blocks) <= _FEW else not has_repeats(blocks):
            return blocks
        _, first_from_end = np.unique(blocks[::-1], return_index=True)
        return blocks[np.sort(len(blocks) - 1 - first_from_end)]

    def _settle(self, blocks: Int32Array) -> None:
        """Sends those of the distinct blocks whose counts are all 0 to the free list or to the eviction order."""
        idle = blocks[(self.ref_counts[blocks] | self.fence_counts[blocks] | self.busy_counts[blocks]) == 0]
        cached = self.indexed[idle]
        self.free.put_blocks(idle[~cached])
        kept = idle[cached]
        self.num_evictable += len(kept)
        self.policy.add(kept)
        if self._watcher is not None:
            self._watcher.add_evictable(kept)

    def _lose(self, blocks: Int32Array) -> None:
        """Takes these blocks out of the count of evictable ones."""
        self.num_evictable -= len(blocks)
        if self._watcher is not None:
            self._watcher.drop_evictable(blocks)

    def _is_evictable(self, blocks: Int32Array) -> npt.NDArray[np.bool_]:
        held = self.ref_counts[blocks] | self.fence_counts[blocks] | self.busy_counts[blocks]
        return self.indexed[blocks] & (held == 0)
