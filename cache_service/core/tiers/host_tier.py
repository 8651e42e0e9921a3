"""The host tier: blocks in the host's memory that hold the content of device blocks, those that left and copies of others.

Owns the host blocks: which are free, which swapped sequences hold, which only the index names (in their own order of
eviction, least recently used first), which are ends of orders in flight, and which a dead session may still write. Rules: a
host block is read only after the order that fills it has completed, and it changes its tenant only by being filled anew,
which overwrites all of it; so it needs no clearing (R8), and no other way of writing one exists. A swapped sequence's blocks
are held until it runs again. Does not know tokens or the device.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..blocks.block_pool import BlockPool
from ..index.prefix_index import PrefixIndex
from ..values.pool_config import PoolConfig
from ..values.types import NO_INT32, Int32Array, MatchEnd, SessionId


class HostTier:
    """The blocks of one pool's host tier. Block ids are its own; 0 is its null block."""

    def __init__(self, config: PoolConfig, index: PrefixIndex, forget: Callable[[Int32Array, MatchEnd], None]) -> None:
        """forget(host blocks, why) reports to the index which copies are lost."""
        self._notify_index = forget
        self.num_blocks = config.num_host_blocks
        # Least recently used; of the limits only the time to live, which starts anew when a block is cached here.
        own = PoolConfig(config.num_host_blocks, config.block_size, prefix_ttl=config.prefix_ttl)
        self.pool = BlockPool(own, index, self._evicted)
        self.is_filling: npt.NDArray[np.bool_] = np.zeros(self.num_blocks, np.bool_)  # its content is still on the way
        self.tables: dict[int, Int32Array] = {}  # slot of a swapped sequence: its tables' host blocks, 0 for a hole
        self._quarantines: dict[SessionId, Int32Array] = {}

    @property
    def num_cached(self) -> int:
        return self.pool.num_evictable

    @property
    def num_held(self) -> int:
        return self.pool.num_referenced

    @property
    def num_busy(self) -> int:
        return self.num_blocks - 1 - len(self.pool.free) - self.num_cached - self.num_held

    def restore(self, cached: Int32Array, session: SessionId, withheld: Int32Array) -> None:
        """Restores an unused tier: cached [n] are indexed, leaves before parents; the session may still write withheld [m]."""
        self.pool.restore(cached, withheld)
        if len(withheld):
            self._quarantines[session] = withheld

    def take_blocks(self, count: int, *, held: bool) -> Int32Array:
        """[count] blocks to be filled by orders, each an end of one; with a reference each where a sequence is to hold them."""
        blocks = self.pool.allocate(count)
        self.pool.begin_transfers(blocks)
        self.is_filling[blocks] = True
        if not held:
            self.pool.drop_references(blocks, fenced=False)
        return blocks

    def return_blocks(self, blocks: Int32Array) -> None:
        """Undoes take_blocks: no order will fill these."""
        self.is_filling[blocks] = False
        self.pool.end_transfers(blocks)

    def drop_table(self, slot: int) -> None:
        """The sequence is on the device again, or released: its host blocks are given up."""
        table = self.tables.pop(slot)[::-1]
        self.pool.drop_references(table[table > 0], fenced=False)

    def count_blocks(self, slot: int) -> int:
        return int(np.count_nonzero(self.tables[slot])) if slot in self.tables else 0

    def quarantine(self, session: SessionId, blocks: Int32Array) -> None:
        """The session has ended, and may still write these."""
        if len(blocks):
            self.pool.quarantine(blocks, fences=NO_INT32)
            self._quarantines[session] = blocks

    def end_quarantine(self, session: SessionId) -> None:
        blocks = self._quarantines.pop(session, None)
        if blocks is not None:
            self.pool.end_quarantine(blocks)

    def _evicted(self, hosts: Int32Array, why: MatchEnd) -> Int32Array:
        self._notify_index(hosts, why)
        return NO_INT32

    def quarantined_blocks(self) -> list[Int32Array]:
        """For audits."""
        return list(self._quarantines.values())
