"""What changes in a pool while somebody watches it, written down by the core and read later, off the path of a step.

Owns the changes that nobody has read yet, in order. Rules: writing one costs a step next to nothing, and nothing is hashed;
a node's key is kept when the node goes, so that a reader far behind still knows what each number stood for; a journal that
nobody reads is bounded, and says that it overflowed. While nobody watches there is no journal.
"""

from collections.abc import Callable

from ..values.types import Int32Array, PressureLevel, Tier

STORED = "stored"
REMOVED = "removed"
Change = str | Tier | PressureLevel  # STORED, REMOVED, where a node's bytes are now, or the pool's level (then the node is 0)


class Journal:
    """Changes from the eldest unread one on. wake is called with the first of a row that nobody has read."""

    def __init__(self, max_unread: int, wake: Callable[[], None]) -> None:
        self.has_overflowed = False
        self._max_unread = max_unread
        self._wake = wake
        self._nodes: list[int] = []
        self._changes: list[Change] = []
        self._num_read = 0
        self._gone_keys: dict[int, bytes | list[bytes]] = {}  # of unread removals, by node; a list is eldest first

    def __len__(self) -> int:
        """Changes that nobody has read."""
        return len(self._nodes) - self._num_read

    def stored(self, nodes: Int32Array) -> None:
        """These nodes came into the index, each behind its parent or in the same go."""
        self._write(nodes.tolist(), STORED)

    def removed(self, node: int, key: bytes) -> None:
        """This node, of this key, is in the index no more, nor are its bytes in any tier."""
        keys = self._gone_keys.get(node)
        if keys is None:
            self._gone_keys[node] = key
        else:  # the number was used again, and that has gone unread too
            self._gone_keys[node] = [*([keys] if isinstance(keys, bytes) else keys), key]
        self._write([node], REMOVED)

    def cleared(self, nodes: dict[bytes, int]) -> None:
        """The whole index was forgotten; nodes has the node of every key."""
        if self._gone_keys:
            for key, node in nodes.items():
                self.removed(node, key)
        else:
            self._gone_keys = {node: key for key, node in nodes.items()}
            self._write(list(nodes.values()), REMOVED)

    def tier_changed(self, nodes: Int32Array, tier: Tier) -> None:
        """The bytes of these nodes are there now: DEVICE where the device has them at all, HOST where only the host has."""
        self._write(nodes.tolist(), tier)

    def pressure_changed(self, level: PressureLevel) -> None:
        """The pool's level is another one."""
        self._write([0], level)

    def peek(self) -> tuple[int, Change]:
        """The eldest unread change."""
        return self._nodes[self._num_read], self._changes[self._num_read]

    def advance(self) -> None:
        """The eldest unread change has been read."""
        node, change = self.peek()
        if change is REMOVED:
            keys = self._gone_keys[node]
            if isinstance(keys, bytes) or len(keys) == 1:
                del self._gone_keys[node]
            else:
                del keys[0]
        self._num_read += 1
        if self._num_read >= max(len(self._nodes) // 2, 1):  # so that what was read costs no memory, and little time
            del self._nodes[: self._num_read], self._changes[: self._num_read]
            self._num_read = 0

    def gone_key(self, node: int) -> bytes | None:
        """The key that a node had at the eldest unread change, if it has gone since; else the index knows it."""
        keys = self._gone_keys.get(node)
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
