"""UnreadTokens: plain tokens of many requests, from a step's draws until readers ask for them; columns by slot.

Most tokens are plain: they neither end their continuation nor bring more than their text. A step adds those of all its requests
by array work, so that a token costs the loop no call and no object. A slot is a request's from its arrival until no row has it.

What is unread is asked for slot by slot, or by a reader that many slots have: all of theirs at once, again by array work. Pure.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..values.request import NO_SLOT
from .plain_columns import NO_COLUMNS, PlainColumns

_FEWEST_SLOTS = 16
_NO_READER = 0
_WIDTH = 128  # unread tokens of a slot; then a chunk is made of them, so that what a client does not read is counted

Slots = npt.NDArray[np.int64]


class Told(Protocol):
    """What is told that there is something to ask for."""

    def tell_more(self) -> None: ...


OwnerT = TypeVar("OwnerT", bound=Told)  # what slots are given to


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
        self._num_added = np.zeros(0, np.int64)  # tokens since its owner counted last
        self._told = np.zeros(0, bool)  # its reader, since it asked last
        self._readers: list[Told | None] = [None]  # by number; none has the first
        self._reader_of = np.zeros(0, np.int64)
        self._numbers = np.zeros(0, np.uint64)  # by which its reader knows it
        self._grow(_FEWEST_SLOTS)
        self._free.remove(NO_SLOT)

    def give(self, owner: OwnerT, ending_ids: Collection[int], last_at: float) -> "UnreadSlot":
        """A slot, closed as yet. ending_ids: tokens that are not plain. last_at: when its last token came, if any did."""
        if not self._free:
            self._grow(len(self.owners))
        slot = self._free.pop()
        self.owners[slot], self._last_at[slot] = owner, last_at
        self._counts[slot] = self._left[slot] = self._num_added[slot] = 0
        self._told[slot], self._reader_of[slot] = False, _NO_READER
        self._ending.update(ending_ids)
        self._sort_ending(ending_ids)
        return UnreadSlot(self, slot, frozenset(ending_ids))

    def take_back(self, slot: "UnreadSlot") -> None:
        """Nothing is drawn for its owner any more."""
        at = slot.at
        self.owners[at], self._left[at], self._reader_of[at] = None, 0, _NO_READER
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
        self._num_added[slots] += 1
        gaps = now - self._last_at[slots]
        self._last_at[slots] = now
        return Added(is_added, gaps, slots[~self._told[slots]])

    def tell(self, slots: Slots) -> list[OwnerT | Told]:
        """Who is to be told that there is something in these slots, once until they ask: readers, else owners."""
        due = slots[(self._counts[slots] > 0) & ~self._told[slots]]
        self._told[due] = True
        reader_of = self._reader_of[due]
        alone = due[reader_of == _NO_READER].tolist()
        told: list[OwnerT | Told] = [owner for slot in alone if (owner := self.owners[slot]) is not None]
        if len(alone) < len(due):
            told += [reader for number in set(reader_of.tolist()) if (reader := self._readers[number]) is not None]
        return told

    def _sort_ending(self, changed: Collection[int]) -> None:
        if changed:
            self._sorted_ending = np.array(sorted(self._ending), np.int64)

    def _grow(self, num_more: int) -> None:
        first = len(self.owners)
        self.owners += [None] * num_more
        self._tokens = np.concatenate((self._tokens, np.zeros((num_more, self._width), np.int32)))
        more = np.zeros(num_more, np.int64)
        columns = (self._counts, self._left, self._num_added, self._reader_of)
        self._counts, self._left, self._num_added, self._reader_of = (np.concatenate((one, more)) for one in columns)
        self._numbers = np.concatenate((self._numbers, more.astype(np.uint64)))
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
        self._num_added[at] += 1
        return True

    def take(self, at: int) -> list[int]:
        self._told[at] = False
        count = self._counts[at]
        self._counts[at] = 0
        return self._tokens[at, :count].tolist()

    def count_of(self, at: int) -> int:
        return int(self._counts[at])

    def num_added(self, at: int) -> int:
        return int(self._num_added[at])

    def take_num_added(self, at: int) -> int:
        count = self.num_added(at)
        self._num_added[at] = 0
        return count

    def tell_one(self, at: int) -> bool:
        is_due = bool(self._counts[at] > 0 and not self._told[at])
        self._told[at] |= is_due
        return is_due

    def last_at(self, at: int) -> float:
        return float(self._last_at[at])

    def note_time(self, at: int, now: float) -> None:
        self._last_at[at] = now

    # -- for a reader of many slots, see PlainReader

    def join(self, at: int, reader: Told, number: int) -> None:
        if reader not in self._readers:
            if None in self._readers[1:]:
                self._readers[self._readers.index(None, 1)] = reader
            else:
                self._readers.append(reader)
        self._reader_of[at], self._numbers[at] = self._readers.index(reader), number

    def leave(self, reader: Told) -> None:
        if reader in self._readers:
            place = self._readers.index(reader)
            self._readers[place] = None
            self._reader_of[self._reader_of == place] = _NO_READER

    def take_of(self, reader: Told) -> PlainColumns:
        if reader not in self._readers:
            return NO_COLUMNS
        slots = np.flatnonzero(self._reader_of == self._readers.index(reader))
        self._told[slots] = False
        slots = slots[self._counts[slots] > 0]
        if not len(slots):
            return NO_COLUMNS
        counts = self._counts[slots]
        self._counts[slots] = 0
        places = np.arange(counts.max())
        return PlainColumns(self._numbers[slots], counts, self._tokens[slots, : len(places)][places < counts[:, None]])


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

    def join(self, reader: Told, number: int) -> UnreadTokens[Any]:
        """Have a reader of many read it, which knows it by the number. Where it reads."""
        self._all.join(self.at, reader, number)
        return self._all

    @property
    def num_unread(self) -> int:
        return self._all.count_of(self.at)

    @property
    def num_added(self) -> int:
        """Tokens that came, read or not, since take_num_added."""
        return self._all.num_added(self.at)

    def take_num_added(self) -> int:
        """The same, which are counted elsewhere from now on."""
        return self._all.take_num_added(self.at)

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
