"""Recurrent groups: the pages of an arena as states of layers, and which of them a step reads and writes.

Entry i of a sequence's table of such a group is the page with the states behind the last token of block i that is computed, or
0: no state is kept there. A step reads the page of the token before its first one, and writes the page of each block that has
one: of its last token, and of the edges in between that are checkpoints. A page whose block is full is never written again.
Inside one block the page that is read is the one that is written. Rows of one token are one batched update, others are cut into
runs at the edges. Owns how a page is laid out: layer by layer the matrices in float32, then the convolution's last inputs in
the model's dtype. Knows no cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ...values.batch import Batch, IntArray
from .delta_config import DeltaNetShape
from .delta_net import DeltaState

Runs = tuple[tuple[tuple[int, int], ...], ...]  # of each row with several tokens, where its runs begin and end in the batch


class StatePages:
    """The blocks of an arena as states of up to num_layers layers."""

    def __init__(self, kv_view: torch.Tensor, shape: DeltaNetShape, num_layers: int) -> None:
        """kv_view: of the arena, contiguous; its blocks are large enough, and its dtype is the model's."""
        flat, size = kv_view.flatten(1).view(torch.uint8), shape.state_bytes(kv_view.dtype.itemsize)
        assert num_layers * size <= flat.shape[1], "the groups were made for these blocks"
        self._layers = []
        for first in range(0, num_layers * size, size):
            at = first + shape.memory_bytes
            memory = flat[:, first:at].view(torch.float32)
            conv = flat[:, at : at + shape.conv_dim * (shape.kernel - 1) * kv_view.dtype.itemsize].view(kv_view.dtype)
            heads = (shape.num_value_heads, shape.key_dim, shape.value_dim)
            self._layers.append(DeltaState(memory.unflatten(1, heads), conv.unflatten(1, (-1, shape.conv_dim))))

    def read(self, layer: int, pages: torch.Tensor) -> DeltaState:
        """The states [S, ...] of the group's layer in these pages, int64 [S]; those before the first token in page 0."""
        memory, conv = self._layers[layer]
        is_there = pages > 0
        return DeltaState(
            torch.where(is_there[:, None, None, None], memory.index_select(0, pages), 0.0),
            torch.where(is_there[:, None, None], conv.index_select(0, pages), 0.0),
        )

    def write(self, layer: int, pages: torch.Tensor, state: DeltaState) -> None:
        """Put states [S, ...] into these pages."""
        memory, conv = self._layers[layer]
        memory.index_copy_(0, pages, state.memory)
        conv.index_copy_(0, pages, state.conv)


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """What the layers of a recurrent group need of a step.

    Attributes:
        decode_rows: int64 [S_d], the tokens of the rows that have one; None: all tokens, in order. reads, writes: their pages,
            int64 [S_d].
        runs: of the other rows. run_reads: the page of each row before its first run. run_writes: of each run, row by row.
        is_written: False before the first step, where all pages are page 0.
    """

    pages: StatePages
    decode_rows: torch.Tensor | None
    reads: torch.Tensor | None
    writes: torch.Tensor | None
    runs: Runs
    run_reads: torch.Tensor | None
    run_writes: torch.Tensor | None
    is_written: bool


def find_runs(batch: Batch, group: int, block_size: int) -> Runs:
    """The runs of a batch's rows with several tokens: each ends a block that has a page in this group, as in the others, or the
    row."""
    found = []
    starts, tables = batch.query_start_loc.tolist(), batch.group_tables
    for row, ((first, end), seq_len) in enumerate(zip(pairwise(starts), batch.seq_lens.tolist(), strict=True)):
        if end - first > 1:
            context, edges = seq_len - (end - first), np.empty(0, np.int64)
            if tables is not None:
                entry = context // block_size
                edges = (entry + 1 + np.flatnonzero(tables[row, group - 1, entry : (seq_len - 1) // block_size])) * block_size
            found.append(tuple(pairwise([first, *(first + edges - context).tolist(), end])))
    return tuple(found)


def state_arrays(batch: Batch, groups: Sequence[int], runs: Runs, block_size: int) -> dict[str, IntArray]:
    """The pages that a step reads and writes in the groups of these numbers, to go to the model's device.

    Before the first step, when a batch has no tables of groups, all of them are page 0.
    """
    lens = np.diff(batch.query_start_loc)
    ones, several = np.flatnonzero(lens == 1), np.flatnonzero(lens > 1)
    first_positions = batch.seq_lens - lens
    run_rows = np.repeat(several, [len(row) for row in runs])
    run_ends = np.array([end - 1 for row in runs for _, end in row], np.int64)
    places: dict[str, tuple[IntArray, IntArray]] = {
        "reads": (ones, first_positions[ones] - 1),
        "writes": (ones, batch.seq_lens[ones] - 1),
        "run_reads": (several, first_positions[several] - 1),
        "run_writes": (run_rows, batch.positions[run_ends]),
    }
    arrays: dict[str, IntArray] = {}
    for group in groups:
        for name, (rows, positions) in places.items():
            if len(rows):
                pages = np.zeros(len(rows), np.int64)
                if batch.group_tables is not None:
                    entries = np.maximum(positions, 0) // block_size
                    pages = np.where(positions < 0, 0, batch.group_tables[rows, group - 1, entries]).astype(np.int64)
                    assert pages[positions >= 0].all(), "the cache service grants a page where a state is read or written"
                arrays[f"state_{name}_{group}"] = pages
    return arrays


def build_state_metadata(
    tensors: Mapping[str, torch.Tensor], group: int, pages: StatePages, runs: Runs, *, is_written: bool
) -> StateMetadata:
    """tensors: of attention_arrays and state_arrays, on the model's device."""
    return StateMetadata(
        pages,
        tensors.get("decode_tokens"),
        tensors.get(f"state_reads_{group}"),
        tensors.get(f"state_writes_{group}"),
        runs,
        tensors.get(f"state_run_reads_{group}"),
        tensors.get(f"state_run_writes_{group}"),
        is_written,
    )
