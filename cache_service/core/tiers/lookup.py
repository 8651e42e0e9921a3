"""TierLookup: what a tier asked by the name of content has of a prompt, and how what it brings comes into the index.

Owns the names of content, and the choice of the blocks. The name of a block is a keyed hash of its parent's name and its
tokens; a root has one of its scope; what another group of layers than the first has of a block is named after its
node. The key is made of the secret of a slab and the whole KV spec. So two models, revisions or layouts never have a name in
common, names of two slabs cannot be compared, and without the key a name reveals nothing of a prompt, nor are two prompts of
one name found.

Rules: a load ends where each group has what the next token reads, in the tiers above or in this one; it brings all that groups
which read all tokens lack up to there, and the last window of the others; of a tail nothing, because hits do without it. A node
comes into the index with the blocks of all groups that read all tokens, or not at all; what a window lacks shortens hits that
end there. With one group of layers that is: what lies behind the match, block by block, up to the first that the tier lacks.
"""

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..index.node_names import NodeNames
from ..index.prefix_index import PrefixIndex
from ..values.copies import NAME_BYTES, TierOrder, TierResult
from ..values.types import NO_INT32, Int32Array
from .host_tier import HostTier
from .orders import InFlight

Find = Callable[[bytes], int | None]  # the place of a name in the tier, if it has it


class ContentNames:
    """Names of one pool's nodes that hold beyond one run: content, behind what it is, for which scope and KV spec."""

    def __init__(self, index: PrefixIndex, key: bytes) -> None:
        """key: 1 to 64 bytes, of this slab and KV spec alone."""
        self._key = key
        self._nodes = NodeNames(index, self.child, self._root)
        self.of, self.get_root, self.first = self._nodes.of, self._nodes.get_root, self._nodes.first

    def child(self, parent: bytes, tokens: bytes) -> bytes:
        """The name of a block with these tokens, LE32, behind a parent of that name."""
        return hashlib.blake2b(parent + tokens, digest_size=NAME_BYTES, key=self._key).digest()

    def of_group(self, name: bytes, group: int) -> bytes:
        """The name of what a group of layers has of the content of this name; of the first group the name itself."""
        if not group:
            return name
        return hashlib.blake2b(name, digest_size=NAME_BYTES, key=self._key, person=b"group" + struct.pack("<I", group)).digest()

    def _root(self, scope: str) -> bytes:
        return hashlib.blake2b(scope.encode(), digest_size=NAME_BYTES, key=self._key, person=b"tenant").digest()


class Found(NamedTuple):
    """What a tier has of a prompt behind and beside what the tiers above have.

    orders: by entry; they have no host block yet. num_above: entries of a table that could be hit now. end: those once the
    orders have come. first: entries that have nodes. held: host blocks that a hit up to `end` reads.
    """

    orders: list[TierOrder]
    num_above: int
    end: int
    first: int
    held: Int32Array


