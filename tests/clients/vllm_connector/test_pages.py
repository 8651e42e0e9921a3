"""Blocks of vLLM's and pages of a pool: copied whole and both ways, however vLLM's tensors lie in memory."""

import numpy as np
import pytest
import torch

from kvkeeper.vllm.device_pages import DevicePages
from kvkeeper.vllm.page_spec import Part, page_offsets
from kvkeeper.vllm.pages import Bytes, HostPages, Pages

NUM_BLOCKS, NUM_PAGES = 5, 7


class HostArena:
    """An arena in the host's memory, as DevicePages needs one."""

    is_on_device = False

    def __init__(self, array: Bytes) -> None:
        self.array = array


def tensors() -> list[Bytes]:
    """One whose blocks lie in one piece, and one with K of all blocks before V of all blocks."""
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 256, (NUM_BLOCKS, 24), np.uint8)
    apart = rng.integers(0, 256, (2, NUM_BLOCKS, 8), np.uint8)
    return [whole, np.moveaxis(apart, 1, 0)]


def parts_of(found: list[Bytes]) -> list[Part]:
    return [Part(str(number), "u1", tensor.shape[1:], tensor[0].nbytes) for number, tensor in enumerate(found)]


def make(kind: str, arena: Bytes, found: list[Bytes]) -> Pages:
    if kind == "host":
        return HostPages(arena, found, parts_of(found))
    return DevicePages(HostArena(arena), [torch.from_numpy(tensor) for tensor in found], parts_of(found))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["host", "torch"])
def test_blocks_go_out_and_come_back_elsewhere(kind: str) -> None:
    found = tensors()
    before = [tensor.copy() for tensor in found]
    _, page_bytes = page_offsets(parts_of(found))
    arena = np.zeros(NUM_PAGES * page_bytes + 9, np.uint8)  # what is no whole page is left alone
    pages = make(kind, arena, found)
    pages.store([4, 0], [2, 6])
    written = arena[:-9].reshape(NUM_PAGES, page_bytes)
    assert [int(page.any()) for page in written] == [0, 0, 1, 0, 0, 0, 1]
    assert not arena[-9:].any()
    pages.load([6, 2], [1, 3])
    for tensor, old in zip(found, before, strict=True):
        np.testing.assert_array_equal(tensor[[1, 3]], old[[0, 4]])
        np.testing.assert_array_equal(tensor[[0, 2, 4]], old[[0, 2, 4]])


@pytest.mark.parametrize("kind", ["host", "torch"])
def test_both_kinds_write_the_same_page(kind: str) -> None:
    found = tensors()
    offsets, page_bytes = page_offsets(parts_of(found))
    arena = np.zeros(NUM_PAGES * page_bytes, np.uint8)
    make(kind, arena, found).store([3], [5])
    page = arena.reshape(NUM_PAGES, page_bytes)[5]
    for tensor, offset in zip(found, offsets, strict=True):
        block = tensor[3].reshape(-1)
        np.testing.assert_array_equal(page[offset : offset + len(block)], block)


@pytest.mark.parametrize("kind", ["host", "torch"])
def test_many_blocks_go_in_several_gathers(kind: str) -> None:
    source = np.random.default_rng(1).integers(0, 256, (200, 16), np.uint8)
    found = [source.copy()]
    arena = np.zeros(200 * 16, np.uint8)
    make(kind, arena, found).store(range(200), range(199, -1, -1))
    np.testing.assert_array_equal(arena.reshape(200, 16), source[::-1])
