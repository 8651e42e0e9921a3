"""The events of the watches of one pool: first all blocks that are cached for the scope, then every change.

Owns the names of the index's nodes, and the progress of each watch; lower_tier_view reports blocks below the host tier alone. A
name takes about a microsecond, so names are made here, a slice at a time, and never by a step. Rules, for each watch: a block
is reported once, as part of the snapshot or as stored, after its parent; its removal comes after that or not at all; a reader
that applies snapshot and events in order has what can be reached in the tiers. The rules hold because a slice looks at the
index only when the change log is read to its end, and because a change is reported exactly if that very node was reported to
the watch. A watch whose reader does not keep up ends; a snapshot waits for its reader, changes do not.
"""

import struct
from collections.abc import Callable

import numpy as np

from ...values.kv_spec import BLOCK_NAME_BYTES, block_name, first_parent
from ...values.types import EventKind, PressureLevel, Tier
from ..below_blocks import BelowBlocks
from ..change_log import BELOW_CLEARED, REMOVED, STORED, Change, ChangeLog
from ..prefix_index import PrefixIndex
from .lower_tier_view import LowerTierView
from .watch import Event, Watch, zeros

_LOOKS_PER_NAME = 8  # looks at unused node numbers that cost as much as reporting one block
_parent_of = struct.Struct("<i").unpack_from