class TierLookup:
    """Looks up prompts in one tier of one pool."""

    def __init__(self, index: PrefixIndex, host: HostTier, names: ContentNames, flight: InFlight) -> None:
        self._index, self._host, self._names, self._flight = index, host, names, flight
        self._spans = index.held.spans[:1] if index.held.has_tail else index.held.spans
        self.full_groups = [group for group, span in enumerate(self._spans) if span.is_whole]  # that read all tokens

    def lookups(self, root: int, tokens: Int32Array, find: Find, scope: str | None = None) -> Callable[[int], Found]:
        """What is found of a start of these tokens, by its number of entries, while the index stays as it is.

        What one of them has looked up, a shorter one does not look up again. scope: for a look at one that may have no root.
        """
        index, size = self._index, self._index.block_size
        num_most = len(tokens) // size
        nodes = index.match(root, tokens, num_most)
        num_nodes = len(nodes)
        raw, width, era = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * size, self._flight.era
        behind: list[tuple[bytes, bytes, list[TierOrder]]] = []  # entries that the index lacks: names of block and parent
        last = int(nodes[-1]) if num_nodes else root
        name = self._names.of(last) if num_nodes or scope is None else self._names.first(scope)
        for at in range(num_nodes, num_most):
            piece = raw[at * width : (at + 1) * width]
            parent, name = name, self._names.child(name, piece)
            own = list[TierOrder]()
            for group in self.full_groups:
                of_group = self._names.of_group(name, group) if group else name
                slot = find(of_group)
                if slot is None:
                    break
                own.append(TierOrder(slot, 0, of_group, parent, piece, 0, era, group, at))
            if len(own) < len(self.full_groups):
                break
            behind.append((name, parent, own))
        windows: dict[tuple[int, int], TierOrder | None] = {}

        def is_there(at: int, group: int) -> bool:
            """Whether a group with a window has the entry, in the tiers above or here."""
            if at < num_nodes:
                node = int(nodes[at])
                if index.held.group_blocks[group - 1][node] or index.held.group_hosts[group - 1][node]:
                    return True
            if (at, group) not in windows:
                if at < num_nodes:
                    name, parent = self._names.of(node), self._names.of(index.parent(node))
                else:
                    name, parent, _ = behind[at - num_nodes]
                slot, piece = find(of_group := self._names.of_group(name, group)), raw[at * width : (at + 1) * width]
                made = None if slot is None else TierOrder(slot, 0, of_group, parent, piece, 0, era, group, at)
                windows[at, group] = made
            return windows[at, group] is not None

        def up_to(most: int) -> Found:
            known = nodes[:most]
            num_above = len(index.held.usable(known, self._host.is_filling))
            end = self._end(min(most, num_nodes + len(behind)), is_there)
            if end <= num_above:
                return Found([], num_above, num_above, len(known), NO_INT32)
            orders = [each for _, _, own in behind[: max(end - len(known), 0)] for each in own]
            firsts = [index.held.first_entry(end, group) for group in range(len(self._spans))]
            orders += [made for (at, group), made in windows.items() if made is not None and firsts[group] <= at < end]
            if windows:
                orders.sort(key=lambda each: (each.entry, each.group))
            return Found(orders, num_above, end, len(known), self._held(known[:end], firsts))

        return up_to

    def num_known(self, root: int, tokens: Int32Array) -> int:
        """Entries of a prompt that have nodes."""
        return len(self._index.match(root, tokens, len(tokens) // self._index.block_size))

    def names_behind(self, root: int, tokens: Int32Array, first: int) -> list[bytes]:
        """The names of what the first group has of the whole blocks of these tokens, from the block `first` on."""
        raw, width = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * self._index.block_size
        nodes = self._index.match(root, tokens, first)
        names = [self._names.of(int(nodes[-1]) if len(nodes) else root)]
        for at in range(len(nodes) * width, len(raw) - width + 1, width):
            names.append(self._names.child(names[-1], raw[at : at + width]))
        return names[1 + first - len(nodes) :]

    def take(self, root: int, tokens: Int32Array, orders: Sequence[TierOrder], results: Sequence[TierResult]) -> list[int]:
        """The orders of a load have ended, those of an entry together. Returns the host blocks that the index has taken."""
        index = self._index
        path = index.match(root, tokens, len(tokens) // index.block_size).tolist()
        kept: list[int] = []
        done: dict[int, list[TierOrder]] = {}
        for order, result in zip(orders, results, strict=True):
            done.setdefault(order.entry, []).extend([order] if result is TierResult.DONE else [])
        for at, of_entry in done.items():
            is_new = at >= len(path)
            if is_new and (at > len(path) or not {order.group for order in of_entry}.issuperset(self.full_groups)):
                break  # without its parent, or without what a hit reads of it
            for order in of_entry:
                if order.group == 0:
                    node, is_taken = index.insert_on_host(path[at - 1] if at else root, order.tokens, order.host)
                    path += [node] if is_new else []
                else:
                    is_taken = index.add_group_host(order.group, path[at], order.host)
                kept += [order.host] if is_taken else []
        return kept

    def _end(self, most: int, is_there: Callable[[int, int], bool]) -> int:
        """The most entries behind which each window is whole. Each entry of a group is asked for once, from the back."""
        spans = {group: span for group, span in enumerate(self._spans) if not span.is_whole}
        if not spans:
            return most
        size, ends = self._index.block_size, np.arange(most + 1, dtype=np.int64)
        reads = {group: (span.firsts(ends * size) // size).tolist() for group, span in spans.items()}
        whole_from = dict.fromkeys(reads, most)  # what lies between there and the end is there
        end, groups = most, deque(reads)
        while groups:
            group = groups[0]
            at = min(whole_from[group], end)
            while at > reads[group][end] and is_there(at - 1, group):
                at -= 1
            whole_from[group] = at
            if at > reads[group][end]:
                end = at - 1  # a longer one would read this gap, too
                groups = deque(reads)
            else:
                groups.popleft()
        return end

    def _held(self, nodes: Int32Array, firsts: list[int]) -> Int32Array:
        """The host blocks of these nodes that are read from the first entries on."""
        columns = (self._index.host_of_node, *self._index.held.group_hosts)
        hosts = np.concatenate([column[nodes[first:]] for column, first in zip(columns, firsts, strict=False)])
        return hosts[hosts > 0]
