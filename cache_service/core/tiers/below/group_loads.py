"""GroupLoads: what a tier asked by the name of content brings where a pool has several groups of layers.

Owns the choice of the blocks and their way into the index. Rules: a load ends where each group has what the next token reads,
in the tiers above or in this one; it brings all that groups which read all tokens lack up to there, and the last window of the
others; of a tail nothing, because hits do without it. A node comes into the index with the blocks of all groups that read all
tokens, or not at all; what a window lacks shortens hits that end there. The name of a block of another group than the first is
made of its node's name.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...index.prefix_index import PrefixIndex
from ...values.copies import TierOrder, TierResult
from ...values.types import Int32Array
from ..host_tier import HostTier
from .content_names import ContentNames


class Found(NamedTuple):
    """What a tier has of a prompt behind and beside what the tiers above have.

    num_above: entries of a table that could be hit now. end: those once the orders have come. first: entries that have nodes.
    held: host blocks that a hit up to `end` reads.
    """

    orders: list[TierOrder]
    num_above: int
    end: int
    first: int
    held: Int32Array


class GroupLoads:
    """Of one tier of one pool."""

    def __init__(self, index: PrefixIndex, host: HostTier, names: ContentNames) -> None:
        self._index, self._host, self._names = index, host, names
        self._spans = index.held.spans[:1] if index.held.has_tail else index.held.spans
        self._full = [group for group, span in enumerate(self._spans) if span.is_whole]

    def name_of(self, host: int) -> bytes:
        """The name of what a host block in the index holds."""
        index = self._index
        return self._names.of_group(self._names.of(int(index.node_of_host[host])), int(index.held.group_of_host[host]))

    def lookup(
        self, root: int, tokens: Int32Array, find: Callable[[bytes], int | None], era: int, tenant: str | None = None
    ) -> Found:
        """find: the place of a name in the tier, if it has it. The orders have no host block yet.

        tenant: for a look at what one has that may have no root.
        """
        return self.lookups(root, tokens, find, era, tenant)(len(tokens) // self._index.block_size)

    def lookups(
        self, root: int, tokens: Int32Array, find: Callable[[bytes], int | None], era: int, tenant: str | None = None
    ) -> Callable[[int], Found]:
        """The same for starts of these tokens, by their number of entries, while the index stays as it is.

        What one of them has looked up, a shorter one does not look up again.
        """
        index, size = self._index, self._index.block_size
        num_most = len(tokens) // size
        nodes = index.match(root, tokens, num_most)
        raw, width = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * size
        chain = [(self._names.of(node), self._names.of(index.parent(node))) for node in nodes.tolist()]
        behind: list[list[TierOrder]] = []  # of each entry that the index lacks
        first = self._names.of(root) if tenant is None else self._names.first(tenant)
        name = chain[-1][0] if chain else first
        for at in range(len(nodes), num_most):
            parent, name = name, self._names.child(name, raw[at * width : (at + 1) * width])
            own = [self._order(at, group, name, parent, raw, find, era) for group in self._full]
            if any(order is None for order in own):
                break
            behind.append([order for order in own if order is not None])
            chain.append((name, parent))
        windows: dict[tuple[int, int], TierOrder | None] = {}

        def is_there(at: int, group: int) -> bool:
            """Whether a group with a window has the entry, in the tiers above or here."""
            if at < len(nodes) and (
                index.held.group_blocks[group - 1][nodes[at]] or index.held.group_hosts[group - 1][nodes[at]]
            ):
                return True
            if (at, group) not in windows:
                windows[at, group] = self._order(at, group, *chain[at], raw, find, era)
            return windows[at, group] is not None

        def up_to(most: int) -> Found:
            known = nodes[:most]
            num_above = len(index.held.usable(known, self._host.is_filling))
            end = self._end(min(most, len(chain)), is_there)
            if end <= num_above:
                return Found([], num_above, num_above, len(known), np.empty(0, np.int32))
            orders = [order for of_entry in behind[: max(end - len(known), 0)] for order in of_entry]
            firsts = self._first_reads(end)
            orders += [order for (at, group), order in windows.items() if order is not None and firsts[group] <= at < end]
            orders.sort(key=lambda order: (order.entry, order.group))
            return Found(orders, num_above, end, len(known), self._held(known[:end], firsts))

        return up_to

    @property
    def num_full(self) -> int:
        """Groups that read all tokens."""
        return len(self._full)

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

    def names_to_ask(
        self, root: int, tokens: Int32Array, find: Callable[[bytes], int | None], asked: frozenset[bytes], era: int
    ) -> list[bytes]:
        """Of which names it is not known whether they are stored, that the longest hit that could be would read.

        asked: the names of which it is known. First those of the groups that read all tokens; then the windows, the last first.
        """
        found = self.lookup(root, tokens, lambda name: find(name) if name in asked else 0, era)
        unknown = [order for order in found.orders if order.name not in asked]
        full = [order.name for order in unknown if self._spans[order.group].is_whole]
        return full + [order.name for order in reversed(unknown) if not self._spans[order.group].is_whole]

    def take(self, root: int, tokens: Int32Array, orders: Sequence[TierOrder], results: Sequence[TierResult]) -> list[int]:
        """The orders of a load have ended, those of an entry together. Answers the host blocks that the index has taken."""
        index = self._index
        path = index.match(root, tokens, len(tokens) // index.block_size).tolist()
        kept: list[int] = []
        done: dict[int, list[TierOrder]] = {}
        for order, result in zip(orders, results, strict=True):
            done.setdefault(order.entry, []).extend([order] if result is TierResult.DONE else [])
        for at, of_entry in done.items():
            is_new = at >= len(path)
            if is_new and (at > len(path) or not {order.group for order in of_entry}.issuperset(self._full)):
                break  # without its parent, or without what a hit reads of it
            for order in of_entry:
                if order.group == 0:
                    node, is_taken = index.insert_on_host(path[at - 1] if at else root, order.tokens, order.host)
                    path += [node] if is_new else []
                else:
                    is_taken = index.add_group_host(order.group, path[at], order.host)
                kept += [order.host] if is_taken else []
        return kept

    def _order(
        self, at: int, group: int, name: bytes, parent: bytes, raw: bytes, find: Callable[[bytes], int | None], era: int
    ) -> TierOrder | None:
        width = 4 * self._index.block_size
        of_group = self._names.of_group(name, group)
        slot = find(of_group)
        if slot is None:
            return None
        return TierOrder(slot, 0, of_group, parent, raw[at * width : (at + 1) * width], 0, era, group, at)

    def _first_reads(self, end: int) -> list[int]:
        """Of each group the first entry that the token behind `end` entries reads."""
        return [self._index.held.first_entry(end, group) for group in range(len(self._spans))]

    def _end(self, most: int, is_there: Callable[[int, int], bool]) -> int:
        """The most entries behind which each window is whole. Each entry of a group is asked for once, from the back."""
        size, ends = self._index.block_size, np.arange(most + 1, dtype=np.int64)
        spans = {group: span for group, span in enumerate(self._spans) if not span.is_whole}
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
