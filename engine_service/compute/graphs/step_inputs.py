"""StepInputs: the memory that captured graphs read a step from, at addresses that never change.

A step's columns and the used part of its tables go over in one copy, from pinned memory; copies on the device spread the tables
over rows of full width. Two steps may be under way, so there is pinned memory for two, in turn. Rows that decode come first,
then those of prompts, and each part is followed by padding up to the size of its graph. Padding has no slot to write to, page 0
for its states, and a place of its own for the token that it draws. It sees no token, or, behind prompts, those of the null
block: it is one more prompt, so that what is computed of it is a number.

The memory is: columns of a step's tokens, of its rows of logits, and of pages of states, of int64; how rows are drawn, and
penalised; lengths of its sequences, and where the prompts begin, of int32; tables.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvkeeper.kernels.types import CountedTensors

from ...model.recurrent.state_pages import state_arrays
from ...values.batch import Batch
from ...values.sampling_params import GREEDY, PlainDraws, draw_params, get_penalties
from ..device.device_queue import DeviceQueue
from ..device.token_counts import CountedRows
from ..device.upload import Stage, Staged
from .step_sizes import StepSize

_OF_TOKENS = ("token_ids", "positions", "slot_mapping", "awaited_rows")  # and the slots of further groups
_OF_LOGITS = ("rows", "logit_rows")  # for which row each is drawn, and of which token it is
_NUM_PARAMS, _NUM_NUMBERS = 5, 3  # columns of PlainDraws, of 8 bytes a row: float64, and seeds, sample indices and positions
_NUM_PLACES, _NUM_PENALTIES = 2, 3  # slots and addends, int64; penalties, float64: as penalise_counted takes them
_PADDING_PARAMS = np.array(draw_params(GREEDY))[:, None]
_NO_PENALTIES = np.array(get_penalties(GREEDY), np.float64)[:, None]
_NONE = -1
T = TypeVar("T")


class InputsShape(NamedTuple):
    """The largest step: tokens, rows of logits, rows that decode, prompts, groups of layers, and blocks of a table.

    prompts: 0: there are none. prompt_width: blocks of a prompt's table, no fewer; those of a prompt that is all padding, too.
    groups: those with tables on the device. states: numbers of the recurrent groups, of whose tables the pages of each row that
    decodes go over instead. block_size: tokens of a block, where there are such groups.
    """

    tokens: int
    logits: int
    decodes: int
    prompts: int
    groups: int
    table_width: int
    prompt_width: int
    states: tuple[int, ...] = ()
    block_size: int = 1


@dataclass(frozen=True, slots=True)
class _Columns(Generic[T]):
    """The memory of a step as arrays, on the host, or as tensors, on the device; its tables begin at tables_at."""

    of_tokens: Mapping[str, T]
    of_logits: Mapping[str, T]
    of_states: Mapping[str, T]
    params: T
    numbers: T
    places: T
    penalties: T
    decode_lens: T
    prompt_lens: T
    prompt_locs: T
    tables_at: int


def _lay_out(shape: InputsShape, view: Callable[[int, tuple[int, ...], type[np.generic]], T]) -> _Columns[T]:
    """view: what is at so many bytes from the beginning, of this shape and dtype."""
    at = 0

    def column(dtype: type[np.generic], *sizes: int) -> T:
        nonlocal at
        first, num_bytes = at, math.prod(sizes) * np.dtype(dtype).itemsize
        at += -(-num_bytes // 16) * 16
        return view(first, sizes, dtype)

    names = (*_OF_TOKENS, *(f"slot_mapping_{group}" for group in range(1, shape.groups)))
    return _Columns(
        {name: column(np.int64, shape.tokens) for name in names},
        {name: column(np.int64, shape.logits) for name in _OF_LOGITS},
        {f"state_{name}_{group}": column(np.int64, shape.decodes) for group in shape.states for name in ("reads", "writes")},
        column(np.float64, _NUM_PARAMS, shape.logits),
        column(np.int64, _NUM_NUMBERS, shape.logits),
        column(np.int64, _NUM_PLACES, shape.logits),
        column(np.float64, _NUM_PENALTIES, shape.logits),
        column(np.int32, shape.decodes),
        column(np.int32, shape.prompts + 1),
        column(np.int32, shape.prompts + 2),
        at,
    )


class _Turn:
    """Pinned memory of one step, and its columns."""

    def __init__(self, shape: InputsShape, num_bytes: int, *, pin_memory: bool) -> None:
        self.stage = Stage(num_bytes, pin_memory=pin_memory)
        self.memory, raw = self.stage.memory, self.stage.memory.numpy()

        def view(first: int, sizes: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
            last = first + math.prod(sizes) * np.dtype(dtype).itemsize
            return raw[first:last].view(dtype).reshape(sizes)

        self.columns = _lay_out(shape, view)
        self.tables: npt.NDArray[np.int32] = raw[self.columns.tables_at :].view(np.int32)


class StepInputs:
    """The inputs of steps of at most this shape, with a table for each group of layers."""

    def __init__(
        self,
        shape: InputsShape,
        device: torch.device,
        queue: DeviceQueue,
        *,
        padding_row: int,
        padding_slot: int,
        pin_memory: bool,
    ) -> None:
        """padding_row: of LastTokens, no sequence's. padding_slot: of TokenCounts, likewise."""
        self._shape, self._queue = shape, queue
        self._paddings = {"token_ids": 0, "positions": 0, "rows": padding_row, "logit_rows": 0}
        self._not_counted = np.array([padding_slot, 0], np.int64)[:, None]
        tables_at = _lay_out(shape, lambda *_: None).tables_at
        num_bytes = tables_at + 4 * shape.groups * (shape.decodes + shape.prompts) * shape.table_width
        self._turns = [_Turn(shape, num_bytes, pin_memory=pin_memory) for _ in range(2)]
        self._landing = landing = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._decode_tables, self._prompt_tables = (
            torch.zeros((shape.groups, count, width), dtype=torch.int32, device=device)
            for count, width in ((shape.decodes, shape.table_width), (shape.prompts + 1, shape.prompt_width))
        )

        def view(first: int, sizes: tuple[int, ...], dtype: type[np.generic]) -> torch.Tensor:
            last = first + math.prod(sizes) * np.dtype(dtype).itemsize
            return landing[first:last].view(torch.from_numpy(np.empty(0, dtype)).dtype).view(sizes)

        self._columns = columns = _lay_out(shape, view)
        for name, column in (*columns.of_tokens.items(), *columns.of_logits.items()):
            column.fill_(self._paddings.get(name, _NONE))
        for column in columns.of_states.values():
            column.zero_()
        paddings = (columns.params, _PADDING_PARAMS), (columns.places, self._not_counted), (columns.penalties, _NO_PENALTIES)
        for column, padding in paddings:
            column.copy_(torch.from_numpy(padding).expand(column.shape))

    def pad(self, size: StepSize) -> None:
        """Have a step of this size that is all padding, as it is captured, before the first one is staged."""
        self._columns.prompt_lens[-1] = self._columns.prompt_locs[-1] = size.prompt_tokens

    def tensors(self, size: StepSize) -> Mapping[str, torch.Tensor]:
        """What a step of this size is read from: views that stay valid, in the names of attention_arrays and of the model's."""
        columns, num_prompts = self._columns, size.prompts and size.prompts + 1
        found = {name: column[: size.decodes + size.prompt_tokens] for name, column in columns.of_tokens.items()}
        found |= {name: column[: size.logits] for name, column in columns.of_logits.items()}
        found |= {name: column[: size.decodes] for name, column in columns.of_states.items()}
        for part, count, lens, tables in (
            ("decode", size.decodes, columns.decode_lens, self._decode_tables),
            ("prefill", num_prompts, columns.prompt_lens, self._prompt_tables),
        ):
            if count:
                found[f"{part}_lens"], found[f"{part}_tables"] = lens[:count], tables[0, :count]
                found |= {f"{part}_tables_{group}": tables[group, :count] for group in range(1, self._shape.groups)}
        if size.prompts:
            found["prefill_locs"] = columns.prompt_locs
        return found

    def drawing(self, num_logits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """How the first rows of logits are drawn, in views that stay valid: what draw_plain takes beside the logits."""
        return self._columns.params[:, :num_logits], self._columns.numbers[:, :num_logits]

    def counting(self, token_ids: torch.Tensor) -> CountedTensors:
        """What is counted of the first rows of logits, which are of these tokens, in views that stay valid."""
        slots, addends = self._columns.places[:, : len(token_ids)]
        return CountedTensors(slots, token_ids, addends, self._columns.penalties[:, : len(token_ids)])

    def stage(
        self,
        batch: Batch,
        num_decodes: int,
        size: StepSize,
        draws: PlainDraws | None = None,
        counted: CountedRows | None = None,
    ) -> Staged[None]:
        """Take a batch into a step of this size.

        num_decodes: rows of the batch that decode; they come first.
        draws: how its rows of logits are drawn; None: nothing is drawn from what `drawing` has.
        counted: those of them that are penalised; None: nothing is penalised by what `counting` has.

        Returns the call that brings them to the device; the batch may change before it is made.
        """
        self._turns.reverse()
        turn = self._turns[0]
        turn.stage.reuse()
        num_rows, used = batch.block_tables.shape
        self._take_tokens(batch, num_decodes, size, turn.columns)
        self._take_logits(batch, num_decodes, size, draws, counted, turn.columns)
        groups, tables_at = self._shape.groups, turn.columns.tables_at
        tables = turn.tables[: groups * num_rows * used].reshape(groups, num_rows, used)
        tables[0] = batch.block_tables
        if groups > 1 and batch.group_tables is not None:
            tables[1:] = batch.group_tables.swapaxes(0, 1)
        end = tables_at + tables.nbytes

        def copy() -> None:
            self._landing[:end].copy_(turn.memory[:end], non_blocking=True)
            turn.stage.note_copied(self._queue.mark())
            landed = self._landing[tables_at:end].view(torch.int32).view(tables.shape)
            if num_decodes:
                self._decode_tables[:, :num_decodes, :used].copy_(landed[:, :num_decodes])
            if num_prompts := num_rows - num_decodes:  # the table of padding, which is the last, stays the null block
                self._prompt_tables[:, :num_prompts, :used].copy_(landed[:, num_decodes:])

        return Staged(copy, turn.stage.give_back)

    def _take_tokens(self, batch: Batch, num_decodes: int, size: StepSize, columns: _Columns[npt.NDArray[Any]]) -> None:
        """The columns of tokens, lengths, pages of states, and where the prompts begin."""
        lens = columns.decode_lens
        lens[:num_decodes], lens[num_decodes : size.decodes] = batch.seq_lens[:num_decodes], 0
        if columns.of_states:
            pages = state_arrays(batch, self._shape.states, self._shape.block_size)
            for name, column in columns.of_states.items():
                column[:num_decodes], column[num_decodes : size.decodes] = pages[name], 0
        if size.prompts:
            locs, num_prompts = batch.query_start_loc[num_decodes:] - num_decodes, len(batch.seq_lens) - num_decodes
            columns.prompt_lens[:num_prompts] = batch.seq_lens[num_decodes:]
            columns.prompt_lens[-1] = size.prompt_tokens - locs[-1]
            columns.prompt_locs[: num_prompts + 1], columns.prompt_locs[num_prompts + 1 : -1] = locs, locs[-1]
            columns.prompt_locs[-1] = size.prompt_tokens
        given = (batch.token_ids, batch.positions, batch.slot_mapping, batch.awaited_rows)
        if self._shape.groups > 1 and batch.group_slots is not None:
            given = (*given, *batch.group_slots)
        last, end = size.decodes + len(batch.token_ids) - num_decodes, size.decodes + size.prompt_tokens
        for (name, column), values in zip(columns.of_tokens.items(), given, strict=True):
            padding = self._paddings.get(name, _NONE)
            if values is None:
                column[:end] = padding
                continue
            column[:num_decodes] = values[:num_decodes]
            if num_decodes < size.decodes:
                column[num_decodes : size.decodes] = padding
            if size.prompts:
                column[size.decodes : last], column[last:end] = values[num_decodes:], padding

    def _take_logits(
        self,
        batch: Batch,
        num_decodes: int,
        size: StepSize,
        draws: PlainDraws | None,
        counted: CountedRows | None,
        columns: _Columns[npt.NDArray[Any]],
    ) -> None:
        """Which rows of logits there are, and how they are drawn. Of rows that have several, the host says which counts."""
        count, padded = len(batch.logit_rows), size.logits
        rows, tokens = (columns.of_logits[name] for name in _OF_LOGITS)
        has_own = batch.rows is not None and (count == len(batch.token_ids) == len(batch.seq_lens) or _has_one_each(batch))
        rows[:count] = batch.rows if has_own else self._paddings["rows"]
        if count < padded:
            rows[count:padded], tokens[count:padded] = self._paddings["rows"], 0
        tokens[:count] = batch.logit_rows
        if num_decodes < size.decodes and size.prompts:
            tokens[:count][batch.logit_rows >= num_decodes] += size.decodes - num_decodes
        if draws is not None:
            columns.params[:, :count], columns.params[:, count:padded] = draws.params, _PADDING_PARAMS
            seeds, sample_idx, positions = columns.numbers.view(np.uint64)[:, :count]
            seeds[:], sample_idx[:], positions[:] = draws.seeds, draws.sample_idx, draws.positions
        if counted is not None:
            columns.places[:, :padded], columns.penalties[:, :padded] = self._not_counted, _NO_PENALTIES
            columns.places[:, counted.where] = counted.slots, counted.addends
            columns.penalties[:, counted.where] = counted.penalties


def _has_one_each(batch: Batch) -> bool:
    """Whether each row has one row of logits."""
    return len(batch.logit_rows) == len(batch.seq_lens) and bool((np.diff(batch.logit_start_loc) == 1).all())