class EventFeed:
    """The watches of a pool. Made with the first, closed with the last; `wake` is called when `advance` has work to do."""

    def __init__(
        self,
        index: PrefixIndex,
        spec_key: bytes,
        pressure: PressureLevel,
        wake: Callable[[], None],
        max_unread: int = 0,
        below: BelowBlocks | None = None,
    ) -> None:
        """below: what the tiers below the host tier have, where there are some."""
        self._index = index
        self._below = below or BelowBlocks()
        self._view_of: dict[Watch, LowerTierView] = {}
        self._views: list[LowerTierView] = []  # of watches of one scope with complete snapshots there is one
        self._above: dict[bytes, int] = {}  # the root of each named node, by name; where there are tiers below
        self._spec_key = spec_key
        self._pressure = pressure
        self._num_nodes = len(index.block_of_node)
        self._change_log = index.change_log = ChangeLog(max_unread or 2 * self._num_nodes + 65_536, wake)
        self._names = zeros(self._num_nodes * BLOCK_NAME_BYTES, np.uint8)
        self._named = zeros(self._num_nodes, np.uint8)
        self._roots = zeros(self._num_nodes, np.int32)  # of the nodes looked at so far, else 0
        self._root_names: dict[int, bytes] = {}

    @property
    def watches(self) -> list[Watch]:
        return list(self._view_of)

    def open(self, scope: str, *, wants_tokens: bool = False) -> Watch:
        """A watch that starts with a snapshot. wants_tokens: of the blocks that are new to its reader."""
        view = LowerTierView(first_parent(self._spec_key, scope), self._below, self._above)
        watch = Watch(scope, self._num_nodes, self._index.block_size if wants_tokens else 0)
        view.readers.append(watch)
        self._view_of[watch] = view
        self._views.append(view)
        return watch

    def notify_all(self, event: Event) -> None:
        """Reports an event that is not about this pool's blocks to every watch at once, also within its snapshot."""
        for watch in self.watches:
            if not watch.is_lagging:
                watch.add(event)

    def close(self, watch: Watch) -> None:
        """Ends a watch; the change log ends with the last one."""
        view = self._view_of.pop(watch)
        view.readers.remove(watch)
        if not view.readers:
            self._views.remove(view)
        if not self.watches:
            self._index.change_log = None

    def advance(self, budget: int) -> bool:
        """Reports about `budget` blocks to the watches. Returns whether more blocks can be reported now."""
        if not self.watches:
            return False
        if self._change_log.has_overflowed:
            for watch in self.watches:
                watch.is_lagging = True
            return False
        for watch, view in self._view_of.items():
            # No root changes its scope while changes are unread, so the roots of now are those of all of them.
            view.root = self._index.find_root(watch.scope)
            self._root_names[view.root] = view.root_name
        while budget > 0 and len(self._change_log):
            node, change = self._change_log.peek()
            cost, is_done = self._report_change(node, change, budget)
            budget -= cost
            if is_done:
                self._change_log.advance()
        complete = [view for view in self._views if view.readers[0].reported is None]
        for view in complete:
            while budget > 0 and view.has_work:
                view.look(EventKind.STORED)
                budget -= 1
        for watch in self.watches:
            while budget > 0 and watch.wants_snapshot:
                budget -= self._report_snapshot(watch, budget)
        is_behind = len(self._change_log) > 0 or any(view.has_work for view in complete)
        return is_behind or any(watch.wants_snapshot for watch in self.watches)

    def _report_change(self, node: int, change: Change, budget: int) -> tuple[int, bool]:
        """(cost, whether the change is reported completely: its ancestors may have to be reported first)."""
        if isinstance(change, PressureLevel):
            self._pressure = change
            for watch in self.watches:
                if watch.reported is None:  # other watches get the level at the end of their snapshot
                    watch.add(Event(EventKind.PRESSURE, pressure=change))
            return 1, True
        if change is STORED:
            return self._report_stored(node, budget)
        if isinstance(change, bytes) or change is BELOW_CLEARED:
            for view in self._views:
                view.changed(change) if isinstance(change, bytes) else view.cleared()
            return 1 + len(self._views), True
        root = self._roots[node]  # known for a node that was reported to a watch
        views = [view for view in self._views if root and view.root == root and view.readers[0].knows(node)]
        if change is REMOVED:
            if self._named[node]:
                self._above.pop(self._name(node), None)
            for view in views:
                view.left_above(self._name(node))
                if view.readers[0].reported is not None:
                    view.readers[0].reported[node] = 0
            self._named[node] = 0
            self._roots[node] = 0
            return 1 + len(views), True
        assert isinstance(change, Tier)
        watches = [watch for view in views for watch in view.readers]
        for watch in watches:
            watch.report(EventKind.TIER_CHANGED, self._name(node), tier=change)
        return 1 + len(watches), True

    def _report_stored(self, node: int, budget: int) -> tuple[int, bool]:
        cost, root = 1, self._root(node)
        views = [view for view in self._views if view.root == root]
        watches = [watch for view in views for watch in view.readers]
        for watch in watches:
            above = self._unreported(watch, node)[1:]
            cost += self._report_all(watch, above[-budget:], EventKind.SNAPSHOT)
            if len(above) > budget:
                return cost, False  # before the node itself is reported to any watch
        for view in views:
            was_reported = view.came_above(self._make_name(node))
            for watch in view.readers:
                cost += 1 if was_reported else self._report_all(watch, [node], EventKind.STORED)
                if was_reported:
                    watch.report(EventKind.TIER_CHANGED, self._name(node), tier=Tier.DEVICE)
                    if watch.reported is not None:
                        watch.reported[node] = 1
            if not was_reported:
                view.want_behind(self._name(node))
        return cost, True

    def _report_snapshot(self, watch: Watch, budget: int) -> int:
        """Continues a snapshot. Called only when the change log is read to its end, because node numbers are used again."""
        assert watch.reported is not None
        view = self._view_of[watch]
        if watch.next_node == self._num_nodes:
            return self._report_below(watch, view, budget)
        cost, start, stop = 0, watch.next_node, min(watch.next_node + budget * _LOOKS_PER_NAME, self._num_nodes)
        for node in range(start, stop):
            watch.next_node = node
            if cost >= budget:
                break
            if self._index.key(node) is not None and not watch.reported[node] and self._root(node) == view.root:
                path = self._unreported(watch, node)
                cost += self._report_all(watch, path[cost - budget :], EventKind.SNAPSHOT)
                if not watch.reported[node]:
                    break  # its ancestors were too many for one slice
        else:
            watch.next_node = stop
            if stop == self._num_nodes:
                view.want_behind(view.root_name)
        return cost + 1 + (watch.next_node - start) // _LOOKS_PER_NAME

    def _report_below(self, watch: Watch, view: LowerTierView, budget: int) -> int:
        """The last part of a snapshot: what the tiers below the host tier alone have."""
        cost = 1
        while view.has_work:
            if cost > budget or not watch.wants_snapshot:
                return cost
            view.look(EventKind.SNAPSHOT)
            cost += 1
        shared = next(
            (each for each in self._views if each.root_name == view.root_name and each.readers[0].reported is None), None
        )
        watch.reported = None
        watch.add(Event(EventKind.SNAPSHOT_END, pressure=self._pressure))
        if shared is not None:
            self._views.remove(view)
            shared.readers.append(watch)
            self._view_of[watch] = shared
        return cost

    def _report_all(self, watch: Watch, path: list[int], kind: EventKind) -> int:
        """Reports these nodes, from the last to the first; each node is the parent of the one before it."""
        reported, view = watch.reported, self._view_of[watch]
        for node in reversed(path):
            name, key = self._make_name(node), self._key(node)
            if reported is not None:
                reported[node] = 1
            tier = None
            if kind is EventKind.SNAPSHOT:
                tier = Tier.DEVICE if self._index.block_of_node[node] else Tier.HOST
                view.want_behind(name)
            watch.report(kind, name, tier, self._name(*_parent_of(key)), key[4:])
        return len(path)

    def _make_name(self, node: int) -> bytes:
        """The name of a node whose parent has one."""
        if self._named[node]:
            return self._name(node)
        key = self._key(node)
        (parent,) = _parent_of(key)
        assert parent < 0 or self._named[parent], "a parent is reported before its children"
        name, start = block_name(self._name(parent), key[4:]), node * BLOCK_NAME_BYTES
        self._names[start : start + BLOCK_NAME_BYTES] = name
        self._named[node] = 1
        if self._below.tiers:
            self._above[name] = self._roots[node]
        return name

    def _unreported(self, watch: Watch, node: int) -> list[int]:
        """The node and those of its ancestors that were not reported to the watch."""
        path = [node]
        while watch.reported is not None:
            (node,) = _parent_of(self._key(node))
            if node < 0 or watch.reported[node]:
                break
            path.append(node)
        return path

    def _root(self, node: int) -> int:
        """The root above a node, noted for every node on the way to it."""
        path = []
        while node > 0 and not self._roots[node]:
            path.append(node)
            (node,) = _parent_of(self._key(node))
        root = node if node < 0 else self._roots[node]
        for below in path:
            self._roots[below] = root
        return root

    def _key(self, node: int) -> bytes:
        """The key of a node at the oldest unread change."""
        key = self._change_log.removed_key(node) or self._index.key(node)
        assert key is not None, "a node number that is not in use"
        return key

    def _name(self, node: int) -> bytes:
        """The name of a root, or of a node named before."""
        if node < 0:
            return self._root_names[node]
        return bytes(self._names[node * BLOCK_NAME_BYTES : (node + 1) * BLOCK_NAME_BYTES])
