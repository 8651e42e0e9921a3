"""UnreadTokens: tokens of many requests, from a step's draws until they are sent to the clients' fronts; columns by slot.

Most tokens neither end their continuation nor bring more than themselves. A step adds those of all its requests by array work,
so that a token costs the loop no call and no object. A slot is a request's from its arrival until no row has it. A reader, one
for each front, takes the tokens of all slots that it reads at once, again by array work. SlotDraws says how the next tokens of
the requests in slots are drawn, by column as well. Pure.
"""

from collections import Counter
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..values.output_chunk import NO_TOKEN_COLUMNS, TokenColumns
from ..values.request import NO_SLOT
from ..values.sampling_params import (
    LIKELIEST,
    NOTHING_AWAITED,
    PenalisedRows,
    PlainDraws,
    SampledRows,
    SamplingParams,
    draw_params,
    get_penalties,
)

_FEWEST_SLOTS = 16
_NO_READER = 0
_WIDTH = 128  # unread tokens of a slot; then a chunk is made of them

Slots = npt.NDArray[np.int64]


class Reader(Protocol):
    """Takes the tokens of many slots."""

    def notify(self) -> None:
        """There is something to take."""


class Added(NamedTuple):
    """What one step's draws came to. is_added [S]; gaps: seconds since the token before, of each that was added."""

    is_added: npt.NDArray[np.bool_]
    gaps: npt.NDArray[np.float64]


