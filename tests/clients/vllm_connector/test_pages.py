"""Blocks of vLLM's and pages of a pool: copied whole and both ways, however vLLM's tensors lie in memory."""

import numpy as np
import pytest
import torch

from kvkeeper.vllm.device_pages import DevicePages, list_parts
from kvkeeper.vllm.page_spec import Part, page_offsets
from kvkeeper.vllm.pages import Bytes, HostPages, Pages
from kvkeeper.vllm.settings import WrongSettings

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


def told_of(found: list[Bytes]) -> list[Part]:
    return [Part(str(number), "u1", tensor.shape[1:], tensor[0].nbytes) for number, tensor in enumerate(found)]


def make(kind: str, arena: Bytes, found: list[Bytes]) -> Pages:
    if kind == "host":
        return HostPages(arena, found, told_of(found))
    return DevicePages(HostArena(arena), [torch.from_numpy(tensor) for tensor in found], told_of(found))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["host", "torch"])
def test_blocks_go_out_and_come_back_elsewhere(kind: str) -> None:
    found = tensors()
    before = [tensor.copy() for tensor in found]
    _, page_bytes = page_offsets(told_of(found))
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
    offsets, page_bytes = page_offsets(told_of(found))
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


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)


@pytest.mark.parametrize(
    ("tensor", "is_one_piece"),
    [
        (filled((NUM_BLOCKS, 2, 4, 8)), True),
        (filled((NUM_BLOCKS, 2, 4, 8), torch.bfloat16), True),
        (filled((NUM_BLOCKS, 2, 4, 8)).to(torch.float8_e4m3fn), True),
        (filled((2, NUM_BLOCKS, 4, 2, 8)), False),  # K of all blocks before V of all blocks
        (filled((NUM_BLOCKS, 4, 2, 8)).permute(0, 2, 1, 3), True),  # heads first for the kernel, tokens first in memory
        (filled((NUM_BLOCKS * 2, 2, 2, 8)), True),  # a block is two of the kernel's
    ],
    ids=["packed", "bfloat16", "8 bits", "apart", "permuted", "halves"],
)
def test_vllms_tensors_become_blocks_of_bytes_that_keep_every_number(tensor: torch.Tensor, is_one_piece: bool) -> None:
    before = tensor.clone()
    (found,), (part,) = list_parts({"layer": tensor}, NUM_BLOCKS)
    assert (found.shape[0], found.dtype) == (NUM_BLOCKS, torch.uint8)
    assert found.data_ptr() == tensor.data_ptr(), "no copy"
    assert (found.dim() == 2) is is_one_piece
    assert part.num_bytes * NUM_BLOCKS == tensor.numel() * tensor.element_size()
    arena = np.zeros(NUM_PAGES * page_offsets([part])[1], np.uint8)
    pages = HostPages(arena, [found.numpy()], [part])
    pages.store([4, 1], [2, 6])
    found.zero_()
    pages.load([2, 6], [4, 1])
    blocks, wanted = (list_parts({"layer": one}, NUM_BLOCKS)[0][0] for one in (tensor, before))
    assert torch.equal(blocks[[1, 4]], wanted[[1, 4]])
    assert not blocks[[0, 2, 3]].any()


def test_layers_that_share_a_tensor_are_one_part() -> None:
    tensor = filled((NUM_BLOCKS, 8))
    tensors_of, parts = list_parts({"a": tensor, "b": tensor, "c": filled((NUM_BLOCKS, 8))}, NUM_BLOCKS)
    assert ([part.name for part in parts], len(tensors_of)) == (["a", "c"], 2)


def test_the_order_in_memory_is_part_of_what_a_page_means() -> None:
    plain = filled((NUM_BLOCKS, 2, 4, 8))
    permuted = filled((NUM_BLOCKS, 4, 2, 8)).permute(0, 2, 1, 3)
    assert plain.shape == permuted.shape
    ((one,), (other,)) = (list_parts({"layer": tensor}, NUM_BLOCKS)[1] for tensor in (plain, permuted))
    assert one != other


@pytest.mark.parametrize("cache", [filled((3, 7, 8)), [filled((NUM_BLOCKS, 8))]], ids=["no blocks", "a list of states"])
def test_tensors_in_which_blocks_cannot_be_told_are_refused(cache: object) -> None:
    with pytest.raises(WrongSettings):
        list_parts({"layer": cache}, NUM_BLOCKS)  # type: ignore[dict-item]
