"""ToldTable: what a store that others share was last heard to have.

Owns no truth: the store forgets by itself, and others put blocks there. A name is here because the store said that it has it,
or took it; what is found here may be gone by the time that it is read, and is then forgotten here. The table is bounded, and
forgets what it heard of longest ago.
"""

from collections.abc import Iterable, Sequence

from ...values.copies import TierOrder

_MOST_NAMES = 1 << 16


class ToldTable:
    """Names of a shared store. Its slots have no number: they are 0."""

    num_slots = last_number = 0

    def __init__(self) -> None:
        self._names: dict[bytes, None] = {}  # heard of longest ago first
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

    def learn(self, names: Iterable[bytes], lost: Iterable[bytes] = ()) -> None:
        """The store has these now, and not the lost ones, or none that leads to them."""
        for name in lost:
            self._names.pop(name, None)
        for name in names:
            self._names.pop(name, None)
            self._names[name] = None
        while len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]

    def use(self, name: bytes) -> bool:
        return self.knows(name)

    def begin_store(self, name: bytes) -> int | None:
        self._storing.add(name)
        return 0

    def end_store(self, order: TierOrder, *, is_stored: bool) -> None:
        self._storing.discard(order.name)
        if is_stored:
            self.learn([order.name])

    def begin_read(self, order: TierOrder) -> None:
        """A store of others keeps or forgets what it likes."""

    def end_read(self, order: TierOrder, *, is_lost: bool) -> None:
        if is_lost:
            self._names.pop(order.name, None)

    def clear(self) -> None:
        self._names.clear()

    def stats(self) -> dict[str, int]:
        """What the store has is not known here."""
        return {}

    def check(self, reads: Sequence[TierOrder], stores: Sequence[TierOrder]) -> list[str]:
        """The broken invariants, one sentence each, beside the orders in flight."""
        if self._storing - {each.name for each in stores}:
            return ["a block is being stored by no order"]
        return ["the table has outgrown its bound"] if len(self._names) > _MOST_NAMES else []
