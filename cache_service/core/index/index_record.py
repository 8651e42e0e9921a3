"""What of a prefix index a kept index still lacks, and what it must not say any more.

Owns the names of nodes, which grow and are never used twice, and the blocks of each tier that gained a node since the last
write. Rules: a block that loses its node is forgotten at once, before any call can grant it; a block that gains one is written
later, in one go with others, because a row that is missing only costs a hit. So a row never names a block that a session may
write. What is written is read from the index at that moment, so what happened in between needs no order; a digest that is made
in the meantime counts only where the block has not lost its node since. Every node's row names its parent, not the parent's
block, so a parent that moves leaves its children's rows as they are.

SlotTable has the rows of one tier: one per block, each with a check over all that it says. A row is stored before its check,
so a row that was being stored when its process was killed has none; a block's row is forgotten by one store, of 0 into its
check; a row whose check does not fit says nothing. The check covers the block's number and the memory's key, so a row in
another place, or of other memory, says nothing either. Beside it a row has the number of the block's group of layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..values.kept_index import Digest, KeptIndex, KeptTable, UInt64Array, row_words
from ..values.types import NO_INT32, Int32Array, Int64Array, Tier
from .node_blocks import GroupArray, NodeBlocks

_GROUP_BITS = 56  # of a name; above them stands the number of the group of layers
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Slots:
    """What rows say of n blocks of one tier: names [n] and parents [n] of nodes, tokens [n, block_size].

    A negative parent is a root. digests [n]: of what the blocks hold; 0 where none was made. groups [n]: of layers; None: all
    are of the first.
    """

    blocks: Int32Array
    names: Int64Array
    parents: Int64Array
    tokens: Int32Array
    digests: UInt64Array
    groups: npt.NDArray[np.int8] | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def at(self, places: Int64Array) -> "Slots":
        """Those at these places, in their order."""
        blocks, names, parents = self.blocks[places], self.names[places], self.parents[places]
        groups = self.groups[places] if self.groups is not None else None
        return Slots(blocks, names, parents, self.tokens[places], self.digests[places], groups)

    def of_group(self, group: int) -> "Slots":
        """Those of one group of layers."""
        is_of_first = group == 0 and self.groups is None
        return self if is_of_first else self.at(np.flatnonzero(self._group_numbers == group))

    @property
    def num_groups(self) -> int:
        """Groups up to the last one that a row names."""
        return int(self._group_numbers.max(initial=0)) + 1

    @property
    def _group_numbers(self) -> npt.NDArray[np.int8]:
        return np.zeros(len(self), np.int8) if self.groups is None else self.groups

    def of_blocks(self, blocks: Int32Array) -> "Slots":
        """Those of these blocks."""
        return self.at(np.flatnonzero(np.isin(self.blocks, blocks)))

    def without_blocks(self, blocks: Int32Array) -> "Slots":
        return self.at(np.flatnonzero(~np.isin(self.blocks, blocks)))


class SlotTable:
    """The rows of one tier of a pool, in memory that outlives this process."""

    def __init__(self, kept: KeptTable, *, has_groups: bool = False) -> None:
        """has_groups: rows are of several groups of layers."""
        self._has_groups = has_groups
        self._checks, self._rows = kept.checks, kept.rows
        num_words = self._rows.shape[1]
        self._block_size = num_words - row_words(0)
        # Odd factors, so that a change of one word always changes the sum.
        drawn = _mixed(np.uint64(kept.key) + np.arange(num_words + 2, dtype=np.uint64) * _STEP)
        self._factors, self._of_block, self._start = drawn[:-2] | np.uint64(1), drawn[-2] | np.uint64(1), drawn[-1]

    def num_written(self, first: int = 0, end: int | None = None) -> int:
        """Rows of blocks [first, end) that claim to say something."""
        return int(np.count_nonzero(self._checks[first:end]))

    def has_rows(self) -> npt.NDArray[np.bool_]:
        """[num_blocks] whether the block's row claims to say something."""
        return np.asarray(self._checks != 0)

    def write(self, slots: Slots) -> None:
        """Stores these rows. A block that is named twice is said the same of."""
        rows = np.empty((len(slots), self._rows.shape[1]), np.int32)
        head = np.empty((len(slots), 3), np.int64)
        head[:, 0], head[:, 1], head[:, 2] = slots.names, slots.parents, slots.digests.view(np.int64)
        if slots.groups is not None:
            head[:, 0] |= slots.groups.astype(np.int64) << _GROUP_BITS
        rows[:, : row_words(0)] = head.view(np.int32)
        rows[:, row_words(0) :] = slots.tokens
        self._rows[slots.blocks] = rows
        self._checks[slots.blocks] = self._check(slots.blocks, rows)

    def forget(self, blocks: Int32Array) -> None:
        """The rows of these blocks say nothing from now on."""
        self._checks[blocks] = 0

    def forget_all_but(self, blocks: Int32Array) -> None:
        """All other rows say nothing from now on, torn and damaged ones among them."""
        stays = np.zeros(len(self._checks), np.bool_)
        stays[blocks] = True
        self._checks[~stays] = 0

    def read(self, first: int = 0, end: int | None = None) -> Slots:
        """All rows of blocks [first, end) whose check fits, by block. The null block has none."""
        blocks = np.flatnonzero(self._checks[first:end]).astype(np.int32) + np.int32(first)
        blocks = blocks[blocks > 0]
        rows = self._rows[blocks]
        fits = self._check(blocks, rows) == self._checks[blocks]
        blocks, rows = blocks[fits], rows[fits]
        head = np.ascontiguousarray(rows[:, : row_words(0)]).view(np.int64)
        names, tokens, digests = head[:, 0], rows[:, row_words(0) :], head[:, 2].copy().view(np.uint64)
        if not self._has_groups:
            return Slots(blocks, names, head[:, 1], tokens, digests)
        names, groups = names & ((1 << _GROUP_BITS) - 1), (names >> _GROUP_BITS).astype(np.int8)
        return Slots(blocks, names, head[:, 1], tokens, digests, groups)

    def _check(self, blocks: Int32Array, rows: Int32Array) -> UInt64Array:
        """[n] of rows [n, words]; never 0."""
        sums = rows.view(np.uint32).astype(np.uint64) @ self._factors
        return _mixed(sums + blocks.astype(np.uint64) * self._of_block + self._start) | np.uint64(1)


