"""One watch: what its reader has not read, and how far its snapshot has come.

Rules: what waits for a reader is bounded, in names and in events; a watch whose reader leaves more unread is lagging, and ends.
Knows no index.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...values.types import EventKind, PressureLevel, Tier

MAX_NAMES = 512  # of an event
MAX_WAITING_NAMES = 65_536  # reported to a watch and unread
MAX_WAITING_TOKENS = 1 << 20  # of a watch that wants token ids, beside the names
_MAX_TOKENS = 1 << 16  # of an event
MAX_WAITING_EVENTS = 4_096
_SNAPSHOT_AHEAD = 8 * MAX_NAMES  # names that a snapshot keeps ready for its reader


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
    """The progress of one reader. `reported` has a byte per node during the snapshot; afterwards every node is reported."""

    def __init__(self, scope: str, num_nodes: int, num_tokens_each: int = 0) -> None:
        """num_tokens_each: of a block, for a reader that wants token ids; 0 for one that does not."""
        self.scope = scope
        self.wants_tokens = num_tokens_each > 0
        self.reported: memoryview[int] | None = zeros(num_nodes, np.uint8)
        self.next_node = 1  # of the snapshot; what lies below alone comes behind the last
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
        return self.reported is not None and self._num_names < self._snapshot_ahead and not self.is_lagging

    def knows(self, node: int) -> bool:
        return self.reported is None or self.reported[node] == 1

    def add(self, event: Event) -> None:
        self._events.append(event)
        self._check_room()

    def report(self, kind: EventKind, name: bytes, tier: Tier | None = None, parent: bytes = b"", tokens: bytes = b"") -> None:
        """Consecutive blocks of one kind and tier share an event. parent and tokens: of a block that is new to the reader."""
        last = self._events[-1] if self._events else None
        if last is None or last.kind is not kind or last.tier is not tier or len(last.names) >= self._names_each:
            last = Event(kind, tier=tier)
            self._events.append(last)
        last.names.append(name)
        if parent:
            last.parents.append(parent)
            if self.wants_tokens:
                last.tokens.append(tokens)
        self._num_names += 1
        self._check_room()

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


def zeros(count: int, dtype: type[np.generic]) -> "memoryview[Any]":
    """Numbers to be read and written one at a time, where numpy is slow; only numbers that were set take memory."""
    return np.zeros(count, dtype).data
