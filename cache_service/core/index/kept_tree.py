"""make_tree: the prefix tree that the rows of a kept index describe, of both tiers together.

Pure array work, of a few passes over all rows. Rules: a row belongs to the tree if its ancestors, in whichever tier, lead to
the root of a known tenant; all others are left out, rings among them. Rows that contradict each other (a name twice in a tier,
the same tokens twice behind one parent, or one name that is not the same node in both tiers) make all tables worthless, because
then the program that wrote them was wrong. With several groups of layers, the first group's rows make the tree. A node without
a row of a group that reads all tokens is left out. A row of another group counts where its node is in the tree.

find_damaged returns which believed blocks do not hold what they held when their rows were written. Only rows with a digest can
be compared; a sample is compared first, and where one of it differs, all are. The caller says how a digest is made, so this
knows no memory.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.kept_index import Verification
from ..values.kv_spec import WHOLE, ReadSpan
from ..values.types import Int32Array, Int64Array, Tier
from .index_record import Slots

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class KeptTree:
    """n nodes, parents before children. A node's number is its place plus 1.

    blocks [n], hosts [n]: where the node's content is in each tier, 0 for nowhere; names [n]; tokens [n, block_size]. parents
    [n]: the number of the parent, or its root, which is negative. roots [n]. levels: the places [start, end) of each depth,
    from the children of roots down. group_blocks, group_hosts [groups - 1, n]: where each other group of layers has the node's
    content.
    """

    blocks: Int32Array
    hosts: Int32Array
    names: Int64Array
    tokens: Int32Array
    parents: Int32Array
    roots: Int32Array
    levels: tuple[tuple[int, int], ...]
    group_blocks: Int32Array = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    group_hosts: Int32Array = field(default_factory=lambda: np.zeros((0, 0), np.int32))

    @property
    def all_blocks(self) -> Int32Array:
        """[m] blocks of all groups on the device."""
        return _all_there(self.blocks, self.group_blocks)

    @property
    def all_hosts(self) -> Int32Array:
        """[m] the same in the host tier."""
        return _all_there(self.hosts, self.group_hosts)

    def __len__(self) -> int:
        return len(self.names)

    def leaves_first(self) -> Int64Array:
        """[n] places, leaves before parents; of the others those first that were published, or had a child, longest ago."""
        last = self.names.copy()  # names grow: the largest one below a node shows when it was last of use
        for start, end in reversed(self.levels[1:]):
            np.maximum.at(last, self.parents[start:end] - 1, last[start:end])
        depths = np.repeat(np.arange(len(self.levels)), [end - start for start, end in self.levels])
        return np.lexsort((-depths, last))


class _Rows(NamedTuple):
    """What the rows of both tiers say, one for each node. The columns are those of KeptTree; parents are names or roots."""

    blocks: Int32Array
    hosts: Int32Array
    names: Int64Array
    tokens: Int32Array
    parents: Int64Array


def make_tree(
    device: Slots, num_roots: int, hosts: Slots | None = None, group_spans: tuple[ReadSpan, ...] = (WHOLE,)
) -> KeptTree:
    """num_roots: those that are known, -1 to -num_roots. group_spans: of the groups of layers."""
    hosts = hosts if hosts is not None else device.at(_NO_ROWS)
    if len(group_spans) == 1 == device.num_groups == hosts.num_groups:
        return _make_tree(device, num_roots, hosts)
    if max(device.num_groups, hosts.num_groups) > len(group_spans):
        return _make_tree(device.at(_NO_ROWS), num_roots, hosts.at(_NO_ROWS))
    first = [device.of_group(0), hosts.of_group(0)]
    others = [(device.of_group(group), hosts.of_group(group)) for group in range(1, len(group_spans))]
    for span, tiers in zip(group_spans[1:], others, strict=True):
        if span.is_whole:
            names = np.concatenate([tier.names for tier in tiers])
            first = [slots.at(np.flatnonzero(np.isin(slots.names, names))) for slots in first]
    tree = _make_tree(first[0], num_roots, first[1])
    placed = [[_placed(tree, slots) for slots in tiers] for tiers in others]
    if any(each is None for tiers in placed for each in tiers):
        return make_tree(device.at(_NO_ROWS), num_roots, None, group_spans)
    columns = [np.stack([each for each in tier if each is not None]) for tier in zip(*placed, strict=True)]
    return replace(tree, group_blocks=columns[0], group_hosts=columns[1])


def _placed(tree: KeptTree, slots: Slots) -> Int32Array | None:
    """[n] the block of each node, as these rows of one group and tier say, 0 for none; None where they contradict the tree."""
    blocks = np.zeros(len(tree), np.int32)
    order = np.argsort(tree.names, kind="stable")
    if len(np.unique(slots.names)) < len(slots):
        return None
    if not len(tree) or not len(slots):
        return blocks
    at = order[np.minimum(np.searchsorted(tree.names[order], slots.names), len(tree) - 1)]
    known = np.flatnonzero(tree.names[at] == slots.names)
    slots, at = slots.at(known), at[known]
    parents = tree.parents[at]
    names = np.where(parents < 0, parents, tree.names[np.maximum(parents, 1) - 1])
    if (names != slots.parents).any() or (tree.tokens[at] != slots.tokens).any():
        return None
    blocks[at] = slots.blocks
    return blocks


def _all_there(places: Int32Array, of_groups: Int32Array) -> Int32Array:
    found = np.concatenate([places, of_groups.ravel()])
    return found[found > 0]


def _make_tree(device: Slots, num_roots: int, hosts: Slots) -> KeptTree:
    """The tree that the rows of the first group make."""
    rows = _joined(device, hosts)
    if rows is None:
        rows = _joined(device.at(_NO_ROWS), device.at(_NO_ROWS))
        assert rows is not None, "no rows contradict nothing"
    order = np.argsort(rows.names, kind="stable")
    ups = _ups(rows, order, rows.names[order], num_roots)
    depths, ends = _climb(ups, len(rows.names), num_roots)
    in_tree = np.flatnonzero((ends >= len(rows.names)) & (ends < len(rows.names) + num_roots))
    tree = _tree(rows, in_tree[np.argsort(depths[in_tree], kind="stable")], ups, depths, num_roots)
    return _tree(rows, _NO_ROWS, ups, depths, num_roots) if _has_twins(tree) else tree


def _joined(device: Slots, hosts: Slots) -> _Rows | None:
    """None where a name stands for two nodes, or for none."""
    for slots in (device, hosts):
        if (slots.names < 1).any() or len(np.unique(slots.names)) < len(slots):
            return None
    _, in_device, in_hosts = np.intersect1d(device.names, hosts.names, assume_unique=True, return_indices=True)
    twins, others = device.at(in_device), hosts.at(in_hosts)
    if (twins.parents != others.parents).any() or (twins.tokens != others.tokens).any():
        return None
    alone = hosts.at(np.setdiff1d(np.arange(len(hosts)), in_hosts, assume_unique=True))
    host_of = np.zeros(len(device) + len(alone), np.int32)
    host_of[in_device] = others.blocks
    host_of[len(device) :] = alone.blocks
    return _Rows(
        np.concatenate([device.blocks, np.zeros(len(alone), np.int32)]),
        host_of,
        np.concatenate([device.names, alone.names]),
        np.concatenate([device.tokens, alone.tokens]),
        np.concatenate([device.parents, alone.parents]),
    )


def _ups(rows: _Rows, order: Int64Array, names: Int64Array, num_roots: int) -> Int64Array:
    """[n] the place of each row's parent; n + k - 1 for the root -k, and n + num_roots for a parent that is not there."""
    num, parents = len(rows.names), rows.parents
    if not num:
        return _NO_ROWS
    at = np.minimum(np.searchsorted(names, parents), num - 1)
    ups = np.where(names[at] == parents, order[at], num + num_roots)
    is_root = (parents < 0) & (parents >= -num_roots)
    return np.where(is_root, num - 1 - parents, ups)


