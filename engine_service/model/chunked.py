"""Chunked attention: a token reads its own chunk of so many tokens up to itself, and nothing before.

Owns how that becomes attention over all keys, which every kernel has. The tokens of a chunk are a sequence of their own: its
block table is the part of the table that begins with the chunk, and its length counts from there. Keys keep the positions that
they were rotated at. A row whose queries lie in several chunks becomes one row for each. So a chunk begins with a block:
the chunk's size is a multiple of the block size.
"""

from collections.abc import Iterable

import numpy as np
import torch

from ..values.batch import IntArray
from .checkpoint.errors import UnsupportedModelError


def check_chunks(chunks: Iterable[int | None], block_size: int) -> None:
    """Raises UnsupportedModelError where blocks of this size cannot hold such chunks."""
    for chunk in chunks:
        if chunk is not None and chunk % block_size:
            raise UnsupportedModelError("attention_chunk_size", chunk, f"multiples of --block-size {block_size}")


def decode_in_chunks(
    tables: torch.Tensor, seq_lens: torch.Tensor, chunk_size: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables int32 [S, at most W] and lengths int32 [S] of the last tokens' chunks. A row without tokens stays one."""
    starts = (seq_lens - 1).clamp(min=0) // chunk_size * chunk_size
    width = min(tables.shape[1], chunk_size // block_size)
    places = torch.arange(width, device=tables.device) + (starts // block_size)[:, None]
    return tables.gather(1, places.clamp(max=tables.shape[1] - 1)), seq_lens - starts


def prefill_in_chunks(
    tables: IntArray, seq_lens: IntArray, query_lens: IntArray, chunk_size: int, block_size: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Rows of one chunk each, in the order of their queries: tables [R, at most W], lengths [R], where queries begin [R + 1].

    tables [S, W], seq_lens [S], query_lens [S]: of the rows with several queries.
    """
    rows, chunks, ends, counts = [], [], [], []
    for row, (end, count) in enumerate(zip(seq_lens.tolist(), query_lens.tolist(), strict=True)):
        at = end - count
        while at < end:
            chunk = at // chunk_size
            stop = min((chunk + 1) * chunk_size, end)
            rows.append(row)
            chunks.append(chunk)
            ends.append(stop - chunk * chunk_size)
            counts.append(stop - at)
            at = stop
    first = np.array(chunks) * (chunk_size // block_size)
    width = min(tables.shape[1], chunk_size // block_size)
    places = np.minimum(np.arange(width) + first[:, None], tables.shape[1] - 1)
    locs = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return tables[np.array(rows)[:, None], places], np.array(ends, np.int32), locs