class UnreadTokens:
    """Slots, and what is unread in them, in columns that UnreadSlot looks into as well. NO_SLOT takes nothing."""

    def __init__(self, width: int = _WIDTH) -> None:
        """width: tokens that a slot has room for."""
        self.width = width
        self._free: list[int] = []
        self._ending: Counter[int] = Counter()  # tokens that end some slot's continuation, by how many
        self._sorted_ending = np.empty(0, np.int64)
        self.tokens = np.zeros((0, width), np.int32)
        self.counts = np.zeros(0, np.int64)
        self.left = np.zeros(0, np.int64)  # tokens that may follow here
        self.last_at = np.zeros(0)  # when the last token came
        self.added = np.zeros(0, np.int64)  # tokens since its owner counted last
        self._readers: list[Reader | None] = [None]  # by number; none has the first
        self.reader_of = np.zeros(0, np.int64)
        self.numbers = np.zeros(0, np.uint64)  # by which its reader knows it
        self.with_more: set[int] = set()  # readers that do not know of it
        self._grow(_FEWEST_SLOTS)
        self._free.remove(NO_SLOT)

    def give(self, ending_ids: Collection[int], last_at: float) -> "UnreadSlot":
        """A slot, closed as yet. ending_ids: tokens that are not for it. last_at: when its last token came, if any did."""
        if not self._free:
            self._grow(len(self.counts))
        slot = self._free.pop()
        self.last_at[slot] = last_at
        self.counts[slot] = self.left[slot] = self.added[slot] = 0
        self.reader_of[slot] = _NO_READER
        self._ending.update(ending_ids)
        self._sort_ending(ending_ids)
        return UnreadSlot(self, slot, frozenset(ending_ids))

    def take_back(self, slot: "UnreadSlot") -> None:
        """Nothing is drawn for its owner any more."""
        at = slot.at
        self.left[at], self.reader_of[at] = 0, _NO_READER
        self._ending.subtract(slot.ending_ids)
        for token_id in slot.ending_ids:
            if not self._ending[token_id]:
                del self._ending[token_id]
        self._sort_ending(slot.ending_ids)
        self._free.append(at)

    def add(self, slots: Slots, token_ids: npt.NDArray[np.integer], now: float) -> Added:
        """The next tokens [S] of slots [S], each there once but NO_SLOT. Those that are for no slot are left to the caller."""
        counts = self.counts[slots]
        is_added = (self.left[slots] > 0) & (counts < self.width)
        if len(ending := self._sorted_ending):
            found = ending[np.minimum(np.searchsorted(ending, token_ids), len(ending) - 1)]
            is_added &= found != token_ids
        if np.count_nonzero(is_added) < len(slots):
            slots, token_ids, counts = slots[is_added], token_ids[is_added], counts[is_added]
        self.tokens[slots, counts] = token_ids
        self.counts[slots] = counts + 1
        self.left[slots] -= 1
        self.added[slots] += 1
        gaps = now - self.last_at[slots]
        self.last_at[slots] = now
        self.with_more.update(self.reader_of[slots].tolist())
        return Added(is_added, gaps)

    def notify_readers(self) -> None:
        """Let those know that have something to take since the last call."""
        for number in self.with_more:
            if (reader := self._readers[number]) is not None:
                reader.notify()
        self.with_more.clear()

    def take_columns(self, reader: Reader) -> TokenColumns:
        """The unread tokens of all slots of a reader, which are read with that."""
        if reader not in self._readers:
            return NO_TOKEN_COLUMNS
        slots = np.flatnonzero((self.reader_of == self._readers.index(reader)) & (self.counts > 0))
        if not len(slots):
            return NO_TOKEN_COLUMNS
        counts = self.counts[slots]
        self.counts[slots] = 0
        places = np.arange(counts.max())
        return TokenColumns(self.numbers[slots], counts, self.tokens[slots, : len(places)][places < counts[:, None]])

    def drop_reader(self, reader: Reader) -> None:
        """It takes nothing more."""
        if reader in self._readers:
            place = self._readers.index(reader)
            self._readers[place] = None
            self.reader_of[self.reader_of == place] = _NO_READER
            self.with_more.discard(place)

    def _sort_ending(self, changed: Collection[int]) -> None:
        if changed:
            self._sorted_ending = np.array(sorted(self._ending), np.int64)

    def _grow(self, num_more: int) -> None:
        first = len(self.counts)
        self.tokens = np.concatenate((self.tokens, np.zeros((num_more, self.width), np.int32)))
        more = np.zeros(num_more, np.int64)
        columns = (self.counts, self.left, self.added, self.reader_of)
        self.counts, self.left, self.added, self.reader_of = (np.concatenate((one, more)) for one in columns)
        self.numbers = np.concatenate((self.numbers, more.astype(np.uint64)))
        self.last_at = np.concatenate((self.last_at, np.zeros(num_more)))
        self._free += range(first + num_more - 1, first - 1, -1)

    def get_number(self, reader: Reader) -> int:
        """The number of a reader, which it gets with its first slot."""
        if reader not in self._readers:
            if None in self._readers[1:]:
                self._readers[self._readers.index(None, 1)] = reader
            else:
                self._readers.append(reader)
        return self._readers.index(reader)


class UnreadSlot:
    """One request's slot: its place in the columns of all."""

    __slots__ = ("_all", "at", "ending_ids")

    def __init__(self, all_slots: UnreadTokens, at: int, ending_ids: frozenset[int]) -> None:
        self._all, self.at, self.ending_ids = all_slots, at, ending_ids

    def join(self, reader: Reader, number: int) -> None:
        """Have a reader take its tokens, which knows it by the number."""
        self._all.reader_of[self.at], self._all.numbers[self.at] = self._all.get_number(reader), number

    def open(self, num_left: int) -> None:
        """So many tokens may follow here; 0: none."""
        self._all.left[self.at] = num_left

    def put(self, token_id: int) -> bool:
        """Add one token. False: it is not for the slot, or there is no room."""
        every, at = self._all, self.at
        if token_id in self.ending_ids or every.left[at] <= 0 or (count := every.counts[at]) >= every.width:
            return False
        every.tokens[at, count] = token_id
        every.counts[at] += 1
        every.left[at] -= 1
        every.added[at] += 1
        every.with_more.add(int(every.reader_of[at]))
        return True

    def take(self) -> list[int]:
        """The unread tokens, which are read with that."""
        count, self._all.counts[self.at] = self.num_unread, 0
        return self._all.tokens[self.at, :count].tolist()

    @property
    def num_unread(self) -> int:
        return int(self._all.counts[self.at])

    @property
    def num_added(self) -> int:
        """Tokens that came, read or not, since take_num_added."""
        return int(self._all.added[self.at])

    def take_num_added(self) -> int:
        """The same, which are counted elsewhere from now on."""
        count, self._all.added[self.at] = self.num_added, 0
        return count

    @property
    def last_at(self) -> float:
        """When the last token came."""
        return float(self._all.last_at[self.at])

    def note_time(self, now: float) -> None:
        """A token came now."""
        self._all.last_at[self.at] = now


