"""Which blocks of which group of layers a node has, on the device and in the host tier, and which of them a hit reads.

Owns the columns that lead from a node to its blocks and back. A block of the first group, and of every group that reads all
tokens, goes with its node; what a group with a window or chunks has is forgotten apart from it, so a node may lack it. A hit
ends where each group has what the next token reads (ReadSpan). Where the groups behind the first are a tail, what one lacks is
read from the first. Rule: a block of either tier has at most one node. Knows no tokens, no parents and no reference counts.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..values.kv_spec import WHOLE, ReadSpan
from ..values.types import NO_INT32, Int32Array

GroupArray = npt.NDArray[np.int8]


class NodeBlocks:
    """The blocks of all nodes of one pool. Node 0 is none; so are block 0 and host copy 0."""

    def __init__(
        self,
        num_nodes: int,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        spans: Sequence[ReadSpan] = (WHOLE,),
        *,
        has_tail: bool = False,
    ) -> None:
        self.spans, self.has_tail, self._block_size = tuple(spans), has_tail, block_size
        self._is_whole = np.array([span.is_whole for span in self.spans])
        self.block_of_node: Int32Array = np.zeros(num_nodes, np.int32)
        self.node_of_block: Int32Array = np.zeros(num_blocks, np.int32)
        self.host_of_node: Int32Array = np.zeros(num_nodes, np.int32)
        self.node_of_host: Int32Array = np.zeros(max(num_host_blocks, 1), np.int32)
        # Of the groups behind the first, by group - 1: the block and the host copy that each node has there, 0 for none.
        # node_of_block and node_of_host name the node of such a block, too.
        self.group_blocks: list[Int32Array] = [np.zeros(num_nodes, np.int32) for _ in self.spans[1:]]
        self.group_of_block = np.zeros(num_blocks if self.group_blocks else 1, np.int8)
        # By node, whether states behind it were evicted without a copy, so that a hit may end earlier than it would have.
        self.has_states = any(span.checkpoint_blocks for span in self.spans)
        self._are_states = np.array([span.checkpoint_blocks > 0 for span in self.spans])
        self.lost_states = np.zeros(num_nodes if self.has_states else 1, np.bool_)
        self.group_hosts: list[Int32Array] = [np.zeros(num_nodes, np.int32) for _ in self.spans[1:]]
        self.group_of_host = np.zeros(len(self.node_of_host) if self.group_hosts else 1, np.int8)

    @property
    def has_groups(self) -> bool:
        return bool(self.group_blocks)

    @property
    def columns(self) -> tuple[Int32Array, ...]:
        """By node."""
        return (self.block_of_node, self.host_of_node, *self.group_blocks, *self.group_hosts)

    # Who has what

    def get_groups(self, blocks: Int32Array) -> GroupArray | None:
        """[n] the group of each block on the device that has a node; None where there is one group."""
        return self.group_of_block[blocks] if self.group_blocks else None

    def get_group(self, host: int) -> int:
        """The group of one host copy that has a node."""
        return int(self.group_of_host[host]) if self.group_hosts else 0

    def groups_of_hosts(self, hosts: Int32Array) -> GroupArray | None:
        """The same of host copies."""
        return self.group_of_host[hosts] if self.group_hosts else None

    def find_hosts(self, blocks: Int32Array) -> Int32Array:
        """[n] the host copy of each block on the device, 0 for none."""
        return self.hosts_of_nodes(self.node_of_block[blocks], self.get_groups(blocks))

    def find_blocks(self, hosts: Int32Array) -> Int32Array:
        """[n] the block on the device that each host copy is of, 0 for none."""
        return self.blocks_of_nodes(self.node_of_host[hosts], self.groups_of_hosts(hosts))

    def blocks_of_nodes(self, nodes: Int32Array, groups: GroupArray | None) -> Int32Array:
        """[n] what each node has in its group on the device; groups None: all of the first."""
        return _of_nodes(self.block_of_node, self.group_blocks, nodes, groups)

    def hosts_of_nodes(self, nodes: Int32Array, groups: GroupArray | None) -> Int32Array:
        """The same in the host tier."""
        return _of_nodes(self.host_of_node, self.group_hosts, nodes, groups)

    def goes_with_node(self, groups: GroupArray) -> npt.NDArray[np.bool_]:
        """[n] of each block's group, whether a node without it cannot be."""
        return self._is_whole[groups]

    def of_removed(self, nodes: Int32Array) -> tuple[Int32Array, Int32Array]:
        """All blocks and all host copies that these nodes have."""
        blocks, hosts = self.block_of_node[nodes], self.host_of_node[nodes]
        blocks, hosts = blocks[blocks > 0], hosts[hosts > 0]
        if self.has_states:
            self.lost_states[nodes] = False
        if self.group_blocks:
            of_groups = np.concatenate([of_node[nodes] for of_node in self.group_blocks])
            host_of_groups = np.concatenate([of_node[nodes] for of_node in self.group_hosts])
            blocks = np.concatenate([blocks, of_groups[of_groups > 0]])
            hosts = np.concatenate([hosts, host_of_groups[host_of_groups > 0]])
        return blocks, hosts

    # Changes

    def set_blocks(self, nodes: Int32Array, blocks: Int32Array, groups: GroupArray | None) -> None:
        """Gives blocks on the device to nodes that have none there. groups [n]: of the blocks; None: all of the first."""
        _set(self.block_of_node, self.group_blocks, nodes, blocks, groups)
        self.node_of_block[blocks] = nodes
        if groups is not None:
            self.group_of_block[blocks] = groups
            if self.has_states:
                self.lost_states[nodes[self._are_states[groups]]] = False

    def set_hosts(self, nodes: Int32Array, hosts: Int32Array, groups: GroupArray | None) -> None:
        """The same of host copies."""
        _set(self.host_of_node, self.group_hosts, nodes, hosts, groups)
        self.node_of_host[hosts] = nodes
        if groups is not None:
            self.group_of_host[hosts] = groups

    def take_blocks(self, blocks: Int32Array) -> tuple[Int32Array, GroupArray | None]:
        """Takes these blocks from their nodes. Returns nodes and groups [n]."""
        nodes, groups = self.node_of_block[blocks], self.get_groups(blocks)
        _set(self.block_of_node, self.group_blocks, nodes, 0, groups)
        self.unname_blocks(blocks)
        if groups is not None and self.has_states:
            self.lost_states[nodes[self._are_states[groups] & (self.hosts_of_nodes(nodes, groups) == 0)]] = True
        return nodes, groups

    def take_hosts(self, hosts: Int32Array) -> tuple[Int32Array, GroupArray | None]:
        """The same of host copies."""
        nodes, groups = self.node_of_host[hosts], self.groups_of_hosts(hosts)
        _set(self.host_of_node, self.group_hosts, nodes, 0, groups)
        self.unname_hosts(hosts)
        return nodes, groups

    def unname_blocks(self, blocks: Int32Array) -> None:
        """These blocks on the device have no node any more."""
        self.node_of_block[blocks] = 0
        if self.group_blocks:
            self.group_of_block[blocks] = 0

    def unname_hosts(self, hosts: Int32Array) -> None:
        """These host copies have no node any more."""
        self.node_of_host[hosts] = 0
        if self.group_hosts:
            self.group_of_host[hosts] = 0

    # What a hit reads

    def usable(self, nodes: Int32Array, is_filling: npt.NDArray[np.bool_] | None = None) -> Int32Array:
        """[usable] the longest start of a match [n] behind which each group has all that the next token reads.

        That is all of it where the groups are a tail: what it lacks is read from the first group.
        is_filling: of each host copy, whether its content is still on the way; without it host copies do not count.
        """
        count = len(nodes)
        if not self.group_blocks or self.has_tail or not count:
            return nodes
        is_there = [of_node[nodes] > 0 for of_node in self.group_blocks]
        if is_filling is not None:
            for there, of_node in zip(is_there, self.group_hosts, strict=True):
                hosts = of_node[nodes]
                there |= (hosts > 0) & ~is_filling[hosts]
        return nodes[: self.longest_whole(is_there)]

    def num_lost(self, nodes: Int32Array) -> int:
        """How many of these nodes a hit would have, had no states been evicted."""
        found = self.lost_states[nodes].nonzero()[0] if self.has_states else NO_INT32
        return int(found[-1]) + 1 if len(found) else 0

    def longest_whole(self, is_there: list[npt.NDArray[np.bool_]]) -> int:
        """The most entries of a table behind which each group has all that the next token reads.

        is_there: of each group behind the first, [n] whether it has an entry.
        """
        lens = np.arange(1, len(is_there[0]) + 1)
        is_whole = np.ones(len(lens), np.bool_)
        for span, there in zip(self.spans[1:], is_there, strict=True):
            gaps = np.where(there, 0, lens)  # entry i: the length behind the gap at i
            last_gap = np.maximum.accumulate(gaps)
            is_whole &= last_gap <= span.firsts(lens * self._block_size) // self._block_size
        found = is_whole.nonzero()[0]
        return int(found[-1]) + 1 if len(found) else 0

    def first_entry(self, num_entries: int, group: int) -> int:
        """The first table entry that the token behind so many whole entries reads in a group."""
        return self.spans[group].first(num_entries * self._block_size) // self._block_size

    def group_hits(self, nodes: Int32Array) -> Int32Array:
        """[groups - 1, n] the blocks of a usable match that the next token reads in each group; 0 before them.

        Of a tail those behind its last gap.
        """
        hits = np.zeros((len(self.group_blocks), len(nodes)), np.int32)
        for group, (row, of_node) in enumerate(zip(hits, self.group_blocks, strict=True), 1):
            first = self.first_entry(len(nodes), group)
            if self.has_tail:
                gaps = (of_node[nodes[first:]] == 0).nonzero()[0]
                first += int(gaps[-1]) + 1 if len(gaps) else 0
            row[first:] = of_node[nodes[first:]]
        return hits

    def hit_table(self, nodes: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Blocks and host copies [groups * n] that a start on a usable match reads, one group behind the other.

        An entry that has neither is one that is not read.
        """
        blocks, hosts = self.block_of_node[nodes], self.host_of_node[nodes]
        if not self.group_blocks:
            return blocks, hosts
        others = np.zeros((len(self.group_hosts), len(nodes)), np.int32)
        for group, (row, of_node) in enumerate(zip(others, self.group_hosts, strict=True), 1):
            first = self.first_entry(len(nodes), group)
            row[first:] = of_node[nodes[first:]]
        return np.concatenate([blocks, self.group_hits(nodes).ravel()]), np.concatenate([hosts, others.ravel()])

    def partial_table(self, nodes: Int32Array, num_tokens: int, last: Int32Array) -> Int32Array | None:
        """[groups * (n + 1)] blocks that a start behind num_tokens tokens reads, one group behind the other.

        nodes [n]: of the whole blocks. last [groups]: the partly filled blocks behind them. None where one is not there.
        """
        table = np.zeros((len(self.spans), len(nodes) + 1), np.int32)
        columns = zip(self.spans, table, (self.block_of_node, *self.group_blocks), strict=True)
        for span, row, of_node in columns:
            first = span.first(num_tokens) // self._block_size
            row[first:-1] = of_node[nodes[first:]]
            if not row[first:-1].all():
                return None
        table[:, -1] = last
        return table.ravel()

    # Audits

    def check_node(self, node: int) -> Iterator[str]:
        """The broken invariants of a node in use."""
        block, host = int(self.block_of_node[node]), int(self.host_of_node[node])
        if (block and self.node_of_block[block] != node) or (host and self.node_of_host[host] != node):
            yield f"node {node} and its block disagree"
        if not block and not host:
            yield f"node {node} has no block in any tier"
        for group, (of_node, of_host) in enumerate(zip(self.group_blocks, self.group_hosts, strict=True), 1):
            named, copy = int(of_node[node]), int(of_host[node])
            if named and (self.node_of_block[named] != node or self.group_of_block[named] != group):
                yield f"node {node} and its block of group {group} disagree"
            if copy and (self.node_of_host[copy] != node or self.group_of_host[copy] != group):
                yield f"node {node} and its host copy of group {group} disagree"
            if not named and not copy and self._is_whole[group]:
                yield f"node {node} has no block of group {group} in any tier"

    def check_totals(self) -> list[str]:
        """The broken invariants of all columns."""
        num_named = np.count_nonzero(self.block_of_node) + sum(map(np.count_nonzero, self.group_blocks))
        num_hosts = np.count_nonzero(self.host_of_node) + sum(map(np.count_nonzero, self.group_hosts))
        pairs = ((num_named, self.node_of_block), (num_hosts, self.node_of_host))
        text = "blocks with a node and nodes with a block differ in number"
        return [text for number, of_block in pairs if number != np.count_nonzero(of_block)]


def _of_nodes(of_node: Int32Array, of_groups: list[Int32Array], nodes: Int32Array, groups: GroupArray | None) -> Int32Array:
    """[n] what each node has in its group."""
    found = of_node[nodes]
    if groups is not None:
        for group, of_group in enumerate(of_groups, 1):
            here = groups == group
            found[here] = of_group[nodes[here]]
    return found


def _set(
    of_node: Int32Array, of_groups: list[Int32Array], nodes: Int32Array, values: Int32Array | int, groups: GroupArray | None
) -> None:
    """Each node has this value in its group from now on."""
    if groups is None:
        of_node[nodes] = values
        return
    for group, column in enumerate((of_node, *of_groups)):
        here = groups == group
        column[nodes[here]] = values if isinstance(values, int) else values[here]