def _climb(ups: Int64Array, num: int, num_roots: int) -> tuple[Int64Array, Int64Array]:
    """[n] steps from each row to where its ancestors end, and [n] that end; by doubling the steps, so that no order matters."""
    tops = np.arange(num, num + num_roots + 1)
    ends = np.concatenate([ups, tops])
    depths = np.concatenate([np.ones(num, np.int64), np.zeros(len(tops), np.int64)])
    for _ in range(num.bit_length()):
        depths += depths[ends]
        ends = ends[ends]
    return depths[:num], ends[:num]  # a row on a ring, or below one, ends at a row


def _tree(rows: _Rows, places: Int64Array, ups: Int64Array, depths: Int64Array, num_roots: int) -> KeptTree:
    """The tree of the rows at these places, parents before children."""
    num = len(rows.names)
    numbers = np.zeros(num + num_roots + 1, np.int64)
    numbers[places] = np.arange(1, len(places) + 1)
    numbers[num:] = -1 - np.arange(num_roots + 1)
    parents = numbers[ups[places]].astype(np.int32) if len(places) else np.empty(0, np.int32)
    starts = np.flatnonzero(np.diff(depths[places], prepend=0)) if len(places) else _NO_ROWS
    levels = tuple(zip(starts.tolist(), [*starts[1:].tolist(), len(places)], strict=False))
    roots = parents.copy()
    for start, end in levels[1:]:
        roots[start:end] = roots[parents[start:end] - 1]
    blocks, hosts, names = rows.blocks[places], rows.hosts[places], rows.names[places]
    return KeptTree(blocks, hosts, names, rows.tokens[places], parents, roots, levels)


