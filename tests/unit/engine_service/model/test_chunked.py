"""Attention in chunks: rows and lengths against the plain definition, token by token."""

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from kvkeeper.engine_service.model.chunked import check_chunks, decode_in_chunks, prefill_in_chunks

SIZE, WIDTH = 4, 12  # tokens of a block, entries of a table


def keys_of(table: np.ndarray, length: int) -> list[int]:
    """The slots that a query behind so many keys reads through a table."""
    return [int(table[at // SIZE]) * SIZE + at % SIZE for at in range(length)]


@pytest.mark.parametrize("chunk", [4, 8, 20])
def test_each_query_reads_the_slots_of_its_chunk(chunk: int) -> None:
    generator = np.random.default_rng(chunk)
    tables = generator.permutation(5 * WIDTH).reshape(5, WIDTH).astype(np.int32) + 1
    lens, counts = np.array([48, 21, 20, 9, 2], np.int32), np.array([48, 3, 20, 2, 2])
    of_rows, ends, locs = prefill_in_chunks(tables, lens, counts, chunk, SIZE)
    assert (of_rows.dtype, ends.dtype, locs.dtype) == (np.int32,) * 3
    found = []
    for row, (end, first, last) in enumerate(zip(ends.tolist(), locs[:-1].tolist(), locs[1:].tolist(), strict=True)):
        found += [keys_of(of_rows[row], end - last + at + 1) for at in range(first, last)]
    expected = [
        keys_of(table, at + 1)[at - at % chunk :]
        for table, length, count in zip(tables, lens.tolist(), counts.tolist(), strict=True)
        for at in range(length - count, length)
    ]
    assert found == expected


@pytest.mark.parametrize("chunk", [4, 8, 20])
def test_a_decoding_row_reads_the_slots_of_its_chunk(chunk: int) -> None:
    lens = np.arange(WIDTH * SIZE + 1, dtype=np.int32)  # the first row is padding
    tables = np.arange(1, len(lens) * WIDTH + 1, dtype=np.int32).reshape(len(lens), WIDTH)
    of_rows, ends = decode_in_chunks(torch.from_numpy(tables), torch.from_numpy(lens), chunk, SIZE)
    assert (of_rows.dtype, ends.dtype, int(ends[0])) == (torch.int32, torch.int32, 0)
    for row, length in enumerate(lens.tolist()[1:], 1):
        last = length - 1
        assert keys_of(of_rows[row].numpy(), int(ends[row])) == keys_of(tables[row], length)[last - last % chunk :]


def test_chunks_that_do_not_begin_with_a_block_are_refused() -> None:
    check_chunks((None, 32, 16), 16)
    with pytest.raises(UnsupportedModelError, match="multiples of --block-size 16"):
        check_chunks((None, 24), 16)