def _mixed(values: UInt64Array) -> UInt64Array:
    """Each bit of the result depends on each bit of the value (the finish of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return np.asarray(values ^ (values >> np.uint64(31)), np.uint64)


_SLICE_ROWS = 1024  # audited in less than a millisecond


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Blocks [n] of one tier that are about to be written."""

    tier: Tier
    blocks: Int32Array

    def __len__(self) -> int:
        return len(self.blocks)


class TierRecord:
    """One tier's part: its rows, and the blocks that still lack theirs. Noting is in the path of a step."""

    def __init__(self, kept: KeptTable, *, fills_late: bool, has_groups: bool) -> None:
        """fills_late: a block of this tier has a node before it holds what the node stands for, and is noted then."""
        self.table = SlotTable(kept, has_groups=has_groups)
        self._is_filled = np.zeros(len(kept.checks), np.bool_) if fills_late else None
        self.noted: list[Int32Array] = []  # blocks that have gained a node; some may have lost it since
        self._is_taken = np.zeros(len(kept.checks), np.bool_)  # taken to be written, and with their node since then
        self._num_taken = 0

    def note(self, blocks: Int32Array) -> None:
        """These blocks have a node now, and hold its content."""
        if self._is_filled is not None:
            self._is_filled[blocks] = True
        self.noted.append(blocks.copy())  # it may be a view of a table

    def forget(self, blocks: Int32Array) -> None:
        """These blocks have lost their nodes."""
        self.table.forget(blocks)
        if self._is_filled is not None:
            self._is_filled[blocks] = False
        if self._num_taken:
            self._is_taken[blocks] = False

    def take(self, max_blocks: int, nodes: Int32Array) -> Int32Array:
        """At most so many of the noted blocks, those noted first, which still have their node. nodes [num_blocks] of blocks."""
        taken: list[Int32Array] = [NO_INT32]
        while self.noted and max_blocks > 0:
            blocks = self.noted[0]
            taken.append(blocks[:max_blocks])
            if len(blocks) > max_blocks:
                self.noted[0] = blocks[max_blocks:]
            else:
                del self.noted[0]
            max_blocks -= len(blocks)
        blocks = np.concatenate(taken)
        blocks = blocks[nodes[blocks] > 0 if self._is_filled is None else self._is_filled[blocks]]
        self._is_taken[blocks] = True
        self._num_taken += len(blocks)
        return blocks

    def end_taking(self, blocks: Int32Array) -> npt.NDArray[np.bool_]:
        """These were taken and are now to be written. Returns [n] whether each has kept its node since."""
        stays = self._is_taken[blocks]
        self._is_taken[blocks] = False
        self._num_taken -= len(blocks)
        return np.asarray(stays)


