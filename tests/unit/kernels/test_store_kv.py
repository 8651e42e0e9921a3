"""store_kv and copy_blocks against their references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.kernels import reference
from kvkeeper.kernels.copy_blocks import copy_blocks
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.store_kv import plan_store, store_kv
from tests.unit.kernels.worlds import make_world


def tokens(num_tokens, num_heads=2, head_dim=8, dtype=torch.float32):
    qkv = torch.randn(num_tokens, 4 * num_heads * head_dim).to(dtype)  # strided, as a fused projection gives them
    k = qkv[:, num_heads * head_dim : 2 * num_heads * head_dim].view(num_tokens, num_heads, head_dim)
    v = qkv[:, -num_heads * head_dim :].view(num_tokens, num_heads, head_dim)
    return k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_writes_exactly_the_named_slots(dtype):
    world, expected = make_world([9], dtype=dtype), make_world([9], dtype=dtype)
    k, v = tokens(4, dtype=dtype)
    slots = torch.tensor([3, -1, 16, 9])
    store_kv(k, v, world.layer, slots)
    reference.store_kv(k, v, expected.layer, slots)
    assert torch.equal(world.arena.view(torch.uint8), expected.arena.view(torch.uint8))
    assert torch.equal(world.layer[4, 1, 0], v[2])


def test_a_plan_made_on_one_layer_serves_the_others():
    world = make_world([9])
    k, v = tokens(3)
    slots = torch.tensor([4, 5, 15], dtype=torch.int32)
    plan = plan_store(slots, world.layer)
    store_kv(k, v, world.arena[:, 2], slots, plan)
    assert torch.equal(world.arena[[1, 1, 3], 2, 0, [0, 1, 3]], k)
    assert torch.equal(world.arena[[1, 1, 3], 2, 1, [0, 1, 3]], v)
    assert bool(world.arena[:, 0].isnan().all())


def test_only_padding_writes_nothing():
    world = make_world([3])
    before = world.arena.clone()
    store_kv(*tokens(2), world.layer, torch.tensor([-1, -7]))
    assert torch.equal(before.view(torch.uint8), world.arena.view(torch.uint8))


def test_store_refuses_arguments_that_do_not_fit():
    world = make_world([3])
    k, v = tokens(2)
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


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=12))
def test_copies_run_in_order(pairs):
    arena = torch.arange(6 * 4).view(6, 2, 2)
    expected = arena.clone()
    reference.copy_blocks(expected, pairs)
    copy_blocks(arena, pairs)
    assert torch.equal(arena, expected)


def test_a_chain_of_copies_carries_the_first_block_to_the_end():
    arena = torch.arange(5).view(5, 1).clone()
    copy_blocks(arena, [(1, 2), (2, 3), (3, 4)])
    assert arena.flatten().tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("pair", [(1, 0), (-1, 1), (1, 6), (6, 1)])
def test_copy_refuses_the_null_block_and_ids_outside(pair):
    with pytest.raises(KernelArgumentError, match="pairs"):
        copy_blocks(torch.zeros(6, 2), [pair])
