"""Partial nodes: what a sequence left behind its last whole block.

Owns the nodes of fewer tokens than a block. Each is behind one node of the prefix tree, or behind a root, and has one block of
each group of layers: the last, partly filled one, or the states behind its last token. It is found by its parent and its
tokens, compared one by one (R4). Rules: a partial node has no children; its blocks are its own and in no table once a call is
over; without one of them, or without its parent, it is forgotten whole. There are at most so many; of more, the least recently
used one is forgotten, and that is one of the tenant's own where it has more than its share, so that no tenant forgets for the
others. Its blocks are on the device alone, and what leaves the device is forgotten. Knows no reference counts.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.types import NO_INT32, Int32Array

_PACK_PARENT = struct.Struct("<i").pack
_TOKEN_BYTES = 4


class PartialNode(NamedTuple):
    """parent: a node or a root. tokens: LE32, 1 or more and fewer than a block. blocks [groups]. tenant: its number."""

    parent: int
    tokens: bytes
    blocks: Int32Array
    tenant: int

    @property
    def key(self) -> bytes:
        return _PACK_PARENT(self.parent) + self.tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES


class PartialNodes:
    """The partial nodes of one pool."""

    def __init__(self, num_blocks: int, most: int, lost_states: npt.NDArray[np.bool_] | None = None) -> None:
        """most: nodes that are kept at once. lost_states: by node of the prefix tree, to note behind which some are lost."""
        self._most, self._lost_states = most, lost_states
        self._nodes: dict[bytes, PartialNode] = {}  # the least recently used one first
        self._of_tenant: dict[int, dict[bytes, PartialNode]] = {}  # likewise
        self._below: dict[int, dict[bytes, PartialNode]] = {}  # by parent and key
        self._lens: dict[int, Counter[int]] = {}  # by parent: how many have so many tokens
        self._of_block: dict[int, PartialNode] = {}
        self.is_named: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)  # by block

    def __len__(self) -> int:
        return len(self._nodes)

    def has_below(self, parent: int) -> bool:
        """Whether a partial node is behind this node or root."""
        return parent in self._below

    def find(self, parent: int, tokens: Int32Array) -> Iterator[PartialNode]:
        """Those behind this node or root with which these tokens begin, the longest first."""
        raw = None
        for num_tokens in sorted(self._lens.get(parent, ()), reverse=True):
            if num_tokens <= len(tokens):
                raw = raw if raw is not None else np.ascontiguousarray(tokens[:num_tokens], "<i4").tobytes()
                node = self._nodes.get(_PACK_PARENT(parent) + raw[: _TOKEN_BYTES * num_tokens])
                if node is not None:
                    yield node

    def touch(self, node: PartialNode) -> None:
        """A sequence has started on it, or would have left it."""
        for nodes in (self._nodes, self._of_tenant[node.tenant]):
            nodes[node.key] = nodes.pop(node.key)

    def add(self, parent: int, tokens: Int32Array, blocks: Int32Array, tenant: int) -> Int32Array | None:
        """Names these blocks. Returns the blocks of a node that had to go for it; None, and no change, where it is there."""
        node = PartialNode(parent, np.ascontiguousarray(tokens, "<i4").tobytes(), blocks, tenant)
        if (there := self._nodes.get(node.key)) is not None:
            self.touch(there)
            return None
        if not self._most:
            return None
        gone = self._forget([self._choose_for(tenant)]) if len(self._nodes) >= self._most else NO_INT32
        self._of_tenant.setdefault(tenant, {})[node.key] = node
        self._nodes[node.key] = self._below.setdefault(parent, {})[node.key] = node
        self._lens.setdefault(parent, Counter())[node.num_tokens] += 1
        self._of_block.update(dict.fromkeys(blocks.tolist(), node))
        self.is_named[blocks] = True
        return gone

    def _choose_for(self, tenant: int) -> PartialNode:
        """The node that goes for one more of this tenant."""
        own = self._of_tenant.get(tenant, {})
        has_more = len(own) * len(self._of_tenant) > len(self._nodes)
        return next(iter((own if has_more else self._nodes).values()))

    def forget_blocks(self, blocks: Int32Array) -> Int32Array:
        """These blocks, each of a partial node, are lost. Returns all blocks of their nodes."""
        nodes = {id(node): node for node in map(self._of_block.__getitem__, blocks.tolist())}.values()
        if self._lost_states is not None:
            self._lost_states[[node.parent for node in nodes if node.parent > 0]] = True
        return self._forget(nodes)

    def split_off(self, blocks: Int32Array) -> tuple[Int32Array, Int32Array]:
        """The same, where only some of these blocks may be of partial nodes. Returns with them those that are of none."""
        if not self._nodes or not np.count_nonzero(is_partial := self.is_named[blocks]):
            return NO_INT32, blocks
        return self.forget_blocks(blocks[is_partial]), blocks[~is_partial]

    def forget_below(self, parents: Int32Array) -> Int32Array:
        """These nodes or roots are lost. Returns the blocks of the partial nodes behind them."""
        if not self._below:
            return NO_INT32
        return self._forget([node for parent in parents.tolist() for node in self._below.get(parent, {}).values()])

    def clear(self, max_blocks: int) -> Int32Array:
        """Forgets nodes of about so many blocks, or all. Returns their blocks."""
        chosen, num_blocks = list[PartialNode](), 0
        for node in self._nodes.values():
            if num_blocks >= max_blocks:
                break
            chosen.append(node)
            num_blocks += len(node.blocks)
        return self._forget(chosen)

    def tenants(self, blocks: Int32Array) -> Int32Array:
        """[n] the tenant of each of these blocks, which partial nodes have."""
        return np.array([self._of_block[block].tenant for block in blocks.tolist()], np.int32)

    def _forget(self, nodes: Iterable[PartialNode]) -> Int32Array:
        lost = [NO_INT32]
        for node in nodes:
            del self._nodes[node.key], self._below[node.parent][node.key], self._of_tenant[node.tenant][node.key]
            if not self._of_tenant[node.tenant]:
                del self._of_tenant[node.tenant]
            lens = self._lens[node.parent]
            lens[node.num_tokens] -= 1
            if not lens[node.num_tokens]:
                del lens[node.num_tokens]
            if not self._below[node.parent]:
                del self._below[node.parent], self._lens[node.parent]
            for block in node.blocks.tolist():
                del self._of_block[block]
            lost.append(node.blocks)
        blocks = np.concatenate(lost)
        self.is_named[blocks] = False
        return blocks

    def check(self, keys: Sequence[bytes | None], block_size: int, num_groups: int) -> list[str]:
        """The broken invariants, for audits. keys: by node of the prefix tree, None for a number that is not in use."""
        wrong: list[str] = []
        named = np.concatenate([NO_INT32, *(node.blocks for node in self._nodes.values())])
        if len(np.unique(named)) < len(named) or not np.array_equal(np.sort(named), np.flatnonzero(self.is_named)):
            wrong.append("a block has several partial nodes, or one that does not know it")
        counts = {sum(map(len, each.values())) for each in (self._below, self._of_tenant)}
        if len(self._nodes) > self._most or counts != {len(self._nodes)}:
            wrong.append("there are other partial nodes than are counted")
        for key, node in self._nodes.items():
            if node.key != key or not 0 < node.num_tokens < block_size or len(node.blocks) != num_groups:
                wrong.append("a partial node has other tokens or blocks than it may")
            if node.parent == 0 or (node.parent > 0 and keys[node.parent] is None):
                wrong.append(f"a partial node is behind node {node.parent}, which is not in the index")
            if self._below[node.parent].get(key) is not node or not self._lens[node.parent][node.num_tokens]:
                wrong.append(f"a partial node is not among those behind node {node.parent}")
        return wrong
