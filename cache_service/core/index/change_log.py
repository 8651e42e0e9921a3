"""The changes of a watched pool, written by the core and read later, off the path of a step.

Owns the unread changes, in order. Rules: writing a change costs a step next to nothing, and hashes nothing; the key of a
removed node is kept, so that a reader far behind still knows what each number stood for; the log is bounded, and says when it
overflowed. A pool without watches has no change log.
"""

from collections.abc import Callable

from ..values.types import Int32Array, PressureLevel, Tier

STORED = "stored"
REMOVED = "removed"
BELOW_CLEARED = "below cleared"
# STORED, REMOVED, or the tier of a node's bytes; else the node is 0: the pool's level, the name of a block that a tier below
# the host tier gained or lost, or BELOW_CLEARED
Change = str | bytes | Tier | PressureLevel


class ChangeLog:
    """Changes from the oldest unread one on. wake is called when the log gets its first unread change."""

    def __init__(self, max_unread: int, wake: Callable[[], None]) -> None:
        self.has_overflowed = False
        self._max_unread = max_unread
        self._wake = wake
        self._nodes: list[int] = []
        self._changes: list[Change] = []
        self._num_read = 0
        self._removed_keys: dict[int, bytes | list[bytes]] = {}  # of unread removals, by node; a list is oldest first

    def __len__(self) -> int:
        """Unread changes."""
        return len(self._nodes) - self._num_read

    def stored(self, nodes: Int32Array) -> None:
        """These nodes were added to the index, each after its parent or in the same call."""
        self._write(nodes.tolist(), STORED)

    def removed(self, node: int, key: bytes) -> None:
        """This node of this key left the index: its bytes are neither on the device nor in the host tier."""
        keys = self._removed_keys.get(node)
        if keys is None:
            self._removed_keys[node] = key
        else:  # the number was used again, and the earlier removal is unread too
            self._removed_keys[node] = [*([keys] if isinstance(keys, bytes) else keys), key]
        self._write([node], REMOVED)

    def tier_changed(self, nodes: Int32Array, tier: Tier) -> None:
        """The bytes of these nodes are now in this tier: HOST where only the host has them, else DEVICE."""
        self._write(nodes.tolist(), tier)

    def below_changed(self, name: bytes) -> None:
        """A tier below the host tier gained or lost the block of this name."""
        self._write([0], name)

    def below_cleared(self) -> None:
        """A tier below the host tier lost all that it had."""
        self._write([0], BELOW_CLEARED)

    def pressure_changed(self, level: PressureLevel) -> None:
        """The pool's level changed."""
        self._write([0], level)

    def peek(self) -> tuple[int, Change]:
        """The oldest unread change."""
        return self._nodes[self._num_read], self._changes[self._num_read]

    def advance(self) -> None:
        """The oldest unread change has been read."""
        node, change = self.peek()
        if change is REMOVED:
            keys = self._removed_keys[node]
            if isinstance(keys, bytes) or len(keys) == 1:
                del self._removed_keys[node]
            else:
                del keys[0]
        self._num_read += 1
        if self._num_read >= max(len(self._nodes) // 2, 1):  # so that read changes cost no memory, and little time
            del self._nodes[: self._num_read], self._changes[: self._num_read]
            self._num_read = 0

    def removed_key(self, node: int) -> bytes | None:
        """The key that a node had at the oldest unread change, if it was removed since; else the index has its key."""
        keys = self._removed_keys.get(node)
        return keys[0] if isinstance(keys, list) else keys

    def _write(self, nodes: list[int], change: Change) -> None:
        if len(self) + len(nodes) > self._max_unread:
            self.has_overflowed = True
        if self.has_overflowed:
            return
        if not len(self):
            self._wake()
        self._nodes += nodes
        self._changes += [change] * len(nodes)
