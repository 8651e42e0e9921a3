"""UnreadTokens: plain tokens of many requests, from a step's draws until readers ask for them; columns by slot.

Most tokens are plain: they neither end their continuation nor bring more than their text. A step adds those of all its requests
by array work, so that a token costs the loop no call and no object. A slot is a request's from its arrival until no row has it.
Pure.
"""

from collections import Counter
from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..values.request import NO_SLOT

_FEWEST_SLOTS = 16
_WIDTH = 128  # unread tokens of a slot; then a chunk is made of them, so that what a client does not read is counted

Slots = npt.NDArray[np.int64]


OwnerT = TypeVar("OwnerT")  # what slots are given to


class Added(NamedTuple):
    """What one step's draws came to. is_added [S]; gaps: seconds since the token before, of each that was added."""

    is_added: npt.NDArray[np.bool_]
    gaps: npt.NDArray[np.float64]
    untold: Slots  # those whose readers do not know that there is something


class UnreadTokens(Generic[OwnerT]):
    """Slots, and what is unread in them. NO_SLOT takes nothing."""

    def __init__(self, width: int = _WIDTH) -> None:
        """width: tokens that a slot has room for."""
        self._width = width
        self._free: list[int] = []
        self._ending: Counter[int] = Counter()  # tokens that end some slot's continuation, by how many
        self._sorted_ending = np.empty(0, np.int64)
        self.owners: list[OwnerT | None] = []
        self._tokens = np.zeros((0, width), np.int32)
        self._counts = np.zeros(0, np.int64)
        self._left = np.zeros(0, np.int64)  # tokens that may follow as plain ones
        self._last_at = np.zeros(0)  # when the last token came
        self._told = np.zeros(0, bool)  # its reader, since it asked last
        self._grow(_FEWEST_SLOTS)
        self._free.remove(NO_SLOT)

    def give(self, owner: OwnerT, ending_ids: Collection[int], last_at: float) -> "UnreadSlot":
        """A slot, closed as yet. ending_ids: tokens that are not plain. last_at: when its last token came, if any did."""
        if not self._free:
            self._grow(len(self.owners))
        slot = self._free.pop()
        self.owners[slot], self._last_at[slot] = owner, last_at
        self._counts[slot] = self._left[slot] = 0
        self._told[slot] = False
        self._ending.update(ending_ids)
        self._sort_ending(ending_ids)
        return UnreadSlot(self, slot, frozenset(ending_ids))

    def take_back(self, slot: "UnreadSlot") -> None:
        """Nobody draws for its owner any more."""
        at = slot.at
        self.owners[at], self._left[at] = None, 0
        self._ending.subtract(slot.ending_ids)
        for token_id in slot.ending_ids:
            if not self._ending[token_id]:
                del self._ending[token_id]
        self._sort_ending(slot.ending_ids)
        self._free.append(at)

    def add(self, slots: Slots, token_ids: npt.NDArray[np.integer], now: float) -> Added:
        """The next tokens [S] of slots [S], each there once but NO_SLOT. Those that are not plain are left to the caller."""
        counts = self._counts[slots]
        is_added = (self._left[slots] > 0) & (counts < self._width)
        if len(ending := self._sorted_ending):
            found = ending[np.minimum(np.searchsorted(ending, token_ids), len(ending) - 1)]
            is_added &= found != token_ids
        if not is_added.all():
            slots, token_ids, counts = slots[is_added], token_ids[is_added], counts[is_added]
        self._tokens[slots, counts] = token_ids
        self._counts[slots] = counts + 1
        self._left[slots] -= 1
        gaps = now - self._last_at[slots]
        self._last_at[slots] = now
        return Added(is_added, gaps, slots[~self._told[slots]])

    def tell(self, slots: Slots) -> list[OwnerT]:
        """The owners of these slots whose readers are to be told that there is something: once, until they ask."""
        due = slots[(self._counts[slots] > 0) & ~self._told[slots]]
        self._told[due] = True
        return [owner for slot in due.tolist() if (owner := self.owners[slot]) is not None]

    def _sort_ending(self, changed: Collection[int]) -> None:
        if changed:
            self._sorted_ending = np.array(sorted(self._ending), np.int64)

    def _grow(self, num_more: int) -> None:
        first = len(self.owners)
        self.owners += [None] * num_more
        self._tokens = np.concatenate((self._tokens, np.zeros((num_more, self._width), np.int32)))
        self._counts, self._left = (np.concatenate((one, np.zeros(num_more, np.int64))) for one in (self._counts, self._left))
        self._last_at = np.concatenate((self._last_at, np.zeros(num_more)))
        self._told = np.concatenate((self._told, np.zeros(num_more, bool)))
        self._free += range(first + num_more - 1, first - 1, -1)

    # -- for UnreadSlot

    def open(self, at: int, num_left: int) -> None:
        self._left[at] = num_left

    def put(self, at: int, token_id: int) -> bool:
        if self._left[at] <= 0 or (count := self._counts[at]) >= self._width:
            return False
        self._tokens[at, count] = token_id
        self._counts[at] += 1
        self._left[at] -= 1
        return True

    def take(self, at: int) -> list[int]:
        self._told[at] = False
        count = self._counts[at]
        self._counts[at] = 0
        return self._tokens[at, :count].tolist()

    def count_of(self, at: int) -> int:
        return int(self._counts[at])

    def tell_one(self, at: int) -> bool:
        is_due = bool(self._counts[at] > 0 and not self._told[at])
        self._told[at] |= is_due
        return is_due

    def last_at(self, at: int) -> float:
        return float(self._last_at[at])

    def note_time(self, at: int, now: float) -> None:
        self._last_at[at] = now


class UnreadSlot:
    """One request's slot."""

    __slots__ = ("_all", "at", "ending_ids")

    def __init__(self, all_slots: UnreadTokens[OwnerT], at: int, ending_ids: frozenset[int]) -> None:
        self._all, self.at, self.ending_ids = all_slots, at, ending_ids

    def open(self, num_left: int) -> None:
        """So many tokens may follow as plain ones; 0: none."""
        self._all.open(self.at, num_left)

    def put(self, token_id: int) -> bool:
        """Add one token. False: it is not a plain one, or there is no room."""
        return token_id not in self.ending_ids and self._all.put(self.at, token_id)

    def take(self) -> list[int]:
        """The unread tokens, which are read with that. The reader has asked."""
        return self._all.take(self.at)

    @property
    def num_unread(self) -> int:
        return self._all.count_of(self.at)

    def tell(self) -> bool:
        """Whether the reader is to be told that there is something. It is told once, until it asks."""
        return self._all.tell_one(self.at)

    @property
    def last_at(self) -> float:
        """When the last token came."""
        return self._all.last_at(self.at)

    def note_time(self, now: float) -> None:
        """A token came now."""
        self._all.note_time(self.at, now)
