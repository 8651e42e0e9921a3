"""The running sequences as columns: one row each, so that a step over all of them is array work.

Owns: counters, tokens and block tables of the sequences that hold blocks. Rows are reused; `order` lists the rows in
use by priority, then arrival, which is the order of reservations and, from its end, of preemption. Pure.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvkeeper.common.rows import untouched

from ..values.request import Int32Array, Sequence

T = TypeVar("T", bound=np.integer)
IndexArray = npt.NDArray[np.intp]
Int64Array = npt.NDArray[np.int64]

NO_ROWS: IndexArray = np.empty(0, np.intp)
NO_IDS: Int64Array = np.empty(0, np.int64)
NO_ROWS.flags.writeable = NO_IDS.flags.writeable = False


class RunningSequences:
    """Rows of sequences. Every array is indexed by row."""

    def __init__(self, num_rows: int, max_len: int, block_size: int, num_groups: int = 1) -> None:
        self.num_rows = num_rows
        self.block_size = block_size
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.by_id: dict[int, int] = {}
        self.sequence_ids = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.num_committed = np.zeros(num_rows, np.int32)  # as reported to the cache service
        self.num_known = np.zeros(num_rows, np.int32)  # tokens of which it knows the ids
        self.num_reserved = np.zeros(num_rows, np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.num_left = np.zeros(num_rows, np.int32)  # output tokens that it may still get
        # What the device is at, in the step that it computes and in one that runs ahead behind it: tokens that it computes, and
        # tokens that it draws; both are known to come.
        self.num_computing = np.zeros(num_rows, np.int32)
        self.num_drawing = np.zeros(num_rows, np.int32)
        self.serials = np.zeros(num_rows, np.int64)  # distinguish a row from the same row with another sequence
        self.slots = np.zeros(num_rows, np.int64)  # of unread tokens, see Request
        self._num_added = 0
        self.num_sink = np.zeros(num_rows, np.int32)
        self.num_window = np.zeros(num_rows, np.int32)  # 0: the sequence keeps everything
        self.num_retaining = 0  # rows with a window
        self.ended = np.zeros(num_rows, bool)  # or preempted: it computes no more, and leaves with the next step
        self.kept = np.zeros(num_rows, bool)  # ended here, and offered to another session: not released
        self.swapping = np.zeros(num_rows, bool)  # preempted, and to be swapped out then, not released
        self.searches = np.zeros(num_rows, bool)  # lists of beam searches
        self.num_searching = 0  # of them
        self.constrained = np.zeros(num_rows, bool)  # see Request.is_constrained
        self.num_constrained = 0  # of them
        self.clients = np.zeros(num_rows, np.int32)  # a number for each client that has rows
        self._numbers: dict[str, int] = {}
        self._num_rows_of: Counter[str] = Counter()
        self.discarded = np.zeros(num_rows, bool)  # ended: what the device draws for it now counts no more
        self.completing = np.zeros(num_rows, bool)  # ended, and stays until that is computed: its states are behind it
        self._rank = np.zeros((3, num_rows), np.int64)  # least significant key first: index, arrival, -priority
        self.tokens = untouched(num_rows, max_len)
        # Of each group of layers a table, behind that of the group before; null blocks behind each table.
        self.num_groups, self.table_width = num_groups, -(-max_len // block_size)
        self.tables = untouched(num_rows, num_groups * self.table_width)
        self.group_tables = self.tables.reshape(num_rows, num_groups, self.table_width)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._order: IndexArray | None = None
        self._in_order: list[Sequence] | None = None

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def order(self) -> IndexArray:
        """Rows in use, the most important first, and of equals the earliest arrival."""
        if self._order is None:
            rows = np.fromiter(self.by_id.values(), np.intp, len(self.by_id))
            self._order = rows[np.lexsort(self._rank[:, rows])]
        return self._order

    @property
    def live(self) -> IndexArray:
        """Rows in order whose sequences have neither ended nor been preempted."""
        order = self.order
        return choose(~self.ended[order], order)[0]

    @property
    def searching(self) -> IndexArray:
        """Those of live whose sequences are of beam searches."""
        live = self.live
        return live[self.searches[live]]

    def at(self, rows: IndexArray) -> list[Sequence]:
        """The sequences of rows in use; not to be changed, because that of `order` is made once."""
        if rows is not self._order:
            return [sequence for row in rows.tolist() if (sequence := self.sequences[row]) is not None]
        if self._in_order is None:
            self._in_order = [sequence for row in rows.tolist() if (sequence := self.sequences[row]) is not None]
        return self._in_order

    def add(self, sequence: Sequence, num_computed: int, num_known: int, num_reserved: int, table: Int32Array) -> int:
        """Give a sequence with a sequence id a row."""
        assert sequence.sequence_id is not None
        row = self._free_rows.pop()
        self._num_added += 1
        self.serials[row] = self._num_added
        sequence.row, self.sequences[row], self.by_id[sequence.sequence_id] = row, sequence, row
        sequence.row_lens = self.num_tokens
        self.sequence_ids[row], self.slots[row] = sequence.sequence_id, sequence.request.slot
        self.num_prompt[row] = len(sequence.request.prompt)
        self.num_tokens[row] = num_tokens = len(sequence.token_ids)
        self.tokens[row, :num_tokens] = sequence.token_ids
        self.num_computed[row] = self.num_committed[row] = num_computed
        self.num_known[row], self.num_reserved[row] = num_known, num_reserved
        self.num_left[row] = sequence.request.max_new_tokens - sequence.num_output
        self.num_computing[row] = self.num_drawing[row] = 0
        self.num_blocks[row] = num_blocks = len(table) // self.num_groups  # of each group
        self.group_tables[row, :, :num_blocks] = table.reshape(self.num_groups, num_blocks)
        self.ended[row] = self.kept[row] = self.swapping[row] = self.discarded[row] = self.completing[row] = False
        self.searches[row] = is_search = sequence.request.num_beams is not None
        self.num_searching += is_search
        self.constrained[row] = sequence.request.is_constrained
        self.num_constrained += sequence.request.is_constrained
        self.num_sink[row] = self.num_window[row] = 0
        if (retention := sequence.request.retention) is not None:
            self.num_sink[row], self.num_window[row] = retention.num_sink_tokens, retention.num_window_tokens
            self.num_retaining += 1
        self.clients[row] = self._get_number(sequence.request.client)
        self._rank[:, row] = sequence.index, sequence.request.arrival, -sequence.request.priority
        self._order = self._in_order = None
        return row

    def remove(self, sequence: Sequence) -> None:
        """Take the row back; the sequence keeps its tokens."""
        assert sequence.row is not None
        assert sequence.sequence_id is not None
        row, sequence.row, sequence.row_lens = sequence.row, None, None
        sequence.token_ids = self.tokens[row, : self.num_tokens[row]].copy()
        del self.by_id[sequence.sequence_id]
        self.sequences[row] = None
        self._forget_row(sequence.request.client)
        self.num_searching -= int(self.searches[row])
        self.num_constrained -= int(self.constrained[row])
        self.num_retaining -= int(self.num_window[row] > 0)
        self.group_tables[row, :, : self.num_blocks[row]] = 0
        self._free_rows.append(row)
        self._order = self._in_order = None

    @property
    def num_clients(self) -> int:
        """Clients that have rows."""
        return len(self._numbers)

    def get_client(self, row: int) -> str:
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence.request.client

    def get_clients(self, rows: IndexArray) -> set[str]:
        numbers = self.clients[rows]
        first_rows = rows[np.unique(numbers, return_index=True)[1]]
        return {self.get_client(row) for row in first_rows.tolist()}

    def _get_number(self, client: str) -> int:
        self._num_rows_of[client] += 1
        if client not in self._numbers:
            taken = set(self._numbers.values())
            self._numbers[client] = next(number for number in range(self.num_rows) if number not in taken)
        return self._numbers[client]

    def _forget_row(self, client: str) -> None:
        self._num_rows_of[client] -= 1
        if not self._num_rows_of[client]:
            del self._num_rows_of[client], self._numbers[client]

    def num_held(self, row: int) -> int:
        """Blocks that a row's tables name, holes taken off."""
        return int(np.count_nonzero(self.group_tables[row, :, : self.num_blocks[row]]))

    def get_table(self, row: int, num_blocks: int) -> Int32Array:
        """The first blocks of a row's tables, one table behind the other; a copy."""
        return self.group_tables[row, :, :num_blocks].flatten()

    def append_blocks(self, rows: IndexArray, item_idx: Int32Array, block_ids: Int32Array, groups: Int32Array) -> None:
        """Append new blocks to tables: block_ids[i] belongs to rows[item_idx[i]], and there to the group groups[i].

        item_idx ascends within each group, and is the same in all; groups is empty where there is one.
        """
        if not len(block_ids):
            return
        for group in range(self.num_groups):
            of_group = groups == group if len(groups) else slice(None)
            items = item_idx[of_group]
            counts, owners = np.bincount(items, minlength=len(rows)).astype(np.int32), rows[items]
            self.group_tables[owners, group, self.num_blocks[owners] + Runs(counts).ranks] = block_ids[of_group]
        self.num_blocks[rows] += counts

    def put_guesses(self, guesses: Mapping[int, Int32Array]) -> None:
        """Write tokens behind each row's own, where a batch finds them; the sequences do not have them yet."""
        for row, token_ids in guesses.items():
            first = self.num_tokens[row]
            self.tokens[row, first : first + len(token_ids)] = token_ids

    def append_run(self, row: int, token_ids: Int32Array) -> None:
        """Append several tokens to one row."""
        first = self.num_tokens[row]
        self.tokens[row, first : first + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)

    def append_tokens(self, rows: IndexArray, token_ids: Int32Array) -> None:
        """Append one token to each row."""
        self.tokens[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def gather_tokens(self, rows: IndexArray, first: Int32Array, counts: Int32Array) -> Int32Array:
        """Tokens [first, first + count) of each row, concatenated."""
        runs = Runs(counts)
        return self.tokens[runs.repeat(rows), runs.expand(first)]


def choose(mask: npt.NDArray[np.bool_], *columns: Any) -> tuple[Any, ...]:
    """Each column [n] where the mask [n] is set; the columns themselves where it is set everywhere, as in most steps."""
    if np.count_nonzero(mask) == len(mask):  # a fraction of what all() costs for so few
        return columns
    return tuple(column[mask] for column in columns)


class Runs:
    """Runs of things that follow each other, one run for each of n rows: tokens, logits or blocks.

    Most steps have one token for each row. Then nothing is repeated, and columns come back as they are: a step is a few dozen
    calls of numpy, and with hundreds of rows each call less shows.
    """

    def __init__(self, counts: Int32Array) -> None:
        """counts [n]: the length of each run."""
        self.counts = counts
        self.are_single = np.count_nonzero(counts == 1) == len(counts)

    @cached_property
    def start_loc(self) -> Int32Array:
        """int32 [n + 1]: run i is at [start_loc[i], start_loc[i + 1])."""
        if self.are_single:
            return np.arange(len(self.counts) + 1, dtype=np.int32)
        start_loc = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=start_loc[1:])
        return start_loc

    @property
    def ranks(self) -> Int32Array:
        """0 .. count - 1 for each run, concatenated."""
        return self.expand(np.zeros_like(self.counts))

    def repeat(self, column: npt.NDArray[T]) -> npt.NDArray[T]:
        """A row's value [n] for each thing of its run."""
        return column if self.are_single else np.repeat(column, self.counts)

    def expand(self, first: npt.NDArray[T]) -> npt.NDArray[T]:
        """first .. first + count - 1 for each run, concatenated."""
        if self.are_single:
            return first
        starts = np.cumsum(self.counts) - self.counts
        return np.arange(self.counts.sum(), dtype=first.dtype) + np.repeat(first - starts, self.counts).astype(first.dtype)
