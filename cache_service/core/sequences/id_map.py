"""Which slot each of a session's sequences has, by the ids that the session chose.

Owns the ids of one session. Knows nothing of what the slots hold.
"""

import numpy as np

from ..values.errors import InvalidField, UnknownSequence
from ..values.types import Int64Array

_NO_ID = 2**63 - 1  # behind the ids, so that a look-up ends there; no id is as large
_FEW = 8  # ids that are found one by one sooner than by the column


class IdMap:
    """Sequence ids of one session to slots, looked up by the column.

    A sorted array and a binary search: 1,024 look-ups cost 25 us where a dictionary costs 70, and a new id, usually the
    largest, is appended. A dictionary beside it, for the few sequences that start, end or fork.
    """

    def __init__(self) -> None:
        self._ids: Int64Array = np.full(16, _NO_ID, np.int64)
        self._slots: Int64Array = np.zeros(16, np.int64)
        self._size = 0
        self._by_id: dict[int, int] = {}
        self._last_key = b""
        self._last_slots: Int64Array = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_id

    def find(self, ids: Int64Array, field: str) -> Int64Array:
        """[n] slots of [n] distinct ids. Raises UnknownSequence with the first that is not there, or InvalidField.

        Steps name the same sequences again and again, so the last answer is kept until one of them may be gone.
        """
        if len(ids) <= _FEW:
            return self._find_few(ids.tolist(), field)
        key = ids.tobytes()
        if key == self._last_key:
            return self._last_slots
        at = self._ids[: self._size + 1].searchsorted(ids)
        counts, there = np.bincount(at), self._ids[at] == ids
        if np.count_nonzero(there) < len(ids) or len(counts) > self._size:
            there &= at < self._size
            unknown = int(ids[int(np.argmin(there))])
            raise UnknownSequence(f"no sequence {unknown} in this session", sequence_id=unknown)
        if int(counts.max()) > 1:
            raise InvalidField(f"{field} names a sequence twice", field=field)
        self._last_key, self._last_slots = key, self._slots[at]
        return self._last_slots

    def _find_few(self, ids: list[int], field: str) -> Int64Array:
        slots = [self._by_id.get(sequence_id, -1) for sequence_id in ids]
        if -1 in slots:
            unknown = ids[slots.index(-1)]
            raise UnknownSequence(f"no sequence {unknown} in this session", sequence_id=unknown)
        if len(set(slots)) < len(slots):
            raise InvalidField(f"{field} names a sequence twice", field=field)
        return np.array(slots, np.int64)

    def get(self, sequence_id: int) -> int | None:
        return self._by_id.get(sequence_id)

    def add(self, sequence_id: int, slot: int) -> None:
        if self._size + 1 == len(self._ids):
            self._ids = np.concatenate([self._ids, np.full_like(self._ids, _NO_ID)])
            self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)])
        at = int(np.searchsorted(self._ids[: self._size], sequence_id))
        self._ids[at + 1 : self._size + 1] = self._ids[at : self._size]
        self._slots[at + 1 : self._size + 1] = self._slots[at : self._size]
        self._ids[at], self._slots[at] = sequence_id, slot
        self._by_id[sequence_id] = slot
        self._size += 1

    def remove(self, sequence_id: int) -> None:
        at = int(np.searchsorted(self._ids[: self._size], sequence_id))
        self._ids[at : self._size - 1] = self._ids[at + 1 : self._size]
        self._slots[at : self._size - 1] = self._slots[at + 1 : self._size]
        self._size -= 1
        self._ids[self._size] = _NO_ID
        del self._by_id[sequence_id]
        self._last_key, self._last_slots = b"", np.zeros(0, np.int64)

    def items(self) -> tuple[Int64Array, Int64Array]:
        """([n] ids ascending, [n] slots)."""
        return self._ids[: self._size].copy(), self._slots[: self._size].copy()

    def first_slots(self, count: int) -> Int64Array:
        """[at most count] slots of the smallest ids."""
        return self._slots[: min(count, self._size)].copy()
