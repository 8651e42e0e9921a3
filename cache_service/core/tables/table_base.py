"""What every operation on block tables stands on: the parts of a pool, and blocks for whoever needs them.

Owns how the parts are put together, the clearing of a block that changes tenant (R8), and what happens to tables when the index
forgets. Does not know which operation asks.
"""

from dataclasses import dataclass, field

import numpy as np

from ..blocks.block_pool import BlockPool
from ..blocks.pins import Pins
from ..eviction import Use
from ..index.prefix_index import PrefixIndex
from ..sequences.claims import Claims
from ..sequences.publisher import Publisher
from ..sequences.sequence_table import SequenceTable
from ..sequences.session_state import SessionState
from ..tiers.sequence_swap import SequenceSwapper
from ..tiers.transfers import TransferOrder
from ..values.counters import Counters
from ..values.pool_config import PoolConfig
from ..values.types import NULL_BLOCK, UNKNOWN_ROOT, Int32Array, MatchEnd, SequenceState


@dataclass(slots=True)
class StepLog:
    """What a step tells its engine, as lists, because they are short: orders and copies to run, replaced table entries, and
    slots of sequences that run now without having been started."""

    copy_sources: list[int] = field(default_factory=list)
    copy_destinations: list[int] = field(default_factory=list)
    update_ids: list[int] = field(default_factory=list)
    update_table_idx: list[int] = field(default_factory=list)
    update_blocks: list[int] = field(default_factory=list)
    orders: list[TransferOrder] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    computing_lens: dict[int, int] = field(default_factory=dict)  # slots told COMPUTING, and the lengths to come

    def update(self, sequence_id: int, table_idx: int, block: int) -> None:
        self.update_ids.append(sequence_id)
        self.update_table_idx.append(table_idx)
        self.update_blocks.append(block)


@dataclass(slots=True)
class Grants:
    """Answer to reservations: slots granted [n]; new blocks [m] and the index of the item each belongs to [m]."""

    reserved: Int32Array
    item_idx: Int32Array
    blocks: Int32Array


class TableBase:
    """See the module."""

    def __init__(self, config: PoolConfig) -> None:
        self._block_size = config.block_size
        self._divisor, self._round_up = np.int32(config.block_size), np.int32(config.block_size - 1)
        self.prefix_caching = config.prefix_caching
        self.min_prefix_tokens = config.min_prefix_tokens
        self.sequences = SequenceTable(config)
        self.swapper: SequenceSwapper | None = None  # where there is a host tier
        self.index = PrefixIndex(
            config.num_blocks, config.block_size, config.logits_memory, config.num_host_blocks, self._lose_hosts
        )
        self.pool = BlockPool(config, self.index, self._forget)
        self.pins = Pins(self.pool)
        self.claims = Claims(self.sequences, self.pool)
        self.counters = Counters()
        self.publisher = Publisher(config, self.sequences, self.index, self.pool, self.counters)
        self.last_roots: Int32Array = np.zeros(config.num_blocks, np.int32)  # whose tokens each block held last

    def distrust(self, blocks: Int32Array) -> None:
        """What was ordered for these blocks may never have run: whoever gets one next, it is cleared first (R8)."""
        self.last_roots[blocks] = UNKNOWN_ROOT

    def _allocate(self, log: StepLog, count: int, roots: Int32Array) -> Int32Array:
        """[count] blocks for sequences under these roots ([count] or a scalar); another tenant's are cleared first (R8)."""
        blocks = self.pool.allocate(count)
        if self.index.num_roots > 1:
            before = self.last_roots[blocks]
            foreign = blocks[(before != 0) & (before != roots)].tolist()
            log.copy_sources.extend([NULL_BLOCK] * len(foreign))
            log.copy_destinations.extend(foreign)
            self.counters.num_cleared_blocks += len(foreign)
        self.last_roots[blocks] = roots
        return blocks

    def _use(self, slot: int) -> Use:
        seqs = self.sequences
        num_published = int(seqs.num_published[slot])
        return Use(
            blocks=seqs.tables[slot, :num_published],
            tokens=seqs.tokens[slot, : num_published * self._block_size],
            root=int(seqs.roots[slot]),
            priority=int(seqs.priorities[slot]),
            num_blocks=len(seqs.table(slot)),
        )

    def shown_table(self, slot: int) -> Int32Array:
        """The table as its owner sees it: a swapped sequence has none."""
        table = self.sequences.table(slot)
        return table[:0] if self.sequences.states[slot] == SequenceState.SWAPPED else table

    def unpublish(self, slot: int) -> None:
        """The index knows nothing of this table for now."""
        self.sequences.num_published[slot] = 0
        self.sequences.last_nodes[slot] = self.sequences.roots[slot]

    def publish_again(self, owner: SessionState, slot: int) -> None:
        """The table is published from its first block."""
        self.unpublish(slot)
        if self.prefix_caching:
            self.publisher.note(owner, np.array([slot]))

    def _forget(self, blocks: Int32Array, why: MatchEnd) -> Int32Array:
        """These leave the device: for the host tier, or for good with what is below. Answers others that lost their entry."""
        if self.swapper is not None and why is MatchEnd.EVICTED:
            blocks = self.swapper.offloader.demote(blocks)
        return self.publisher.forget(blocks, why)

    def _lose_hosts(self, hosts: Int32Array) -> None:
        """Their nodes were forgotten."""
        assert self.swapper is not None, "host copies without a host tier"
        self.swapper.host.pool.unindex(hosts)
