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

_WIDE_COLUMNS = ("token_ids", "positions", "slot_mapping")  # int64; then lengths and tables, int32
_NO_SLOT = -1


class DecodeInputs:
    """Of at most `most_rows` rows with tables of `table_width` blocks."""

    def __init__(self, most_rows: int, table_width: int, device: torch.device, *, pin_memory: bool) -> None:
        self.most_rows, self.table_width = most_rows, table_width
        header = most_rows * (8 * len(_WIDE_COLUMNS) + 4)
        self._tables_at = -(-header // 16) * 16
        num_bytes = self._tables_at + most_rows * table_width * 4
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._landing = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._tables = torch.zeros((most_rows, table_width), dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(most_rows, dtype=torch.int64, device=device)
        self._columns: dict[str, tuple[Int64Array, torch.Tensor]] = {}
        raw = self._staging.numpy()
        for index, name in enumerate(_WIDE_COLUMNS):
            part = slice(index * most_rows * 8, (index + 1) * most_rows * 8)
            self._columns[name] = raw[part].view(np.int64), self._landing[part].view(torch.int64)
        lens = slice(8 * len(_WIDE_COLUMNS) * most_rows, header)
        self._host_lens, self._lens = raw[lens].view(np.int32), self._landing[lens].view(torch.int32)
        self._host_tables = raw[self._tables_at :].view(np.int32)
        self._columns["slot_mapping"][0].fill(_NO_SLOT)
        self._columns["slot_mapping"][1].fill_(_NO_SLOT)

    def tensors(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """What the first rows are read from: views that stay valid, in the names of attention_arrays and of the model's."""
        columns = {name: on_device[:num_rows] for name, (_, on_device) in self._columns.items()}
        others = {"logit_rows": self._logit_rows, "decode_tables": self._tables, "decode_lens": self._lens}
        return columns | {name: whole[:num_rows] for name, whole in others.items()}

    def fill(self, batch: Batch, num_rows: int) -> None:
        """Put a batch of single tokens into the first rows, and padding behind it, up to num_rows."""
        count, used = batch.block_tables.shape
        for name, (staged, _) in self._columns.items():
            staged[:count] = getattr(batch, name)
            staged[count:num_rows] = _NO_SLOT if name == "slot_mapping" else 0
        self._host_lens[:count] = batch.seq_lens
        self._host_lens[count:num_rows] = 0
        self._host_tables[: count * used].reshape(count, used)[:] = batch.block_tables
        end = self._tables_at + count * used * 4
        self._landing[:end].copy_(self._staging[:end], non_blocking=True)
        self._tables[:count, :used].copy_(self._landing[self._tables_at : end].view(torch.int32).view(count, used))
