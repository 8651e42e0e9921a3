"""The prefix tree: which committed blocks hold which tokens, exactly.

Owns the nodes. A node stands for one full block of tokens behind one parent. Its key is the parent's number and the tokens
themselves, so that a hit compares tokens and never trusts a hash (R4). Each scope has a root of its own (roots.py). Rules:
every node reaches its root; a node has a block on the device, a copy in the host tier, or both, and a block of either tier has
at most one node; forgetting a node forgets all nodes below it, so that its number may be used again. Does not know reference
counts or sequences, nor whether a host copy has been written yet.

A dictionary keyed by bytes finds a block in a third of a microsecond and costs about 250 bytes a block; hashing tokens in
Python would be slower and would still need the comparison.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..values.clock import Clock
from ..values.distinct import are_among, distinct
from ..values.kv_spec import WHOLE, ReadSpan
from ..values.scopes import get_tenant
from ..values.types import Int32Array, MatchEnd, Tier
from .change_log import ChangeLog
from .eviction_log import EvictionLog
from .index_record import IndexRecord
from .kept_tree import KeptTree
from .node_blocks import GroupArray, NodeBlocks
from .node_links import NO_NODE, NodeLinks
from .partial_nodes import PartialNodes
from .roots import Roots
from .stored_logits import StoredLogits

_SLICE_NODES = 256  # audited in about a millisecond
_MOST_WALKED = 1024  # nodes; an audit of a larger index does not walk all of it in one go
_PACK_PARENT = struct.Struct("<i").pack
_UNPACK_PARENT = struct.Struct("<i").unpack_from


class PrefixIndex:
    """The prefix tree of one pool. Nodes are numbered from 1; a scope's root is a negative number and has no block."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        logits_memory: int = 0,
        num_host_blocks: int = 0,
        lose_hosts: Callable[[Int32Array], None] = lambda hosts: None,
        clock: Clock | None = None,
        group_spans: Sequence[ReadSpan] = (WHOLE,),
        has_tail: bool = False,
        max_partial_nodes: int = 0,
    ) -> None:
        """lose_hosts(host blocks) is called with the host copies whose node was forgotten."""
        self.clock = clock or Clock()
        self.block_size, self._key_len = block_size, 4 + 4 * block_size
        self._lose_hosts = lose_hosts
        num_nodes = num_blocks + max(num_host_blocks - 1, 0)
        self.num_changes = 0  # nodes added and removed so far: while it stands, so does every match
        self._nodes: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None]  # by node; None for a number that is not in use. It grows to num_nodes
        self.roots = Roots(num_nodes)
        self._unused: deque[int] = deque()  # numbers that were used before; a list would move all of them now and then
        self.held = NodeBlocks(num_nodes, num_blocks, num_host_blocks, block_size, group_spans, has_tail=has_tail)
        # The first group's, for all to read; `held` has written them.
        self.block_of_node, self.node_of_block = self.held.block_of_node, self.held.node_of_block
        self.host_of_node, self.node_of_host = self.held.host_of_node, self.held.node_of_host
        self.eviction_log = EvictionLog(num_nodes, self.roots.most, block_size, self.clock)
        self.change_log: ChangeLog | None = None  # while the pool is watched
        self.record: IndexRecord | None = None  # where the index is kept for a later run
        self.logits = StoredLogits(logits_memory)
        self.tenant_of_node: Int32Array | None = None  # set by cache limits that count by tenant; maintained once set
        self.links = NodeLinks(num_nodes, self.roots.most)
        self.partials = PartialNodes(num_blocks, max_partial_nodes, self.held.lost_states if self.held.has_states else None)

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, scope: str) -> int:
        """The root of a scope's tree, made when it is first asked for. Needs room for it (roots.py)."""
        if root := self.roots.find(scope):
            return root
        if (tenant := get_tenant(scope)) != scope:
            self.root(tenant)
        root = self.roots.add(scope, self.record.note_root if self.record is not None else lambda root, scope: True)
        self.eviction_log.add_root(root, int(self.roots.seeds[-root]))
        return root

    def add_roots(self, scopes: Sequence[str | None]) -> None:
        """Those that an earlier run has left, in their order; before its tree."""
        for root in map(self.roots.add_next, scopes):
            self.eviction_log.add_root(root, int(self.roots.seeds[-root]))

    def find_root(self, scope: str) -> int:
        """The root of a scope's tree, or NO_NODE (below which nothing is found) where it has none."""
        return self.roots.find(scope)

    def _tenant_below(self, parents: Int32Array | int) -> Int32Array:
        """[n] the tenants' numbers for nodes behind these nodes or roots, where they are maintained."""
        assert self.tenant_of_node is not None
        of_root = self.roots.tenant_of[np.maximum(-np.asarray(parents), 0)]
        return np.where(np.asarray(parents) < 0, of_root, self.tenant_of_node[np.maximum(parents, 0)])

    def match(self, root: int, tokens: Int32Array, max_blocks: int) -> Int32Array:
        """[matched] nodes of the longest cached prefix of tokens, at most max_blocks and whole blocks only."""
        num_blocks = min(max_blocks, len(tokens) // self.block_size)
        raw = np.ascontiguousarray(tokens[: num_blocks * self.block_size], "<i4").tobytes()
        width = self._key_len - 4
        find, node, found = self._nodes.get, root, []
        for start in range(0, len(raw), width):
            child = find(_PACK_PARENT(node) + raw[start : start + width])
            if child is None:
                break
            found.append(child)
            node = child
        return np.array(found, np.int32)

    def insert_each(self, parents: Int32Array, tokens: Int32Array, blocks: Int32Array) -> Int32Array:
        """Publishes one block each for several sequences. Returns [n] nodes.

        parents [n]; tokens [n, block_size]; blocks [n]. Where the content was known, the node in the answer has another block.
        """
        rows = np.empty((len(blocks), 1 + self.block_size), "<i4")
        rows[:, 0] = parents
        rows[:, 1:] = tokens
        raw, width, find = rows.tobytes(), self._key_len, self._nodes.get
        keys = [raw[start : start + width] for start in range(0, len(raw), width)]
        nodes = np.array([find(key) or self._add(key) for key in keys], np.int32)
        self.eviction_log.add_each(nodes, parents, rows[:, 1:])
        if self.tenant_of_node is not None:
            self.tenant_of_node[nodes] = self._tenant_below(parents)
        self._link(nodes, parents, blocks)
        return nodes

    def insert_run(self, parent: int, tokens: Int32Array, blocks: Int32Array) -> Int32Array:
        """Publishes consecutive blocks of one sequence. Returns [n] nodes.

        tokens [n * block_size]; blocks [n]. Where the content was known, the node in the answer has another block.
        """
        raw = np.ascontiguousarray(tokens, "<i4").tobytes()
        width, first_parent, nodes = self._key_len - 4, parent, list[int]()
        for row in range(len(blocks)):
            key = _PACK_PARENT(parent) + raw[row * width : (row + 1) * width]
            parent = self._nodes.get(key) or self._add(key)
            nodes.append(parent)
        result = np.array(nodes, np.int32)
        if len(nodes):
            parents = np.concatenate([np.array([first_parent], np.int32), result[:-1]])
            self.eviction_log.add_run(result, first_parent, tokens)
            if self.tenant_of_node is not None:
                self.tenant_of_node[result] = self._tenant_below(first_parent)
            self._link(result, parents, blocks)
        return result

    def forget_blocks(self, blocks: Int32Array, cause: MatchEnd = MatchEnd.EVICTED) -> Int32Array:
        """Forgets the nodes of these blocks and all nodes below. Returns the other blocks that lost their node with them.

        A block of a group with a window is forgotten alone, one of a partial node with those of the other groups.
        """
        lost, named = self.partials.split_off(blocks)
        named = named[self._forget_alone(named, cause)] if self.held.has_groups else named
        lost = np.append(lost, self.forget_nodes(self.node_of_block[named], cause))
        return distinct(lost[~are_among(lost, blocks)])

    def forget_nodes(self, nodes: Int32Array, cause: MatchEnd = MatchEnd.EVICTED) -> Int32Array:
        """Forgets these nodes (0 is none) and all nodes below. Returns the blocks that lost their node.

        A node removed with its parent needs no unlinking; the columns of all removed nodes are cleared at the end, at once.
        """
        keys, chosen = self._keys, nodes.tolist()
        victims, removed = set(chosen), list[int]()
        for node, child in zip(chosen, self.links.first_child[nodes].tolist(), strict=True):
            key = keys[node]
            if key is None:  # removed already, as a descendant of an earlier node
                continue
            (parent,) = _UNPACK_PARENT(key)
            if parent not in victims:
                self.links.unlink(node, parent)
            self._remove(node, key, removed)
            stack = [child] if child else []
            while stack:
                below = stack.pop()
                if self.links.next_sibling[below]:
                    stack.append(int(self.links.next_sibling[below]))
                key = keys[below]
                if key is None:
                    continue
                if self.links.first_child[below]:
                    stack.append(int(self.links.first_child[below]))
                self._remove(below, key, removed)
        gone = np.array(removed, np.int32)
        self.eviction_log.remove(gone, cause)
        return self._clear_columns(gone)

    def forget_hosts(self, hosts: Int32Array, cause: MatchEnd = MatchEnd.EVICTED) -> Int32Array:
        """These host copies are lost. Forgets the nodes without a device block, and all below; returns as forget_nodes.

        Of a group with a window the copy alone is forgotten.
        """
        nodes, groups = self._take_hosts(hosts)
        lost = self.held.blocks_of_nodes(nodes, groups) == 0
        if groups is not None:
            lost &= self.held.goes_with_node(groups)
            self.num_changes += len(hosts)
        return self.forget_nodes(nodes[lost], cause)

    def leave_device(self, blocks: Int32Array) -> None:
        """Takes these blocks from their nodes, each of which has a host copy there."""
        nodes, groups = self._take_blocks(blocks)
        self._report_tier(nodes, groups, Tier.HOST)

    def add_blocks(self, nodes: Int32Array, blocks: Int32Array, groups: GroupArray | None = None) -> None:
        """Gives blocks on the device to nodes that had none there. groups [n]: of the blocks; None: all of the first."""
        self.held.set_blocks(nodes, blocks, groups)
        if groups is not None:
            self.num_changes += len(blocks)
        if self.record is not None:
            self.record.note(Tier.DEVICE, blocks)
        self._report_tier(nodes, groups, Tier.DEVICE)

    def add_group_blocks(self, group: int, nodes: Int32Array, blocks: Int32Array) -> Int32Array:
        """Gives blocks [n] of a group behind the first to these nodes [n]. Returns [n] the blocks that the nodes have there."""
        of_node = self.held.group_blocks[group - 1]
        fresh = of_node[nodes] == 0
        if fresh.any():
            new, first = np.unique(nodes[fresh], return_index=True)  # the same content twice: the first block is kept
            chosen = blocks[fresh][first]
            self.held.set_blocks(new, chosen, np.full(len(new), group, np.int8))
            if self.record is not None:
                self.record.note(Tier.DEVICE, chosen)
            self.num_changes += len(new)
        return of_node[nodes]

    def add_hosts(self, nodes: Int32Array, hosts: Int32Array, groups: GroupArray | None = None) -> None:
        """Gives host copies to nodes that had none there. groups [n]: of the copies; None: all of the first."""
        self.held.set_hosts(nodes, hosts, groups)
        if groups is not None:
            self.num_changes += len(hosts)

    def insert_on_host(self, parent: int, tokens: bytes, host: int) -> tuple[int, bool]:
        """Publishes a block behind a node or root, with a host copy that has been written. tokens: LE32.

        Returns its node, and whether that took the copy: a node that was known and has one keeps its own.
        """
        key = _PACK_PARENT(parent) + tokens
        node = self._nodes.get(key)
        if node is not None and self.host_of_node[node]:
            return node, False
        is_new = node is None
        if node is None:
            node = self._add(key)
        nodes, parents = np.array([node], np.int32), np.array([parent], np.int32)
        self.add_hosts(nodes, np.array([host], np.int32))
        if is_new:
            self.eviction_log.add_each(nodes, parents, np.frombuffer(tokens, "<i4").reshape(1, -1))
            if self.tenant_of_node is not None:
                self.tenant_of_node[node] = self._tenant_below(parent)
            self.links.link(nodes, parents)
            if self.change_log is not None:
                self.change_log.stored(nodes)
                self.change_log.tier_changed(nodes, Tier.HOST)
        return node, True

    def add_group_host(self, group: int, node: int, host: int) -> bool:
        """Gives a node a host copy of a group behind the first, which has been written. Whether it had none there."""
        if self.held.group_hosts[group - 1][node]:
            return False
        self.add_hosts(np.array([node], np.int32), np.array([host], np.int32), np.array([group], np.int8))
        return True

    def note_filled(self, hosts: Int32Array) -> None:
        """These host copies have been written; those without a node are of no interest."""
        if self.record is not None:
            self.record.note(Tier.HOST, hosts[self.node_of_host[hosts] > 0])

    def add_tree(self, tree: KeptTree, record: IndexRecord) -> None:
        """Takes over a tree that an earlier run has left, and keeps the record up to date from now on."""
        assert not self._nodes, "a tree is taken over by an empty index"
        num_nodes, parents, tokens = len(tree), tree.parents, tree.tokens
        raw, width = np.column_stack([parents, tokens]).astype("<i4").tobytes(), self._key_len
        keys = [raw[start : start + width] for start in range(0, len(raw), width)]
        nodes = np.arange(1, num_nodes + 1, dtype=np.int32)
        self._keys += keys
        self._nodes = dict(zip(keys, nodes.tolist(), strict=True))
        self.num_changes += num_nodes
        for places, of_node, of_place in (
            (tree.blocks, self.block_of_node, self.node_of_block),
            (tree.hosts, self.host_of_node, self.node_of_host),
        ):
            of_node[nodes] = places
            of_place[places[places > 0]] = nodes[places > 0]
        for groups, add in ((tree.group_blocks, self.add_blocks), (tree.group_hosts, self.add_hosts)):
            for group, places in enumerate(groups, 1):
                there = places > 0
                add(nodes[there], places[there], np.full(np.count_nonzero(there), group, np.int8))
        self.links.link(nodes, parents)
        for start, end in tree.levels:
            self.eviction_log.add_each(nodes[start:end], parents[start:end], tokens[start:end])
        if self.tenant_of_node is not None:
            self.tenant_of_node[nodes] = self.roots.tenant_of[-tree.roots]
        self.record = record

    def check(self) -> Iterator[list[str]]:
        """The broken invariants of the tree, one sentence each, in slices; the tree may change between two of them."""
        for start in range(1, len(self._keys), _SLICE_NODES):
            yield [text for node in range(start, min(start + _SLICE_NODES, len(self._keys))) for text in self._check_node(node)]
        if self.record is not None:
            yield from self.record.check()
        yield self._check_totals()

    def _check_node(self, node: int) -> Iterator[str]:
        key = self._keys[node]
        if key is None:
            return
        (parent,) = _UNPACK_PARENT(key)
        if self._nodes.get(key) != node:
            yield f"node {node} has another key than the index"
        if parent == NO_NODE or (parent > 0 and self._keys[parent] is None) or parent < -len(self.roots.scopes):
            yield f"node {node} has no parent in the index"
        yield from self.held.check_node(node)
        yield from self.links.check_node(node, parent, self._parent_in_use)

    def _parent_in_use(self, node: int) -> int | None:
        """The parent of a node; None of a number that is not in use."""
        key = self._keys[node]
        return None if key is None else int(_UNPACK_PARENT(key)[0])

    def _check_totals(self) -> list[str]:
        wrong = self.held.check_totals() + self.partials.check(self._keys, self.block_size, len(self.held.spans))
        if any(self._keys[node] is None for node in self.logits.by_node):
            wrong.append("logits are stored for a node that is not in use")
        if len(self._unused) + len(self._nodes) != len(self._keys) - 1:
            wrong.append("used and unused node numbers do not add up")
        if len(self._nodes) <= _MOST_WALKED and self.links.num_reachable(range(-len(self.roots.scopes), 0)) != len(self._nodes):
            wrong.append("a node is not among its parent's children")
        return wrong + (self.roots.check() if len(self.roots) <= _MOST_WALKED else [])

    def _forget_alone(self, blocks: Int32Array, cause: MatchEnd) -> npt.NDArray[np.bool_]:
        """Takes those of these blocks from their nodes that can go alone. Returns [n] which go with their node instead."""
        held = self.held
        with_node = held.goes_with_node(held.group_of_block[blocks])
        alone = blocks[~with_node]
        nodes, groups = self._take_blocks(alone)
        self.num_changes += len(alone)
        if cause is not MatchEnd.EVICTED:  # else its host copy stays
            hosts = held.hosts_of_nodes(nodes, groups)
            self._take_hosts(hosts := hosts[hosts > 0])
            if len(hosts):
                self._lose_hosts(hosts)
        return with_node

    def _take_blocks(self, blocks: Int32Array) -> tuple[Int32Array, GroupArray | None]:
        """Takes these blocks on the device from their nodes. Returns nodes and groups [n]."""
        taken = self.held.take_blocks(blocks)
        if self.record is not None:
            self.record.forget(Tier.DEVICE, blocks)
        return taken

    def _take_hosts(self, hosts: Int32Array) -> tuple[Int32Array, GroupArray | None]:
        """The same of host copies."""
        taken = self.held.take_hosts(hosts)
        if self.record is not None:
            self.record.forget(Tier.HOST, hosts)
        return taken

    def _report_tier(self, nodes: Int32Array, groups: GroupArray | None, tier: Tier) -> None:
        """The tier of a node is that of its first group's block."""
        nodes = nodes if groups is None else nodes[groups == 0]
        if self.change_log is not None and len(nodes):
            self.change_log.tier_changed(nodes, tier)

    def parent(self, node: int) -> int:
        """A node or a root. The node is in use."""
        parent = self._parent_in_use(node)
        assert parent is not None
        return parent

    def key(self, node: int) -> bytes | None:
        """The parent's number and the tokens, all LE32; None for a number that is not in use."""
        return self._keys[node] if node < len(self._keys) else None

    def key_tokens(self, node: int) -> tuple[int, Int32Array]:
        """(parent, [block_size] tokens) of a node, for audits and explanations."""
        key = self._keys[node]
        assert key is not None
        words = np.frombuffer(key, "<i4")
        return int(words[0]), words[1:]

    def _add(self, key: bytes) -> int:
        """A new node, not linked yet."""
        if self._unused:
            node = self._unused.pop()
            self._keys[node] = key
        else:
            node = len(self._keys)
            self._keys.append(key)
        self.num_changes += 1
        self._nodes[key] = node
        return node

    def _link(self, nodes: Int32Array, parents: Int32Array, blocks: Int32Array) -> None:
        """Gives the nodes just added their blocks and their place among their parents' children."""
        fresh = (self.block_of_node[nodes] == 0).nonzero()[0]
        if len(fresh) < len(nodes):
            nodes, parents, blocks = nodes[fresh], parents[fresh], blocks[fresh]
        if len(set(nodes.tolist())) < len(nodes):  # the same content twice in one call: the first block is kept
            first = np.unique(nodes, return_index=True)[1]
            nodes, parents, blocks = nodes[first], parents[first], blocks[first]
        self.block_of_node[nodes] = blocks
        self.node_of_block[blocks] = nodes
        if self.record is not None:
            self.record.note(Tier.DEVICE, blocks)
        is_new = self.host_of_node[nodes] == 0  # a node that was in the host tier only is linked already
        if np.count_nonzero(is_new) < len(is_new):
            if self.change_log is not None:
                self.change_log.tier_changed(nodes[~is_new], Tier.DEVICE)
            nodes, parents = nodes[is_new], parents[is_new]
        self.links.link(nodes, parents)
        if self.change_log is not None:
            self.change_log.stored(nodes)

    def _remove(self, node: int, key: bytes, removed: list[int]) -> None:
        """Takes the node out of the dictionary; its number and its columns stay in use until _clear_columns."""
        if self.change_log is not None:
            self.change_log.removed(node, key)
        if self.logits.by_node:
            self.logits.by_node.pop(node, None)
        del self._nodes[key]
        self.num_changes += 1
        self._keys[node] = None
        removed.append(node)

    def _clear_columns(self, nodes: Int32Array) -> Int32Array:
        """Makes the numbers of removed nodes usable again. Returns the blocks that the nodes had on the device."""
        blocks, hosts = self.held.of_removed(nodes)
        self.held.unname_blocks(blocks)
        partials = self.partials.forget_below(nodes)
        self.held.unname_hosts(hosts)
        if self.record is not None:
            self.record.forget(Tier.DEVICE, blocks)
            self.record.forget(Tier.HOST, hosts)
            self.record.forget_nodes(nodes)
        for column in (*self.held.columns, *self.links.columns):
            column[nodes] = 0
        self._unused.extend(nodes.tolist())
        if len(hosts):
            self._lose_hosts(hosts)
        return np.concatenate([blocks, partials]) if len(partials) else blocks
