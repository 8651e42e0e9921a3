"""The events of the watches of one pool: first all blocks that are cached for the tenant, then every change.

Owns the names of blocks, and the progress of each watch. A name is a chained SHA-256, so that independent programs can compare
names; it takes about a microsecond, so names are made here, a slice at a time, and never by a step. Rules, for each watch: a
block is told once, as part of the snapshot or as stored, after its parent; its removal comes after that or not at all; a reader
that applies snapshot and events in order has the contents of the index. The rules hold because a slice looks at the index only
when the change log is read to its end, and because a change is told exactly if the watch was told of that very node. A watch
whose reader does not keep up ends; a snapshot waits for its reader, changes do not.
"""

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from ..values.types import EventKind, PressureLevel, Tier
from .change_log import REMOVED, STORED, Change, ChangeLog
from .prefix_index import NO_NODE, PrefixIndex

MAX_NAMES = 512  # of an event
MAX_WAITING_NAMES = 65_536  # told to a watch and unread
MAX_WAITING_TOKENS = 1 << 20  # of a watch that wants token ids, beside the names
_MAX_TOKENS = 1 << 16  # of an event
MAX_WAITING_EVENTS = 4_096
_SNAPSHOT_AHEAD = 8 * MAX_NAMES  # names that a snapshot keeps ready for its reader
_LOOKS_PER_NAME = 8  # looks at unused node numbers that cost as much as telling of one block
_NAME_BYTES = 32
_parent_of = struct.Struct("<i").unpack_from


@dataclass(slots=True)
class Event:
    """One message of a watch, without its revision. parents are given only for blocks that are new to the reader.

    tokens: LE32 of each of these blocks, for a watch that wants them.
    """

    kind: EventKind
    names: list[bytes] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    tier: Tier | None = None
    pressure: PressureLevel | None = None
    replaced_model_id: str = ""


