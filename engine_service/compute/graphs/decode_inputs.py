"""DecodeInputs: the memory that captured graphs read a step from, at addresses that never change.

A step's columns and the used part of its tables go over in one copy, from pinned memory; a second copy, on the device, spreads
the tables over rows of full width. Two steps may be under way, so there is pinned memory for two, in turn. Rows that a batch
does not fill are padding: no token to see, no slot to write to, and a place of their own for the token that they draw.

The memory is: columns of int64, how rows are drawn, how they are penalised, lengths of int32, tables.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvkeeper.kernels.types import CountedTensors, Int64Array

from ...values.batch import Batch
from ...values.sampling_params import GREEDY, PlainDraws, draw_params, get_penalties
from ..device.device_queue import DeviceQueue
from ..device.token_counts import CountedRows
from ..device.upload import Stage, Staged

_COLUMNS = ("token_ids", "positions", "slot_mapping", "awaited_rows", "rows")  # and the slots of further groups
_NUM_PARAMS, _NUM_NUMBERS = 5, 3  # columns of PlainDraws, of 8 bytes a row: float64, and seeds, sample indices and positions
_NUM_DRAWING = _NUM_PARAMS + _NUM_NUMBERS
_NUM_PLACES, _NUM_PENALTIES = 2, 3  # slots and addends, int64; penalties, float64: as penalise_counted takes them
_NUM_COUNTING = _NUM_PLACES + _NUM_PENALTIES
_PADDING_PARAMS = np.array(draw_params(GREEDY))[:, None]
_NO_PENALTIES = np.array(get_penalties(GREEDY), np.float64)[:, None]
_NONE = -1


class _Turn:
    """Pinned memory of one step, as arrays."""

    def __init__(self, stage: Stage, wide: tuple[str, ...], most_rows: int, tables_at: int) -> None:
        raw, draws_at = stage.memory.numpy(), 8 * len(wide) * most_rows
        numbers_at, places_at = draws_at + 8 * _NUM_PARAMS * most_rows, draws_at + 8 * _NUM_DRAWING * most_rows
        penalties_at, lens_at = places_at + 8 * _NUM_PLACES * most_rows, places_at + 8 * _NUM_COUNTING * most_rows
        self.stage, self.memory = stage, stage.memory
        self.columns: dict[str, Int64Array] = {
            name: raw[at * most_rows * 8 : (at + 1) * most_rows * 8].view(np.int64) for at, name in enumerate(wide)
        }
        self.params: npt.NDArray[np.float64] = raw[draws_at:numbers_at].view(np.float64).reshape(_NUM_PARAMS, most_rows)
        self.numbers: npt.NDArray[np.uint64] = raw[numbers_at:places_at].view(np.uint64).reshape(_NUM_NUMBERS, most_rows)
        self.places: Int64Array = raw[places_at:penalties_at].view(np.int64).reshape(_NUM_PLACES, most_rows)
        self.penalties: npt.NDArray[np.float64] = raw[penalties_at:lens_at].view(np.float64).reshape(_NUM_PENALTIES, most_rows)
        self.lens: npt.NDArray[np.int32] = raw[lens_at:][: 4 * most_rows].view(np.int32)
        self.tables: npt.NDArray[np.int32] = raw[tables_at:].view(np.int32)


class DecodeInputs:
    """The inputs of at most `most_rows` rows with tables of `table_width` blocks, one for each group of layers."""

    def __init__(
        self,
        most_rows: int,
        table_width: int,
        device: torch.device,
        queue: DeviceQueue,
        *,
        padding_row: int,
        padding_slot: int,
        pin_memory: bool,
        num_groups: int = 1,
    ) -> None:
        """padding_row: of LastTokens, no sequence's. padding_slot: of TokenCounts, likewise."""
        self.most_rows, self.table_width, self.num_groups = most_rows, table_width, num_groups
        self._queue = queue
        wide = (*_COLUMNS, *(f"slot_mapping_{group}" for group in range(1, num_groups)))
        self._paddings = {name: {"token_ids": 0, "positions": 0, "rows": padding_row}.get(name, _NONE) for name in wide}
        self._not_counted = np.array([padding_slot, 0], np.int64)[:, None]
        draws_at, places_at = 8 * len(wide) * most_rows, 8 * (len(wide) + _NUM_DRAWING) * most_rows
        lens_at = places_at + 8 * _NUM_COUNTING * most_rows
        header = lens_at + 4 * most_rows
        self._tables_at = -(-header // 16) * 16
        num_bytes = self._tables_at + num_groups * most_rows * table_width * 4
        stages = (Stage(num_bytes, pin_memory=pin_memory) for _ in range(2))
        self._turns = [_Turn(stage, wide, most_rows, self._tables_at) for stage in stages]
        self._landing = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._tables = torch.zeros((num_groups, most_rows, table_width), dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(most_rows, dtype=torch.int64, device=device)
        self._columns = {
            name: self._landing[at * most_rows * 8 : (at + 1) * most_rows * 8].view(torch.int64) for at, name in enumerate(wide)
        }
        drawing = self._landing[draws_at:places_at].view(_NUM_DRAWING, most_rows * 8)
        self._params, self._numbers = drawing[:_NUM_PARAMS].view(torch.float64), drawing[_NUM_PARAMS:].view(torch.int64)
        self._params.copy_(torch.from_numpy(_PADDING_PARAMS).expand(_NUM_PARAMS, most_rows))
        counting = self._landing[places_at:lens_at].view(_NUM_COUNTING, most_rows * 8)
        self._places, self._penalties = counting[:_NUM_PLACES].view(torch.int64), counting[_NUM_PLACES:].view(torch.float64)
        self._places.copy_(torch.from_numpy(self._not_counted).expand(_NUM_PLACES, most_rows))
        self._penalties.copy_(torch.from_numpy(_NO_PENALTIES).expand(_NUM_PENALTIES, most_rows))
        self._lens = self._landing[lens_at:header].view(torch.int32)
        for name, column in self._columns.items():
            column.fill_(self._paddings[name])

    def tensors(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """What the first rows are read from: views that stay valid, in the names of attention_arrays and of the model's."""
        columns = {name: on_device[:num_rows] for name, on_device in self._columns.items()}
        others = {"logit_rows": self._logit_rows, "decode_tables": self._tables[0], "decode_lens": self._lens}
        others |= {f"decode_tables_{group}": self._tables[group] for group in range(1, self.num_groups)}
        return columns | {name: whole[:num_rows] for name, whole in others.items()}

    def drawing(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """How the first rows are drawn, in views that stay valid: what draw_plain takes beside the logits."""
        return self._params[:, :num_rows], self._numbers[:, :num_rows]

    def counting(self, token_ids: torch.Tensor) -> CountedTensors:
        """What is counted of the first rows, which compute these tokens, in views that stay valid."""
        slots, addends = self._places[:, : len(token_ids)]
        return CountedTensors(slots, token_ids, addends, self._penalties[:, : len(token_ids)])

    def stage(
        self, batch: Batch, num_rows: int, draws: PlainDraws | None = None, counted: CountedRows | None = None
    ) -> Staged[None]:
        """Take a batch of single tokens into the first rows, and padding behind it, up to num_rows.

        draws: how the rows of the batch are drawn; None: nothing is drawn from what `drawing` has.
        counted: those of them that are penalised; None: nothing is penalised by what `counting` has.

        Returns the call that brings them to the device; the batch may change before it is made.
        """
        count, used = batch.block_tables.shape
        num_groups = self.num_groups
        self._turns.reverse()
        turn = self._turns[0]
        turn.stage.reuse()
        columns = turn.columns
        columns["token_ids"][:count] = batch.token_ids
        columns["positions"][:count] = batch.positions
        columns["slot_mapping"][:count] = batch.slot_mapping
        columns["awaited_rows"][:count] = _NONE if batch.awaited_rows is None else batch.awaited_rows
        columns["rows"][:count] = self._paddings["rows"] if batch.rows is None else batch.rows
        turn.lens[:count] = batch.seq_lens
        if draws is not None:
            turn.params[:, :count], turn.params[:, count:num_rows] = draws.params, _PADDING_PARAMS
            seeds, sample_idx, positions = turn.numbers[:, :count]
            seeds[:], sample_idx[:], positions[:] = draws.seeds, draws.sample_idx, draws.positions
        if counted is not None:
            turn.places[:, :num_rows], turn.penalties[:, :num_rows] = self._not_counted, _NO_PENALTIES
            turn.places[:, counted.where] = counted.slots, counted.addends
            turn.penalties[:, counted.where] = counted.penalties
        tables = turn.tables[: num_groups * count * used].reshape(num_groups, count, used)
        tables[0] = batch.block_tables
        if batch.group_tables is not None and batch.group_slots is not None:
            tables[1:] = batch.group_tables.swapaxes(0, 1)
            for group in range(1, num_groups):
                columns[f"slot_mapping_{group}"][:count] = batch.group_slots[group - 1]
        if count < num_rows:
            turn.lens[count:num_rows] = 0
            for name, column in columns.items():
                column[count:num_rows] = self._paddings[name]
        end = self._tables_at + num_groups * count * used * 4

        def copy() -> None:
            self._landing[:end].copy_(turn.memory[:end], non_blocking=True)
            turn.stage.note_copied(self._queue.mark())
            landed = self._landing[self._tables_at : end].view(torch.int32).view(num_groups, count, used)
            self._tables[:, :count, :used].copy_(landed)

        return Staged(copy, turn.stage.give_back)
