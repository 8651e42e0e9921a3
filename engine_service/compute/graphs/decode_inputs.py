"""DecodeInputs: the memory that captured graphs read a step from, at addresses that never change.

A step's columns and the used part of its tables go over in one copy, from pinned memory; a second copy, on the device, spreads
the tables over rows of full width. The pinned memory is used again with the next step, which is safe because each step ends by
waiting for the tokens it has drawn. Rows that a batch does not fill are padding: no token to see, and no slot to write to.
"""

from collections.abc import Mapping

import numpy as np
import torch

from kvkeeper.kernels.attention.paged_rows import Int64Array

from ...values.batch import Batch

_WIDE_COLUMNS = ("token_ids", "positions", "slot_mapping")  # int64, and slots of further groups of layers; then int32
_NO_SLOT = -1


class DecodeInputs:
    """Of at most `most_rows` rows with tables of `table_width` blocks, one for each group of layers."""

    def __init__(
        self, most_rows: int, table_width: int, device: torch.device, *, pin_memory: bool, num_groups: int = 1
    ) -> None:
        self.most_rows, self.table_width, self.num_groups = most_rows, table_width, num_groups
        wide = (*_WIDE_COLUMNS, *(f"slot_mapping_{group}" for group in range(1, num_groups)))
        header = most_rows * (8 * len(wide) + 4)
        self._tables_at = -(-header // 16) * 16
        num_bytes = self._tables_at + num_groups * most_rows * table_width * 4
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._landing = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._tables = torch.zeros((num_groups, most_rows, table_width), dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(most_rows, dtype=torch.int64, device=device)
        self._columns: dict[str, tuple[Int64Array, torch.Tensor]] = {}
        raw = self._staging.numpy()
        for index, name in enumerate(wide):
            part = slice(index * most_rows * 8, (index + 1) * most_rows * 8)
            self._columns[name] = raw[part].view(np.int64), self._landing[part].view(torch.int64)
        lens = slice(8 * len(wide) * most_rows, header)
        self._host_lens, self._lens = raw[lens].view(np.int32), self._landing[lens].view(torch.int32)
        self._host_tables = raw[self._tables_at :].view(np.int32)
        for name in wide[2:]:
            self._columns[name][0].fill(_NO_SLOT)
            self._columns[name][1].fill_(_NO_SLOT)

    def tensors(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """What the first rows are read from: views that stay valid, in the names of attention_arrays and of the model's."""
        columns = {name: on_device[:num_rows] for name, (_, on_device) in self._columns.items()}
        others = {"logit_rows": self._logit_rows, "decode_tables": self._tables[0], "decode_lens": self._lens}
        others |= {f"decode_tables_{group}": self._tables[group] for group in range(1, self.num_groups)}
        return columns | {name: whole[:num_rows] for name, whole in others.items()}

    def fill(self, batch: Batch, num_rows: int) -> None:
        """Put a batch of single tokens into the first rows, and padding behind it, up to num_rows."""
        count, used = batch.block_tables.shape
        for name, (staged, _) in self._columns.items():
            staged[:count] = _column(batch, name)
            staged[count:num_rows] = 0 if name in ("token_ids", "positions") else _NO_SLOT
        self._host_lens[:count] = batch.seq_lens
        self._host_lens[count:num_rows] = 0
        num_groups = self.num_groups
        tables = self._host_tables[: num_groups * count * used].reshape(num_groups, count, used)
        tables[0] = batch.block_tables
        if batch.group_tables is not None:
            tables[1:] = batch.group_tables.swapaxes(0, 1)
        end = self._tables_at + num_groups * count * used * 4
        self._landing[:end].copy_(self._staging[:end], non_blocking=True)
        landed = self._landing[self._tables_at : end].view(torch.int32).view(num_groups, count, used)
        self._tables[:, :count, :used].copy_(landed)


def _column(batch: Batch, name: str) -> Int64Array:
    if name in _WIDE_COLUMNS:
        column: Int64Array = getattr(batch, name)
        return column
    assert batch.group_slots is not None
    return batch.group_slots[int(name.rpartition("_")[2]) - 1]