class Watch:
    """The progress of one reader. `told` has a byte per node while the snapshot lasts; afterwards every node has been told."""

    def __init__(self, tenant: str, num_nodes: int, num_tokens_each: int = 0) -> None:
        """num_tokens_each: of a block, for a reader that wants token ids; 0 for one that does not."""
        self.tenant = tenant
        self.wants_tokens = num_tokens_each > 0
        self.root = NO_NODE  # until the tenant has one
        self.told: memoryview[int] | None = _zeros(num_nodes, np.uint8)
        self.next_node = 1  # of the snapshot
        self.is_lagging = False
        self._events: deque[Event] = deque()
        self._num_names = 0
        self._names_each, self._snapshot_ahead, self._max_waiting = MAX_NAMES, _SNAPSHOT_AHEAD, MAX_WAITING_NAMES
        if num_tokens_each:
            self._names_each = min(MAX_NAMES, max(_MAX_TOKENS // num_tokens_each, 1))
            self._snapshot_ahead = min(_SNAPSHOT_AHEAD, 8 * self._names_each)
            self._max_waiting = min(MAX_WAITING_NAMES, MAX_WAITING_TOKENS // num_tokens_each)

    @property
    def wants_snapshot(self) -> bool:
        return self.told is not None and self._num_names < self._snapshot_ahead and not self.is_lagging

    def knows(self, node: int) -> bool:
        return self.told is None or self.told[node] == 1

    def add(self, event: Event) -> None:
        self._events.append(event)
        self._check_room()

    def add_block(self, kind: EventKind, name: bytes, tier: Tier | None = None) -> Event:
        """Consecutive blocks of one kind and tier share an event. Answers that event."""
        last = self._events[-1] if self._events else None
        if last is None or last.kind is not kind or last.tier is not tier or len(last.names) >= self._names_each:
            last = Event(kind, tier=tier)
            self._events.append(last)
        last.names.append(name)
        self._num_names += 1
        self._check_room()
        return last

    def take_event(self) -> Event | None:
        """The next event for the reader."""
        if not self._events:
            return None
        event = self._events.popleft()
        self._num_names -= len(event.names)
        return event

    def _check_room(self) -> None:
        if self._num_names > self._max_waiting or len(self._events) > MAX_WAITING_EVENTS:
            self.is_lagging = True
            self._events.clear()


class EventFeed:
    """The watches of a pool. Made with the first, closed with the last; `wake` is called when `advance` has work to do."""

    def __init__(
        self, index: PrefixIndex, spec_key: bytes, pressure: PressureLevel, wake: Callable[[], None], max_unread: int = 0
    ) -> None:
        self.watches: list[Watch] = []
        self._index = index
        self._spec_key = spec_key
        self._pressure = pressure
        self._num_nodes = len(index.block_of_node)
        self._change_log = index.change_log = ChangeLog(max_unread or 2 * self._num_nodes + 65_536, wake)
        self._names = _zeros(self._num_nodes * _NAME_BYTES, np.uint8)
        self._named = _zeros(self._num_nodes, np.uint8)
        self._roots = _zeros(self._num_nodes, np.int32)  # of the nodes looked at so far, else 0
        self._root_names: dict[int, bytes] = {}

    def open(self, tenant: str, *, wants_tokens: bool = False) -> Watch:
        """A watch that starts with a snapshot. wants_tokens: of the blocks that are new to its reader."""
        watch = Watch(tenant, self._num_nodes, self._index.block_size if wants_tokens else 0)
        self.watches.append(watch)
        return watch

    def tell_all(self, event: Event) -> None:
        """Tells every watch at once, also within its snapshot, of an event that is not about this pool's blocks."""
        for watch in self.watches:
            if not watch.is_lagging:
                watch.add(event)

    def close(self, watch: Watch) -> None:
        """Ends a watch; the change log ends with the last one."""
        self.watches.remove(watch)
        if not self.watches:
            self._index.change_log = None

    def advance(self, budget: int) -> bool:
        """Tells the watches of about `budget` blocks. Answers whether more blocks can be told now."""
        if not self.watches:
            return False
        if self._change_log.has_overflowed:
            for watch in self.watches:
                watch.is_lagging = True
            return False
        for watch in self.watches:
            if not watch.root:
                watch.root = self._index.find_root(watch.tenant)
                self._root_names[watch.root] = sha256(self._spec_key + b"\0" + watch.tenant.encode()).digest()
        while budget > 0 and len(self._change_log):
            node, change = self._change_log.peek()
            cost, is_done = self._tell_change(node, change, budget)
            budget -= cost
            if is_done:
                self._change_log.advance()
        for watch in self.watches:
            while budget > 0 and watch.wants_snapshot:
                budget -= self._tell_snapshot(watch, budget)
        return len(self._change_log) > 0 or any(watch.wants_snapshot for watch in self.watches)

    def _tell_change(self, node: int, change: Change, budget: int) -> tuple[int, bool]:
        """(cost, whether the change has been told whole: its ancestors may have to be told first)."""
        if isinstance(change, PressureLevel):
            self._pressure = change
            for watch in self.watches:
                if watch.told is None:  # other watches are told the level at the end of their snapshot
                    watch.add(Event(EventKind.PRESSURE, pressure=change))
            return 1, True
        if change is STORED:
            return self._tell_stored(node, budget)
        root = self._roots[node]  # known for a node that a watch was told of
        watches = [watch for watch in self.watches if watch.root == root and watch.knows(node)]
        for watch in watches:
            if change is REMOVED:
                watch.add_block(EventKind.REMOVED, self._name(node))
                if watch.told is not None:
                    watch.told[node] = 0
            else:
                assert isinstance(change, Tier)
                watch.add_block(EventKind.TIER_CHANGED, self._name(node), tier=change)
        if change is REMOVED:
            self._named[node] = 0
            self._roots[node] = 0
        return 1 + len(watches), True

    def _tell_stored(self, node: int, budget: int) -> tuple[int, bool]:
        cost, root = 1, self._root(node)
        watches = [watch for watch in self.watches if watch.root == root]
        for watch in watches:
            above = self._untold(watch, node)[1:]
            cost += self._tell_all(watch, above[-budget:], EventKind.SNAPSHOT)
            if len(above) > budget:
                return cost, False  # before any watch is told of the node itself
        for watch in watches:
            cost += self._tell_all(watch, [node], EventKind.STORED)
        return cost, True

    def _tell_snapshot(self, watch: Watch, budget: int) -> int:
        """Goes on with a snapshot. Called only when the change log is read to its end, because node numbers are used again."""
        assert watch.told is not None
        cost, start, stop = 0, watch.next_node, min(watch.next_node + budget * _LOOKS_PER_NAME, self._num_nodes)
        for node in range(start, stop):
            watch.next_node = node
            if cost >= budget:
                break
            if self._index.key(node) is not None and not watch.told[node] and self._root(node) == watch.root:
                path = self._untold(watch, node)
                cost += self._tell_all(watch, path[cost - budget :], EventKind.SNAPSHOT)
                if not watch.told[node]:
                    break  # its ancestors were too many for one slice
        else:
            watch.next_node = stop
            if stop == self._num_nodes:
                watch.told = None
                watch.add(Event(EventKind.SNAPSHOT_END, pressure=self._pressure))
        return cost + 1 + (watch.next_node - start) // _LOOKS_PER_NAME

    def _tell_all(self, watch: Watch, path: list[int], kind: EventKind) -> int:
        """Tells of these nodes, from the last to the first; each node is the parent of the one before it."""
        names, named, told = self._names, self._named, watch.told
        for node in reversed(path):
            key = self._key(node)
            (parent,) = _parent_of(key)
            assert parent < 0 or named[parent], "a parent is told before its children"
            parent_name, start = self._name(parent), node * _NAME_BYTES
            if named[node]:
                name = self._name(node)
            else:
                name = sha256(parent_name + key[4:]).digest()
                names[start : start + _NAME_BYTES] = name
                named[node] = 1
            if told is not None:
                told[node] = 1
            tier = None
            if kind is EventKind.SNAPSHOT:
                tier = Tier.DEVICE if self._index.block_of_node[node] else Tier.HOST
            event = watch.add_block(kind, name, tier)
            event.parents.append(parent_name)
            if watch.wants_tokens:
                event.tokens.append(key[4:])
        return len(path)

    def _untold(self, watch: Watch, node: int) -> list[int]:
        """The node and those of its ancestors that the watch has not been told of."""
        path = [node]
        while watch.told is not None:
            (node,) = _parent_of(self._key(node))
            if node < 0 or watch.told[node]:
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
        return bytes(self._names[node * _NAME_BYTES : (node + 1) * _NAME_BYTES])


def _zeros(count: int, dtype: type[np.generic]) -> "memoryview[Any]":
    """Numbers to be read and written one at a time, where numpy is slow; only numbers that were set take memory."""
    return np.zeros(count, dtype).data
