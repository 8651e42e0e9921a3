"""Blocks that the tiers below the device keep in few bits: the same bytes from both services, and errors within a bound."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.core.values.kv_spec import KvSpec, LayerGroup
from kvkeeper.cache_service.core.values.types import TransferKind
from kvkeeper.cache_service.memory.device.cuda import CudaArena
from kvkeeper.cache_service.memory.host_packing import HostPacking
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.host_blocks import HostBlocks
from tests.support.stand_ins.fake_cuda import FakeCuda

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
STEPS = {"int8": 1 / 127, "int4": 1 / 8, "fp8": 1 / 16}  # between two elements, of the greatest; of fp8 of the number itself


def spec_of(element_type: str = "float32", host: str = "int8", **fields: Any) -> KvSpec:
    values: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "block_size": 5}
    item_bytes = TYPES[element_type].itemsize
    return KvSpec(b"k", "m", item_bytes=item_bytes, element_type=element_type, **values | fields).stored_as(host)


def blocks_of(spec: KvSpec, count: int) -> torch.Tensor:
    """uint8 [count, block_bytes] of random numbers, of another magnitude in each head of each token."""
    rng = np.random.default_rng(3)
    shape = count, spec.num_layers * 2 * spec.block_size * spec.num_kv_heads
    numbers = rng.standard_normal((*shape, spec.head_dim)) * 4.0 ** rng.integers(-4, 4, (*shape, 1))
    return torch.from_numpy(numbers).to(TYPES[spec.element_type]).flatten(1).view(torch.uint8)


def packed_by(spec: KvSpec, blocks: torch.Tensor) -> np.ndarray:
    """uint8 [n, host_block_bytes]."""
    rows = np.zeros((len(blocks), spec.host_block_bytes), np.uint8)
    for row, block in zip(rows, blocks.numpy(), strict=True):
        HostPacking(spec).pack(block, row)
    return rows


@pytest.mark.parametrize("element_type", list(TYPES))
@pytest.mark.parametrize("host", list(STEPS))
def test_both_services_keep_the_same_bytes_and_come_back_within_half_a_step(element_type: str, host: str) -> None:
    spec, dtype = spec_of(element_type, host), TYPES[element_type]
    form = HostBlocks(6, 5, 2, 8, dtype, FORMATS[host])
    blocks = blocks_of(spec, 4)
    packed = form.pack(blocks)
    assert form.block_bytes == spec.host_block_bytes
    np.testing.assert_array_equal(packed_by(spec, blocks), packed.numpy())
    back = form.unpack(packed)
    for row, block in zip(packed.numpy(), back.numpy(), strict=True):
        unpacked = np.empty(spec.block_bytes, np.uint8)
        HostPacking(spec).unpack(row, unpacked)
        np.testing.assert_array_equal(unpacked, block)
    exact, rounded = (each.view(dtype).view(4, -1, 8).double() for each in (blocks, back))
    most = exact.abs().amax(-1, keepdim=True)
    scale_up, of_type = 1 + 2**-7, torch.finfo(dtype).eps  # a scale is rounded up; what comes back is rounded to the type
    step = STEPS[host] * most if host != "fp8" else STEPS[host] * 2 * exact.abs() + most * 2**-9 / 448
    if host == "int4":  # the number of the greatest magnitude is 8 steps, and what is opposite to it is cut off at 7
        side = exact.gather(-1, exact.abs().argmax(-1, keepdim=True)).sign()
        exact = torch.maximum(exact * side, -7 * step) * side
    assert ((rounded - exact).abs() <= step / 2 * scale_up + of_type * most).all()
    assert ((rounded - exact).abs() > 0).any()


def test_a_block_takes_few_bits_below_the_device_and_what_cannot_is_kept_as_it_is() -> None:
    spec = spec_of("bfloat16", "int4", head_dim=128, num_kv_heads=8, block_size=16)
    assert spec.host_block_bytes / spec.block_bytes == pytest.approx(66 / 256)
    assert spec_of("bfloat16", "int8", head_dim=128).host_block_bytes / spec_of("bfloat16", head_dim=128).block_bytes < 0.51
    ranks = spec_of(num_ranks=2)
    assert ranks.stored_bytes == 2 * ranks.host_block_bytes
    for kept in (
        spec_of(host="int4", head_dim=6),
        spec_of("bfloat16", head_dim=2),  # as many bytes with its scales, by which an engine tells the two forms apart
        spec_of("float16", num_layers=1, num_kv_heads=1, head_dim=4, block_size=1),  # rounded up to whole 16 bytes
        spec_of(host="auto"),
        KvSpec(b"k", "m", 0, 0, 0, 0, 5, page_bytes=64).stored_as("int8"),
        KvSpec(b"k", "m", 1, 1, 8, 1, 5, scaled_bits=8, element_type="int8").stored_as("int4"),
    ):
        assert (kept.host_kv_dtype, kept.stored_bytes, kept.stored_key) == ("", kept.block_bytes, b"k")
    assert len({spec_of(host=host).stored_key for host in ("auto", "fp8", "int8", "int4")}) == 4


def test_a_block_of_a_group_keeps_the_layers_that_the_largest_group_has() -> None:
    groups = LayerGroup((0, 2), 0), LayerGroup((1,), 3)
    spec = spec_of(groups=groups)
    assert spec.host_block_bytes == 2 * 2 * 5 * 2 * (8 + 2)
    blocks = torch.from_numpy(np.random.default_rng(1).standard_normal((1, 2 * 2 * 5 * 2 * 8)).astype(np.float32))
    np.testing.assert_array_equal(
        packed_by(spec, blocks.view(torch.uint8)),
        HostBlocks(4, 5, 2, 8, torch.float32, FORMATS["int8"]).pack(blocks.view(torch.uint8)).numpy(),
    )


@pytest.mark.parametrize(("dims", "part"), [((8, 16), 8), ((24, 16), 8), ((16, 16), 16), ((6, 16), 2)])
@pytest.mark.parametrize("host", ["int8", "fp8"])
def test_a_block_of_groups_with_heads_of_their_own_is_kept_in_parts_that_all_of_them_have(
    dims: tuple[int, int], part: int, host: str
) -> None:
    """A block does not name its group, so any of them comes back by the same division."""
    own, of_spec = dims
    groups = LayerGroup((0, 2), 0, num_kv_heads=3, head_dim=own), LayerGroup((1,), 3)
    spec = spec_of(host=host, groups=groups, num_kv_heads=1, head_dim=of_spec)
    num_elements = max(2 * 3 * own, of_spec) * 2 * 5
    assert spec.block_bytes == 4 * num_elements
    assert spec.host_block_bytes == -(-num_elements // part * (part + 2) // 16) * 16
    numbers = np.random.default_rng(1).standard_normal((3, num_elements)).astype(np.float32)
    blocks = torch.from_numpy(numbers).view(torch.uint8)
    form = HostBlocks(1, 5, num_elements // part // 5, part, torch.float32, FORMATS[host])
    packed = packed_by(spec, blocks)
    np.testing.assert_array_equal(packed, form.pack(blocks).numpy())
    for row, exact in zip(packed, numbers, strict=True):
        back = np.empty(spec.block_bytes, np.uint8)
        HostPacking(spec).unpack(row, back)
        most = np.abs(exact).reshape(-1, part).max(-1, keepdims=True)
        assert (np.abs(back.view(np.float32) - exact).reshape(-1, part) <= STEPS[host] * most).all()


def test_heads_whose_common_part_is_short_are_kept_as_they_are() -> None:
    groups = LayerGroup((0, 2), 0, num_kv_heads=3, head_dim=9), LayerGroup((1,), 3)
    spec = spec_of(groups=groups, num_kv_heads=1, head_dim=16)
    assert (spec.host_kv_dtype, spec.host_block_bytes) == ("", spec.block_bytes)
    shaped = spec_of(groups=(LayerGroup((0, 2), 0, num_kv_heads=3, head_dim=16), LayerGroup((1,), 3)))
    assert shaped.stored_key != spec_of(groups=(LayerGroup((0, 2), 0), LayerGroup((1,), 3))).stored_key


@pytest.mark.parametrize("host", ["int8", "int4"])
def test_going_down_again_and_again_does_not_add_up(host: str) -> None:
    spec = spec_of("float32", host)
    form = HostBlocks(6, 5, 2, 8, torch.float32, FORMATS[host])
    blocks = blocks_of(spec, 2)
    once = form.unpack(form.pack(blocks))
    twice = form.unpack(form.pack(once))
    again = twice
    for _ in range(20):
        again = form.unpack(form.pack(again))
    assert torch.equal(again, twice), "from the second time on nothing changes"
    most = blocks.view(torch.float32).view(2, -1, 8).abs().amax(-1, keepdim=True)
    assert ((twice.view(torch.float32) - blocks.view(torch.float32)).view(2, -1, 8).abs() <= STEPS[host] * most).all()


@pytest.mark.parametrize("on_device", [False, True])
def test_copies_of_the_service_pack_on_the_way_down_and_unpack_on_the_way_up(tmp_path: Path, on_device: bool) -> None:
    spec = spec_of("bfloat16", "int8")
    num_bytes, hosts = 3 * spec.block_bytes, np.zeros((2, spec.host_block_bytes), np.uint8)
    arena = CudaArena(FakeCuda(tmp_path, "service"), 0, num_bytes) if on_device else SharedMemoryArena(num_bytes)
    blocks = blocks_of(spec, 1)
    arena.write(spec.block_bytes, blocks.numpy().tobytes())
    none = np.empty(0, np.int32)
    kinds = np.array([TransferKind.SWAP_OUT, TransferKind.SWAP_IN], np.int32)
    arena.copy(Copies(none, none, kinds, np.array([1, 1]), np.array([1, 2])), spec.block_bytes, hosts, HostPacking(spec))
    form = HostBlocks(6, 5, 2, 8, torch.bfloat16, FORMATS["int8"])
    assert arena.read(2 * spec.block_bytes, spec.block_bytes) == form.unpack(form.pack(blocks)).numpy().tobytes()
    assert not hosts[0].any()
    arena.close()
