"""Recurrent groups: the pages of an arena as states of layers, and which of them a step reads and writes.

Entry i of a sequence's table of such a group is the page with the states behind the last token of block i that is computed, or
0: no state is kept there. A step reads the page of the token before its first one, and writes the page of each block that has
one: of its last token, and of the edges in between that are checkpoints. A page whose block is full is never written again.
Inside one block the page that is read is the one that is written. Rows of several tokens are cut into chunks, which end at
those edges, too. Owns how a page is laid out: layer by layer the tensors that its state consists of. Knows no cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import torch

from kvkeeper.kernels.types import STATE_CHUNK, StateChunks, StateRows

from ...values.batch import Batch, IntArray
from .recurrent_config import state_bytes
from .state_tensor import StateTensor

State = tuple[torch.Tensor, ...]  # of a layer, in pages: the tensors that its shape declares, [P, ...] each
_OF_CHUNKS = ("starts", "rows", "firsts", "lens")  # the same in all groups


def view_states(kv_view: torch.Tensor, tensors: Sequence[StateTensor], num_layers: int) -> list[State]:
    """The blocks of an arena as the states of num_layers layers.

    kv_view: of the arena, contiguous; its blocks are large enough, and its dtype is the model's.
    """
    flat, size = kv_view.flatten(1).view(torch.uint8), state_bytes(tensors, kv_view.dtype.itemsize)
    assert num_layers * size <= flat.shape[1], "the groups were made for these blocks"
    layers = []
    for first in range(0, num_layers * size, size):
        state, at = [], first
        for tensor in tensors:
            dtype = torch.float32 if tensor.is_wide else kv_view.dtype
            end = at + prod(tensor.shape) * dtype.itemsize
            state.append(flat[:, at:end].view(dtype).unflatten(1, tensor.shape))
            at = end
        layers.append(tuple(state))
    return layers


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """What the layers of a recurrent group need of a step.

    Attributes:
        layers: the states of each layer, in pages. A list is no part of what differs from step to step, see decode_programs.py.
        rows: those of one token; None: there are none.
        chunks: of the other rows; None: there are none.
    """

    layers: list[State]
    rows: StateRows | None
    chunks: StateChunks | None


def state_arrays(batch: Batch, groups: Sequence[int], block_size: int) -> dict[str, IntArray]:
    """The chunks of a step, and the pages that it reads and writes in these groups, to go to the model's device.

    A chunk ends at a row's end, at that of a block that has a page, or behind STATE_CHUNK tokens; the last alone has no page to
    write. Before the first step, when a batch has no tables of groups, all pages are page 0.
    """
    lens = np.diff(batch.query_start_loc)
    ones, several = np.flatnonzero(lens == 1), np.flatnonzero(lens > 1)
    first_positions = batch.seq_lens - lens
    arrays: dict[str, IntArray] = {}
    places: dict[str, tuple[IntArray, IntArray]] = {}
    if len(ones):
        places |= {"reads": (ones, first_positions[ones] - 1), "writes": (ones, batch.seq_lens[ones] - 1)}
    if len(several):
        counts, firsts, ends, run_ends = _cut(batch, several, groups[-1], block_size)
        starts = np.concatenate(([0], np.cumsum(counts)))
        of_chunks = starts, np.repeat(np.arange(len(several)), counts), firsts, ends - firsts
        arrays |= {f"state_chunk_{name}": of.astype(np.int64) for name, of in zip(_OF_CHUNKS, of_chunks, strict=True)}
        positions = np.where(run_ends, batch.positions[ends - 1], -1)
        places |= {
            "chunk_reads": (several, first_positions[several] - 1),
            "chunk_writes": (several[of_chunks[1]], positions),
        }
    columns = np.array(groups)[:, None] - 1
    for name, (rows, positions) in places.items():
        pages = np.zeros((len(groups), len(rows)), np.int64)
        if batch.group_tables is not None:
            is_there, entries = positions >= 0, np.maximum(positions, 0) // block_size
            pages = np.where(is_there, batch.group_tables[rows, columns, entries], 0).astype(np.int64)
            assert pages[:, is_there].all(), "the cache service grants a page where a state is read or written"
        arrays |= {f"state_{name}_{group}": of_group for group, of_group in zip(groups, pages, strict=True)}
    return arrays


def _cut(batch: Batch, rows: IntArray, group: int, block_size: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """How many chunks each of these rows has; of each chunk where it begins and ends in the batch, and whether a page is due.

    The blocks that have a page are those of this group, which are those of the others as well.
    """
    counts, firsts, ends, are_due = [], [], [], []
    for row in rows:
        first, end, seq_len = (int(each) for each in (*batch.query_start_loc[row : row + 2], batch.seq_lens[row]))
        context, edges = seq_len - (end - first), np.empty(0, np.int64)
        if batch.group_tables is not None:
            entry = context // block_size
            held = batch.group_tables[row, group - 1, entry : (seq_len - 1) // block_size]
            edges = (entry + 1 + np.flatnonzero(held)) * block_size
        cuts = [
            cut
            for begin, stop in pairwise([first, *(first + edges - context).tolist(), end])
            for cut in (*range(begin + STATE_CHUNK, stop, STATE_CHUNK), stop)
        ]
        counts.append(len(cuts))
        firsts += [first, *cuts[:-1]]
        ends += cuts
        are_due += [cut == end or cut - first + context in edges for cut in cuts]
    return np.array(counts), np.array(firsts), np.array(ends), np.array(are_due)


def build_state_metadata(tensors: Mapping[str, torch.Tensor], group: int, layers: list[State]) -> StateMetadata:
    """tensors: of attention_arrays and state_arrays, on the model's device."""
    rows, chunks = None, None
    if f"state_reads_{group}" in tensors:
        pages = tensors[f"state_reads_{group}"], tensors[f"state_writes_{group}"]
        rows = StateRows(tensors.get("decode_tokens"), *pages)
    if "state_chunk_starts" in tensors:
        starts, rows_of, firsts, lens = (tensors[f"state_chunk_{name}"] for name in _OF_CHUNKS)
        reads, writes = tensors[f"state_chunk_reads_{group}"], tensors[f"state_chunk_writes_{group}"]
        chunks = StateChunks(reads, starts, rows_of, firsts, lens, writes)
    return StateMetadata(layers, rows, chunks)
