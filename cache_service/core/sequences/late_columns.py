"""Columns of the sequence table that steps leave for later: token ids, and who was accessed how often.

A step notes what it adds; it is written at the next look. A thousand rows are a thousand cache misses, and an engine need not
wait for them. Rule: a look at a row sees all that was noted of it. Does not know what a sequence is.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeeper.common.rows import untouched

from ..values.types import Int32Array, Int64Array

_MOST_NOTED = 256  # steps whose notes may wait
_FEW_NOTED = 2


class TokenRows:
    """The token ids of each slot. A prompt that waits is kept aside: it takes a row, pages of memory, once it starts."""

    def __init__(self, num_tokens: Int32Array, most_tokens: int) -> None:
        """num_tokens [slots]: how many are known of each; a column that the sequence table writes."""
        self._num_tokens = num_tokens
        self._rows: Int32Array = untouched(len(num_tokens), most_tokens)
        self._noted: list[tuple[Int64Array, Int32Array, Int32Array]] = []  # slots, positions, tokens: not written yet
        self._prompts: dict[int, Int32Array] = {}  # of what waits, by slot

    @property
    def all(self) -> Int32Array:
        """[slots, most tokens] token ids; a row holds num_tokens of them, but for a sequence that waits."""
        if self._noted:
            self.settle()
        return self._rows

    def rows(self, slots: Int64Array | int) -> Int32Array:
        """[slots, most tokens] token ids, of which the rows of these sequences, none of which waits, are up to date.

        For a look at a few rows on the path of a step, which need not wait for a thousand others.
        """
        if len(self._noted) <= _FEW_NOTED:  # to write them takes no longer than to look through them
            self.settle()
        else:
            wanted = np.zeros(len(self._rows), np.bool_)
            wanted[slots] = True
            for noted, positions, tokens in self._noted:
                at = wanted[noted].nonzero()[0]
                if len(at):
                    self._rows[noted[at], positions[at]] = tokens[at]
        return self._rows

    def known(self, slot: int) -> Int32Array:
        """[num_tokens] token ids of a sequence in any state; a view."""
        prompt = self._prompts.get(slot)  # no step appends to it
        return self.all[slot, : self._num_tokens[slot]] if prompt is None else prompt

    @property
    def waiting_slots(self) -> frozenset[int]:
        """The slots of the sequences that wait: their prompts are kept aside."""
        return frozenset(self._prompts)

    def wait(self, slot: int, prompt: Int32Array) -> None:
        """A sequence waits with this prompt."""
        self._prompts[slot] = np.array(prompt, np.int32)

    def end_wait(self, slot: int, *, is_kept: bool) -> None:
        """It waits no more. is_kept: its prompt takes a row."""
        prompt = self._prompts.pop(slot)
        if is_kept:
            self._rows[slot, : len(prompt)] = prompt

    def copy(self, source: int, destination: int, num_tokens: int) -> None:
        """A row begins as another one does."""
        self._rows[destination, :num_tokens] = self._rows[source, :num_tokens]

    def append(self, slots: Int64Array, known: Int32Array, num_new: Int32Array, tokens: Int32Array, *, one_each: bool) -> None:
        """Puts num_new[i] of the concatenated tokens behind the known[i] of each of these distinct sequences.

        one_each: every num_new is 1; then they are noted alone.
        """
        if not one_each:
            within = np.arange(len(tokens)) - np.repeat(np.cumsum(num_new) - num_new, num_new)
            self.all[np.repeat(slots, num_new), np.repeat(known, num_new) + within] = tokens
            return
        self._noted.append((slots, known, tokens))
        if len(self._noted) == _MOST_NOTED:
            self.settle()

    def settle(self) -> None:
        """Writes what was noted."""
        for slots, positions, tokens in self._noted:
            self._rows[slots, positions] = tokens
        self._noted.clear()


@dataclass(slots=True)
class _Named:
    """Sequences that so many steps in a row have named, the last one at this time."""

    slots: Int64Array
    num_steps: int
    now: float


class Accesses:
    """How many steps named each sequence, and when a step or a read last did, or made it."""

    def __init__(self, num_slots: int) -> None:
        self._counts: Int64Array = np.zeros(num_slots, np.int64)
        self._last = np.zeros(num_slots, np.float64)
        self._noted: list[_Named] = []  # not counted yet

    @property
    def counts(self) -> Int64Array:
        """[slots]"""
        self.settle()
        return self._counts

    @property
    def last(self) -> npt.NDArray[np.float64]:
        """[slots] seconds."""
        self.settle()
        return self._last

    def note(self, slots: Int64Array, now: float) -> None:
        """A step names these distinct sequences. Steps in a row that name the same ones are one note."""
        last = self._noted[-1] if self._noted else None
        if last is not None and last.slots is slots:
            last.num_steps += 1
            last.now = now
            return
        self._noted.append(_Named(slots, 1, now))
        if len(self._noted) == _MOST_NOTED:
            self.settle()

    def begin(self, slot: int, now: float) -> None:
        """A sequence is made in this slot."""
        self._counts[slot], self._last[slot] = 0, now

    def count_start(self, slot: int, now: float) -> None:
        """It starts: at once, because no step named it while it waited."""
        self._counts[slot] += 1
        self._last[slot] = now

    def settle(self) -> None:
        """Counts what was noted."""
        for noted in self._noted:
            self._counts[noted.slots] += noted.num_steps
            self._last[noted.slots] = noted.now
        self._noted.clear()
