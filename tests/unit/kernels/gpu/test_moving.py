"""store_kv and copy_blocks on the Triton path against their references, interpreted."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.copy_blocks import copy_blocks, independent_runs, move_blocks
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.store_kv import store_kv
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.worlds import make_world

pytestmark = pytest.mark.each_value


def same_bytes(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def tokens(num_tokens, world):
    heads, head_dim, dtype = world.layout.num_kv_heads, world.layout.head_dim, world.layout.dtype
    qkv = torch.randn(num_tokens, 4, heads, head_dim).to(dtype)  # strided, as a fused projection gives them
    return qkv[:, 1], qkv[:, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "index"), [(80, torch.int32), (64, torch.int64)])
def test_store_writes_exactly_the_named_slots(dtype, head_dim, index):
    world, expected = (make_world([9], head_dim=head_dim, dtype=dtype) for _ in range(2))
    k, v = tokens(5, world)
    slots = torch.tensor([3, -1, 16, 9, -7], dtype=index)
    store_kv(*on_cuda(k, v, world.layer, slots))
    reference.store_kv(k, v, expected.layer, slots)
    assert same_bytes(world.arena, expected.arena)
    assert torch.equal(world.layer[4, 1, 0], v[2])


def test_a_program_of_several_tokens_stores_what_one_of_one_does(monkeypatch):
    monkeypatch.setattr("kvkeeper.kernels.gpu.store_kv.MANY_STORED", 1)
    monkeypatch.setattr("kvkeeper.kernels.gpu.store_kv._MOST_COLS", 32)
    world, expected = make_world([9], head_dim=20), make_world([9], head_dim=20)
    k, v = tokens(6, world)
    slots = torch.tensor([3, -1, 16, 9, 10, 0])
    store_kv(*on_cuda(k, v, world.layer, slots))
    reference.store_kv(k, v, expected.layer, slots)
    assert same_bytes(world.arena, expected.arena)


@pytest.mark.parametrize("slots", [[], [-1, -7]])
def test_only_padding_writes_nothing(slots):
    world = make_world([3])
    before = world.arena.clone()
    store_kv(*on_cuda(*tokens(len(slots), world), world.layer, torch.tensor(slots, dtype=torch.int64)))
    assert same_bytes(before, world.arena)


def test_a_single_head_may_have_any_stride():
    """A transposed tensor of one head is contiguous to torch, whatever the stride of that head."""
    world, expected = make_world([9], num_kv_heads=1), make_world([9], num_kv_heads=1)
    k, v = (torch.randn(1, 5, world.layout.head_dim).transpose(0, 1).contiguous() for _ in range(2))
    assert k.stride()[1:] != world.layer.stride()[3:]
    slots = torch.tensor([3, -1, 16, 9, -7])
    store_kv(*on_cuda(k, v, world.layer, slots))
    reference.store_kv(k, v, expected.layer, slots)
    assert same_bytes(world.arena, expected.arena)


def test_store_refuses_heads_with_gaps():
    world = make_world([3])
    k, v = tokens(2, world)
    with pytest.raises(KernelArgumentError, match="contiguous"):
        store_kv(*on_cuda(k, v.transpose(1, 2).contiguous().transpose(1, 2), world.layer, torch.tensor([0, 1])))


@pytest.mark.parametrize("block", [(3, 5), (2, 3000)])
@pytest.mark.parametrize("pairs", [[(1, 2)], [(1, 2), (2, 3), (3, 4)], [(1, 2), (3, 1), (5, 4), (5, 3)], []])
def test_copies_run_in_order(pairs, block):
    arena = torch.randn(6, *block).half()
    expected = arena.clone()
    reference.copy_blocks(expected, pairs)
    copy_blocks(*on_cuda(arena), pairs)
    assert torch.equal(arena, expected)


def test_one_launch_holds_no_pair_that_must_come_after_another():
    assert list(independent_runs([(1, 2), (1, 3), (4, 1), (4, 5)], at_once=True)) == [[(1, 2), (1, 3)], [(4, 1), (4, 5)]]
    assert list(independent_runs([(1, 2), (4, 1)])) == [[(1, 2), (4, 1)]]


@pytest.mark.parametrize("block_bytes", [24, 40, 10_000])
def test_blocks_move_between_two_memories_in_one_launch(block_bytes):
    """The host's, whose blocks are those of several ranks in turn, and the device's."""
    device = torch.randint(0, 256, (6, block_bytes), dtype=torch.uint8)
    host = torch.randint(0, 256, (5, 2, block_bytes), dtype=torch.uint8)
    expected, of_other = host[:, 1].clone(), host[:, 0].clone()
    pairs = [(5, 0), (1, 4), (2, 2)]
    for source, target in pairs:
        expected[target] = device[source]
    move_blocks(*on_cuda(device), host[:, 1], pairs)
    assert torch.equal(host[:, 1], expected) and torch.equal(host[:, 0], of_other)
    move_blocks(host[:, 1], *on_cuda(device), [(0, 3)])
    assert torch.equal(device[3], device[5])


def test_a_move_that_is_not_one_is_refused():
    device, host = on_cuda(torch.zeros(4, 8))[0], torch.zeros(3, 8)
    for pairs in ([(4, 0)], [(0, 3)], [(-1, 0)], [(0, 1), (2, 1)]):
        with pytest.raises(KernelArgumentError, match="pairs"):
            move_blocks(device, host, pairs)
    with pytest.raises(KernelArgumentError, match="bytes"):
        move_blocks(device, torch.zeros(3, 9), [(0, 0)])
    with pytest.raises(KernelArgumentError, match="contiguous"):
        move_blocks(device, torch.zeros(3, 2, 4).transpose(1, 2), [(0, 0)])
    with pytest.raises(UnsupportedDeviceError):
        move_blocks(host, host, [(0, 1)])
