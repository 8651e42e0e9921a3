"""ToldTable: what a store that others share was last heard to have.

Owns no truth: the store forgets by itself, and others put blocks there. A name is here because the store said that it has it,
or took it; what is found here may be gone by the time that it is read, and is then forgotten here. The table is bounded, and
forgets what it heard of longest ago. The TierBlocks that are handed in have what it has.
"""

from collections.abc import Iterable, Sequence

from ...index.below_blocks import TierBlocks
from ...values.copies import Content, TierOrder

_MOST_NAMES = 1 << 16


class ToldTable:
    """Names of a shared store. Its slots have no number: they are 0."""

    num_slots = last_number = 0

    def __init__(self, blocks: TierBlocks) -> None:
        """blocks: of this tier, empty."""
        self._blocks = blocks
        self._names: dict[bytes, bytes] = {}  # heard of longest ago first; each with the name that clients see, if any
        self._storing: set[bytes] = set()

    @property
    def may_have_some(self) -> bool:
        """Whether a prompt is worth looking up: others may have stored it."""
        return True

    def find(self, name: bytes) -> int | None:
        """0 where the store was heard to have it."""
        return 0 if name in self._names else None

    def knows(self, name: bytes) -> bool:
        return name in self._names or name in self._storing

    def names(self) -> set[bytes]:
        return set(self._names)

    def learn(self, contents: Iterable[Content], lost: Iterable[bytes] = ()) -> None:
        """The store has these now, and not the lost names, or none that leads to them."""
        for name in lost:
            self._forget(name)
        for name, block_name, parent, tokens in contents:
            self._names[name] = self._names.pop(name, b"") or block_name
            self._blocks.gain(block_name, parent, tokens)
        while len(self._names) > _MOST_NAMES:
            self._forget(next(iter(self._names)))

    def use(self, name: bytes) -> bool:
        return self.knows(name)

    def begin_store(self, name: bytes) -> int | None:
        self._storing.add(name)
        return 0

    def end_store(self, order: TierOrder, *, is_stored: bool) -> None:
        self._storing.discard(order.name)
        if is_stored:
            self.learn([Content(order.name, order.block_name, order.parent_block_name, order.tokens)])

    def begin_read(self, order: TierOrder) -> None:
        """A store of others keeps or forgets what it likes."""

    def end_read(self, order: TierOrder, *, is_lost: bool) -> None:
        if is_lost:
            self._forget(order.name)

    def clear(self) -> None:
        self._names.clear()
        self._blocks.clear()

    def stats(self) -> dict[str, int]:
        """What the store has is not known here."""
        return {}

    def check(self, reads: Sequence[TierOrder], stores: Sequence[TierOrder]) -> list[str]:
        """The broken invariants, one sentence each, beside the orders in flight."""
        if self._storing - {each.name for each in stores}:
            return ["a block is being stored by no order"]
        told = set(self._names.values()) - {b""}
        if len(told) != len(self._blocks) or any(name not in self._blocks for name in told):
            return ["other blocks are told of than the store was heard to have"]
        return ["the table has outgrown its bound"] if len(self._names) > _MOST_NAMES else []

    def _forget(self, name: bytes) -> None:
        block_name = self._names.pop(name, b"")
        if block_name:
            self._blocks.lose(block_name)
