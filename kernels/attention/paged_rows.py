"""From block tables to rows of a layer, for the gathers of both attention ops on a CPU.

An index into a layer's rows is the same for every layer of the arena (see checks.slot_rows), so it is built once per
step, here, in numpy.
"""

import numpy as np
import numpy.typing as npt
import torch

from ..checks import require

Int64Array = npt.NDArray[np.int64]


def require_tables(op: str, tables: Int64Array, lens: Int64Array, kv_layer: torch.Tensor) -> None:
    """Raise unless every table is long enough for its sequence and names only blocks of the arena."""
    num_blocks, _, block_size = kv_layer.shape[:3]
    used = -(-lens // block_size)
    fits = tables.shape[0] == lens.shape[0] and int(used.max(initial=0)) <= tables.shape[1]
    require(fits, op, "block_tables", "{} are too short for the sequences", tables.shape)
    named = np.where(np.arange(tables.shape[1]) < used[:, None], tables, 0)
    inside = named.min(initial=0) >= 0 and named.max(initial=0) < num_blocks
    require(bool(inside), op, "block_tables", "name blocks outside the arena of {}", num_blocks)


def kv_slot_rows(tables: Int64Array, positions: Int64Array, kv_layer: torch.Tensor) -> torch.Tensor:
    """Rows of slot_rows(kv_layer, slot_len) for token positions [n, T] of sequences with tables [n, max_blocks].

    Returns:
        int64 [2 * n * T]: the keys of sequence after sequence, then the values.
    """
    _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
    slot_len = num_kv_heads * head_dim
    blocks, offsets = np.divmod(positions, block_size)
    rows = np.empty((2, *positions.shape), dtype=np.int64)
    np.multiply(np.take_along_axis(tables, blocks, axis=1), kv_layer.stride(0) // slot_len, out=rows[0])
    rows[0] += offsets
    np.add(rows[0], kv_layer.stride(1) // slot_len, out=rows[1])
    return torch.from_numpy(rows.reshape(-1))
