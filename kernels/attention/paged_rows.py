"""From block tables to rows of a layer, for what both attention ops gather on a CPU.

An index into a layer's rows is the same for every layer of the arena (see checks.slot_rows), so it is built once per
step, here, in numpy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..checks import require, slot_rows
from ..scratch import Scratch
from ..types import Int64Array, SequenceQueries
from .gathered import Gathered


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The slots that a step's attention reads, for one window; the same for all layers. On CUDA nothing is gathered.

    Attributes:
        sequences: what the queries of each sequence see.
        kv_rows: of each, int64 [2 * T], slots of a layer: all keys, then all values; of latents, which are both, [T].
        scratch: memory to gather into.
    """

    sequences: tuple[SequenceQueries, ...]
    kv_rows: tuple[torch.Tensor, ...]
    scratch: Scratch

    def read(self, kv_layer: torch.Tensor) -> Iterator[Gathered]:
        """Keys and values of each sequence, which are valid until the next one's."""
        heads = kv_layer.shape[3:]
        slot_len = heads.numel()
        rows = slot_rows(kv_layer, slot_len)
        for each, kv_rows in zip(self.sequences, self.kv_rows, strict=True):
            gathered = self.scratch.take(len(kv_rows) * slot_len, kv_layer.dtype)
            torch.index_select(rows, 0, kv_rows, out=gathered.view(-1, slot_len))
            sides = gathered.view(-1, len(each.positions), *heads)
            yield each, sides[0], sides[-1]


def plan_gather(
    sequences: Sequence[SequenceQueries], tables: Int64Array, kv_layer: torch.Tensor, scratch: Scratch
) -> GatherPlan:
    """Find the slots, with tables [S, max_blocks] and any layer of the arena."""
    kv_rows = (kv_slot_rows(tables[each.seq], each.positions, kv_layer) for each in sequences)
    return GatherPlan(tuple(sequences), tuple(kv_rows), scratch)


def require_tables(op: str, tables: Int64Array, lens: Int64Array, kv_layer: torch.Tensor) -> None:
    """Raise unless every table is long enough for its sequence and names only blocks of the arena."""
    num_blocks, _, block_size = kv_layer.shape[:3]
    used = -(-lens // block_size)
    fits = tables.shape[0] == lens.shape[0] and int(used.max(initial=0)) <= tables.shape[1]
    require(fits, op, "block_tables", "{} are too short for the sequences", tables.shape)
    named = np.where(np.arange(tables.shape[1]) < used[:, None], tables, 0)
    inside = named.min(initial=0) >= 0 and named.max(initial=0) < num_blocks
    require(bool(inside), op, "block_tables", "name blocks outside the arena of {}", num_blocks)


def kv_slot_rows(table: Int64Array, positions: Int64Array, kv_layer: torch.Tensor) -> torch.Tensor:
    """Rows of slot_rows(kv_layer, slot_len), int64 [2 * T]: the keys at positions [T] of a sequence, then the values.

    Of a layer of latents [T], because both are in the same memory.
    """
    _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
    slot_len = num_kv_heads * head_dim
    blocks, offsets = np.divmod(positions, block_size)
    keys = table[blocks] * (kv_layer.stride(0) // slot_len) + offsets
    apart = kv_layer.stride(1) // slot_len
    return torch.from_numpy(np.concatenate((keys, keys + apart)) if apart else keys)