def _has_twins(tree: KeptTree) -> bool:
    """Whether two nodes have the same tokens behind the same parent."""
    _, of_parent, counts = np.unique(tree.parents, return_inverse=True, return_counts=True)
    siblings = counts[of_parent] > 1  # most nodes have none
    rows = np.column_stack([tree.parents[siblings], tree.tokens[siblings]])
    return len({row.tobytes() for row in rows}) < len(rows)


class Damage(NamedTuple):
    """num_compared: of all tiers. blocks: those that differ, by tier."""

    num_compared: int
    blocks: list[Int32Array]

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.blocks))


def find_damaged(tiers: list[tuple[Tier, Slots]], how: Verification) -> Damage:
    """tiers: the rows of the believed blocks of each."""
    tiers = [(tier, slots.at(np.flatnonzero(slots.digests))) for tier, slots in tiers]
    num_blocks = sum(len(slots) for _, slots in tiers)
    is_sampled = np.ones(num_blocks, np.bool_)
    if 0 < how.num_sampled < num_blocks:
        is_sampled[:] = False
        is_sampled[np.random.default_rng(how.seed).permutation(num_blocks)[: how.num_sampled]] = True
    found = _compare(tiers, is_sampled, how)
    if not found.num_blocks or is_sampled.all():
        return found
    others = _compare(tiers, ~is_sampled, how)
    return Damage(num_blocks, [np.concatenate(both) for both in zip(found.blocks, others.blocks, strict=True)])


def _compare(tiers: list[tuple[Tier, Slots]], is_chosen: npt.NDArray[np.bool_], how: Verification) -> Damage:
    start, damaged = 0, list[Int32Array]()
    for tier, slots in tiers:
        chosen = slots.at(np.flatnonzero(is_chosen[start : start + len(slots)]))
        start += len(slots)
        damaged.append(chosen.blocks[how.digest(tier, chosen.blocks) != chosen.digests])
    return Damage(int(np.count_nonzero(is_chosen)), damaged)
