"""store_kv and copy_blocks on all paths against their references, and moves between two memories."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.kernels import reference
from kvkeeper.kernels.copy_blocks import copy_blocks, independent_runs, move_blocks
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.store_kv import plan_store, store_kv
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.worlds import make_world


def same_bytes(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def tokens(num_tokens, world):
    heads, head_dim, dtype = world.layout.num_kv_heads, world.layout.head_dim, world.layout.dtype
    qkv = torch.randn(num_tokens, 4, heads, head_dim).to(dtype)  # strided, as a fused projection gives them
    return qkv[:, 1], qkv[:, 3]


def store_kv_to(k, v, layer, slots):
    store_kv(k, v, layer, slots)
    return layer


def check_store(path, k, v, slots, **shape):
    """Exactly the named slots are written."""
    world, expected = (make_world([9], dtype=k.dtype, **shape) for _ in range(2))
    path(store_kv_to)(k, v, world.layer, slots)
    reference.store_kv(k, v, expected.layer, slots)
    assert same_bytes(world.arena, expected.arena)
    return world


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "index"), [(8, torch.int64), (80, torch.int32), (64, torch.int64)])
def test_store_writes_exactly_the_named_slots(path, dtype, head_dim, index):
    k, v = tokens(5, make_world([9], head_dim=head_dim, dtype=dtype))
    world = check_store(path, k, v, torch.tensor([3, -1, 16, 9, -7], dtype=index), head_dim=head_dim)
    assert torch.equal(world.layer[4, 1, 0], v[2])


def test_a_plan_made_on_one_layer_serves_the_others():
    world = make_world([9])
    k, v = tokens(3, world)
    slots = torch.tensor([4, 5, 15], dtype=torch.int32)
    plan = plan_store(slots, world.layer)
    store_kv(k, v, world.arena[:, 2], slots, plan)
    assert torch.equal(world.arena[[1, 1, 3], 2, 0, [0, 1, 3]], k)
    assert torch.equal(world.arena[[1, 1, 3], 2, 1, [0, 1, 3]], v)
    assert bool(world.arena[:, 0].isnan().all())


def test_a_program_of_several_tokens_stores_what_one_of_one_does(path, monkeypatch):
    monkeypatch.setattr("kvkeeper.kernels.gpu.store_kv.MANY_STORED", 1)
    monkeypatch.setattr("kvkeeper.kernels.gpu.store_kv._MOST_COLS", 32)
    k, v = tokens(6, make_world([9], head_dim=20))
    check_store(path, k, v, torch.tensor([3, -1, 16, 9, 10, 0]), head_dim=20)


@pytest.mark.parametrize("slots", [[], [-1, -7]])
def test_only_padding_writes_nothing(path, slots):
    world = make_world([3])
    before = world.arena.clone()
    path(store_kv_to)(*tokens(len(slots), world), world.layer, torch.tensor(slots, dtype=torch.int64))
    assert same_bytes(before, world.arena)


def test_a_single_head_may_have_any_stride(path):
    """A transposed tensor of one head is contiguous to torch, whatever the stride of that head."""
    layer = make_world([9], num_kv_heads=1).layer
    k, v = (torch.randn(1, 5, layer.shape[-1]).transpose(0, 1).contiguous() for _ in range(2))
    assert k.stride()[1:] != layer.stride()[3:]
    check_store(path, k, v, torch.tensor([3, -1, 16, 9, -7]), num_kv_heads=1)


def test_store_refuses_arguments_that_do_not_fit():
    world = make_world([3])
    k, v = tokens(2, world)
    with pytest.raises(KernelArgumentError, match="slot"):
        store_kv(k, v, world.layer, torch.tensor([0, world.layer.shape[0] * 4]))
    with pytest.raises(KernelArgumentError, match="k and v must be"):
        store_kv(k, v[:1], world.layer, torch.tensor([0, 1]))
    with pytest.raises(KernelArgumentError, match="bfloat16"):
        store_kv(k, v.bfloat16(), world.layer, torch.tensor([0, 1]))
    with pytest.raises(KernelArgumentError, match="block-major"):
        store_kv(k, v, world.layer.transpose(2, 3).contiguous().transpose(2, 3), torch.tensor([0, 1]))
    with pytest.raises(UnsupportedDeviceError, match="meta"):
        store_kv(k, v, world.layer.to("meta"), torch.tensor([0, 1]))
    with pytest.raises(KernelArgumentError, match="contiguous"):
        store_kv(*on_cuda(k, v.transpose(1, 2).contiguous().transpose(1, 2), world.layer, torch.tensor([0, 1])))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=12))
def test_any_copies_run_in_order(pairs):
    arena = torch.arange(6 * 4).view(6, 2, 2)
    expected = arena.clone()
    reference.copy_blocks(expected, pairs)
    copy_blocks(arena, pairs)
    assert torch.equal(arena, expected)


def copied(arena, pairs):
    copy_blocks(arena, pairs)
    return arena


@pytest.mark.parametrize("block", [(3, 5), (2, 3000)])
@pytest.mark.parametrize("pairs", [[(1, 2)], [(1, 2), (2, 3), (3, 4)], [(1, 2), (3, 1), (5, 4), (5, 3)], []])
def test_copies_run_in_order(path, pairs, block):
    arena = torch.randn(6, *block).half()
    expected = arena.clone()
    reference.copy_blocks(expected, pairs)
    path(copied)(arena, pairs)
    assert torch.equal(arena, expected)


def test_one_launch_holds_no_pair_that_must_come_after_another():
    assert list(independent_runs([(1, 2), (1, 3), (4, 1), (4, 5)], at_once=True)) == [[(1, 2), (1, 3)], [(4, 1), (4, 5)]]
    assert list(independent_runs([(1, 2), (4, 1)])) == [[(1, 2), (4, 1)]]


@pytest.mark.parametrize("pair", [(1, 0), (-1, 1), (1, 6), (6, 1)])
def test_copy_refuses_the_null_block_and_ids_outside(pair):
    with pytest.raises(KernelArgumentError, match="pairs"):
        copy_blocks(torch.zeros(6, 2), [pair])


@pytest.mark.parametrize("block_bytes", [24, 40, 10_000])
def test_blocks_move_between_two_memories_in_one_launch(block_bytes, monkeypatch):
    """The host's, whose blocks are those of several ranks in turn, and the device's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
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
