"""What of a prefix index a kept index still lacks, and what it must not say any more.

Owns the names of nodes, which grow and are never used twice, and the nodes that were added since the last write. Rules: a block
that loses its node is forgotten at once, before any call can grant it; a block that gains one is written later, in one go with
others, because a row that is missing only costs a hit. So a row never names a block that a session may write. What is written
is read from the index at that moment, so what happened in between needs no order. Every node's row names its parent, not the
parent's block, so a parent that moves leaves its children's rows as they are.
"""

from collections.abc import Callable, Iterator

import numpy as np

from ..values.kept_index import KeptIndex
from ..values.types import Int32Array, Int64Array
from .slot_table import Slots, SlotTable

_SLICE_ROWS = 1024  # audited in less than a millisecond


class IndexRecord:
    """The record of one index in memory that outlives this process."""

    def __init__(self, kept: KeptIndex, num_nodes: int, on_behind: Callable[[], None] = lambda: None) -> None:
        """on_behind() is called when there is something to write, once until all of it is written."""
        self.table = SlotTable(kept)
        self.note_tenant = kept.add_tenant
        self._on_behind = on_behind
        self._names: Int64Array = np.zeros(num_nodes, np.int64)  # by node; 0 for a node that was never written
        self._next_name = 1
        self._unwritten: list[Int32Array] = []

    @property
    def is_behind(self) -> bool:
        return bool(self._unwritten)

    def note_restored(self, names: Int64Array) -> None:
        """The nodes 1 to n are those of the rows of these names [n]."""
        if len(names):
            self._names[1 : len(names) + 1] = names
            self._next_name = int(names.max()) + 1

    def note_added(self, nodes: Int32Array) -> None:
        """These nodes have a block on the device now."""
        if not self._unwritten:
            self._on_behind()
        self._unwritten.append(nodes)

    def forget_blocks(self, blocks: Int32Array) -> None:
        """These blocks have lost their nodes."""
        self.table.forget(blocks)

    def forget_nodes(self, nodes: Int32Array) -> None:
        """These nodes were removed; their numbers may be used again."""
        self._names[nodes] = 0

    def take_unwritten(self, max_nodes: int) -> Int32Array:
        """About max_nodes of the noted nodes, the oldest notes first. Some may have left the index since, or have no block."""
        taken: list[Int32Array] = []
        while self._unwritten and max_nodes > 0:
            nodes = self._unwritten[0]
            taken.append(nodes[:max_nodes])
            if len(nodes) > max_nodes:
                self._unwritten[0] = nodes[max_nodes:]
            else:
                del self._unwritten[0]
            max_nodes -= len(nodes)
        return np.concatenate([np.empty(0, np.int32), *taken])

    def write(self, nodes: Int32Array, blocks: Int32Array, parents: Int32Array, tokens: Int32Array) -> None:
        """nodes [n] of the index, with their blocks [n], parents [n] (nodes or roots) and tokens [n, block_size]."""
        below = parents > 0
        self._name(np.concatenate([parents[below], nodes]))
        names = np.where(below, self._names[np.maximum(parents, 0)], parents)
        self.table.write(Slots(blocks, self._names[nodes], names, tokens))

    def check(self, node_of_block: Int32Array) -> Iterator[list[str]]:
        """The broken invariants, for audits, in slices: a row that says something names its block's node."""
        for first in range(0, len(node_of_block), _SLICE_ROWS):
            yield self._check_rows(node_of_block, first, first + _SLICE_ROWS)

    def _check_rows(self, node_of_block: Int32Array, first: int, end: int) -> list[str]:
        written = self.table.read(first, end)
        wrong: list[str] = []
        if len(written) < self.table.num_written(first, end):
            wrong.append("a row of the kept index has another check than it should")
        nodes = node_of_block[written.blocks]
        if ((nodes == 0) | (self._names[nodes] != written.names)).any():
            wrong.append("the kept index names a block that the index does not name, or under another node")
        return wrong

    def _name(self, nodes: Int32Array) -> None:
        new = nodes[self._names[nodes] == 0]
        self._names[new] = np.arange(self._next_name, self._next_name + len(new))
        self._next_name += len(new)