class IndexRecord:
    """The record of one index in memory that outlives this process."""

    def __init__(
        self,
        kept: KeptIndex,
        held: NodeBlocks,
        key: Callable[[int], bytes | None],
        on_behind: Callable[[], None] = lambda: None,
    ) -> None:
        """held: what the index's nodes have. key(node): its parent and tokens, as LE32; None for a number not in use.

        on_behind() is called when there is something to write, once until all of it is written.
        """
        self._held, self._key, self._on_behind = held, key, on_behind
        self.device = TierRecord(kept.device, fills_late=False, has_groups=held.has_groups)
        self.hosts = None if kept.hosts is None else TierRecord(kept.hosts, fills_late=True, has_groups=held.has_groups)
        self.note_root = kept.note_root
        self._names: Int64Array = np.zeros(len(held.block_of_node), np.int64)  # by node; 0 for one that was never written
        self._next_name = 1

    @property
    def is_behind(self) -> bool:
        return bool(self.device.noted or (self.hosts is not None and self.hosts.noted))

    def of(self, tier: Tier) -> TierRecord | None:
        return self.device if tier is Tier.DEVICE else self.hosts

    def note_restored(self, names: Int64Array) -> None:
        """The nodes 1 to n are those of the rows of these names [n]."""
        if len(names):
            self._names[1 : len(names) + 1] = names
            self._next_name = int(names.max()) + 1

    def note(self, tier: Tier, blocks: Int32Array) -> None:
        """These blocks of a tier have a node now, and hold its content."""
        record = self.of(tier)
        if record is not None and len(blocks):
            if not record.noted and not self.is_behind:
                self._on_behind()
            record.note(blocks)

    def forget(self, tier: Tier, blocks: Int32Array) -> None:
        """These blocks of a tier have lost their nodes."""
        record = self.of(tier)
        if record is not None:
            record.forget(blocks)

    def forget_nodes(self, nodes: Int32Array) -> None:
        """These nodes were removed; their numbers may be used again."""
        self._names[nodes] = 0

    def write(self, max_blocks: int, digest: Digest | None = None) -> bool:
        """Writes down up to so many of the blocks that lack it. Whether more are left."""
        taken = self.take(max_blocks)
        return self.write_taken(taken, digest(taken.tier, taken.blocks) if digest is not None else None)

    def take(self, max_blocks: int) -> Unwritten:
        """At most so many noted blocks of one tier, the device's first; for `write_taken`, perhaps after other calls."""
        if self.device.noted or self.hosts is None:
            return Unwritten(Tier.DEVICE, self.device.take(max_blocks, self._held.node_of_block))
        return Unwritten(Tier.HOST, self.hosts.take(max_blocks, self._held.node_of_host))

    def write_taken(self, taken: Unwritten, digests: UInt64Array | None) -> bool:
        """Writes these down, as far as they have not lost their nodes since. digests [n]. Whether more are left."""
        record, held = self.of(taken.tier), self._held
        assert record is not None, "blocks of a tier that is not kept"
        stays = record.end_taking(taken.blocks)
        blocks = taken.blocks[stays]
        if len(blocks):
            is_device = taken.tier is Tier.DEVICE
            nodes = (held.node_of_block if is_device else held.node_of_host)[blocks]
            groups = held.get_groups(blocks) if is_device else held.groups_of_hosts(blocks)
            keys = [key for node in nodes.tolist() if (key := self._key(node)) is not None]
            words = np.frombuffer(b"".join(keys), "<i4").reshape(len(nodes), -1)
            made = digests[stays] if digests is not None else np.zeros(len(blocks), np.uint64)
            parents, below = words[:, 0], words[:, 0] > 0
            self._name(np.concatenate([parents[below], nodes]))
            names = np.where(below, self._names[np.maximum(parents, 0)], parents)
            record.table.write(Slots(blocks, self._names[nodes], names, words[:, 1:], made, groups))
        return self.is_behind

    def check(self) -> Iterator[list[str]]:
        """The broken invariants, for audits, in slices: a row that says something names its block's node."""
        held = self._held
        sides = ((self.device, held.node_of_block, held.get_groups), (self.hosts, held.node_of_host, held.groups_of_hosts))
        for record, node_of, groups_of in sides:
            for first in range(0, len(node_of) if record is not None else 0, _SLICE_ROWS):
                assert record is not None
                yield self._check_rows(record.table, node_of, groups_of, first)

    def _check_rows(
        self, table: SlotTable, node_of: Int32Array, groups_of: Callable[[Int32Array], GroupArray | None], first: int
    ) -> list[str]:
        written = table.read(first, first + _SLICE_ROWS)
        wrong: list[str] = []
        if len(written) < table.num_written(first, first + _SLICE_ROWS):
            wrong.append("a row of the kept index has another check than it should")
        nodes, groups = node_of[written.blocks], groups_of(written.blocks)
        if ((nodes == 0) | (self._names[nodes] != written.names)).any():
            wrong.append("the kept index names a block that the index does not name, or under another node")
        named = written.groups if written.groups is not None else np.zeros(len(written), np.int8)
        if (named != (groups if groups is not None else 0)).any():
            wrong.append("the kept index names a block under another group of layers")
        return wrong

    def _name(self, nodes: Int32Array) -> None:
        new = nodes[self._names[nodes] == 0]
        self._names[new] = np.arange(self._next_name, self._next_name + len(new))
        self._next_name += len(new)