class _Kind(IntEnum):
    NONE = 0  # its rows are the request's to make
    LIKELIEST = 1
    PLAIN = 2
    PENALISED = 3


class Histories(NamedTuple):
    """The tokens of R rows that draw, see PenalisedRows. awaited [R]: whether the step before draws one more."""

    tokens: npt.NDArray[np.int32]
    which: npt.NDArray[np.intp]
    num_known: npt.NDArray[np.integer]
    num_prompts: npt.NDArray[np.integer]
    awaited: npt.NDArray[np.bool_]
    serials: npt.NDArray[np.int64]


class SlotDraws:
    """The draws by slot. A slot that was never set is NONE."""

    def __init__(self) -> None:
        self._kinds = np.zeros(0, np.int8)
        self._params = np.zeros((5, 0))
        self._penalties = np.zeros((3, 0), np.float32)
        self._seeds = np.zeros(0, np.uint64)

    def set(self, slot: int, params: SamplingParams | None, seed: int) -> None:
        """How the slot's request draws. params: None where more than them matters."""
        while slot >= len(self._kinds):
            self._grow(max(16, len(self._kinds)))
        if params is None:
            self._kinds[slot] = _Kind.NONE
            return
        self._kinds[slot] = _Kind.LIKELIEST if params.is_likeliest else _Kind.PLAIN
        if params.is_penalised:
            self._kinds[slot], self._penalties[:, slot] = _Kind.PENALISED, get_penalties(params)
        self._params[:, slot], self._seeds[slot] = draw_params(params), seed

    def rows(self, slots: npt.NDArray[np.int64], histories: Histories) -> SampledRows | None:
        """The rows of slots [R] that draw behind these tokens; None: some are their requests' to make."""
        kinds = self._kinds[slots]
        if np.count_nonzero(kinds) < len(slots):
            return None
        if np.count_nonzero(kinds == _Kind.LIKELIEST) == len(slots):
            return [LIKELIEST] * len(slots)
        zeros = np.zeros(len(slots), np.uint64)  # one continuation each
        positions = (histories.num_known + histories.awaited).astype(np.uint64)
        penalised = self._penalised(slots, np.flatnonzero(kinds == _Kind.PENALISED), histories)
        return PlainDraws(self._params[:, slots], self._seeds[slots], zeros, positions, penalised)

    def _penalised(
        self, slots: npt.NDArray[np.int64], where: npt.NDArray[np.intp], histories: Histories
    ) -> PenalisedRows | None:
        if not len(where):
            return None
        which = histories.which[where]
        return PenalisedRows(
            where=where,
            penalties=self._penalties[:, slots[where]],
            tokens=histories.tokens,
            which=which,
            num_known=histories.num_known[where].astype(np.int64),
            num_prompts=histories.num_prompts[where].astype(np.int64),
            awaited=np.where(histories.awaited[where], which, NOTHING_AWAITED),
            serials=histories.serials[where],
        )

    def _grow(self, num_more: int) -> None:
        self._kinds = np.concatenate((self._kinds, np.zeros(num_more, np.int8)))
        self._params = np.concatenate((self._params, np.zeros((5, num_more))), axis=1)
        self._penalties = np.concatenate((self._penalties, np.zeros((3, num_more), np.float32)), axis=1)
        self._seeds = np.concatenate((self._seeds, np.zeros(num_more, np.uint64)))
