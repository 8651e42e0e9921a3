"""rotary_store_kv on a CPU against the references of its two parts, on both paths."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.rotary_store_kv import rotary_store_kv
from tests.unit.kernels.worlds import make_world

pytestmark = pytest.mark.usefixtures("kernel_path")
NUM_HEADS, NUM_KV_HEADS = 6, 2


def rows(num_tokens, head_dim, dtype=torch.float32):
    """qk and v as slices of a fused projection, and the tables of their positions."""
    qkv = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim).to(dtype).unflatten(1, (-1, head_dim))
    angle = torch.randn(num_tokens, head_dim // 2)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1).to(dtype), torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    return qkv[:, : NUM_HEADS + NUM_KV_HEADS], qkv[:, NUM_HEADS + NUM_KV_HEADS :], cos, sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 16, 80, 256])
@pytest.mark.parametrize("slots", [[3, 0, 17, 9, 10], [5], [3, -1, 17, 9, -7]], ids=["all", "one", "padding"])
def test_queries_are_turned_and_exactly_the_named_slots_written(slots, head_dim, dtype):
    world = make_world([9], head_dim=head_dim, dtype=dtype)
    expected = world.arena.clone()
    qk, v, cos, sin = rows(len(slots), head_dim, dtype)
    turned = reference.rotary(qk, cos, sin)
    reference.store_kv(turned[:, NUM_HEADS:], v, expected[:, 1], torch.tensor(slots))
    found = rotary_store_kv(qk, v, cos, sin, world.layer, torch.tensor(slots))
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, turned[:, :NUM_HEADS], **tolerance)
    torch.testing.assert_close(world.arena, expected, equal_nan=True, **tolerance)
    assert torch.equal(world.arena.isnan(), expected.isnan())


def test_with_a_norm_queries_and_keys_are_exactly_those_of_the_norm_before_it():
    worlds = [make_world([9], head_dim=16) for _ in range(2)]
    qk, v, cos, sin = rows(3, 16)
    weight, slots = torch.randn(NUM_HEADS + NUM_KV_HEADS, 16), torch.tensor([3, 0, 17])
    apart = rotary_store_kv(rms_norm(qk, weight, 1e-5)[0], v, cos, sin, worlds[0].layer, slots)
    together = rotary_store_kv(qk, v, cos, sin, worlds[1].layer, slots, norm=(weight, 1e-5))
    assert torch.equal(together, apart)
    assert torch.equal(worlds[1].arena.view(torch.uint8), worlds[0].arena.view(torch.uint8))


def test_without_tokens_nothing_is_written():
    world = make_world([9], head_dim=8)
    before = world.arena.clone()
    assert rotary_store_kv(*rows(0, 8), world.layer, torch.zeros(0, dtype=torch.long)).shape == (0, NUM_HEADS, 8)
    assert torch.equal(world.arena.view(torch.uint8), before.view(torch.uint8))


def test_refusals():
    world = make_world([9], head_dim=8)
    qk, v, cos, sin = rows(3, 8)
    before = world.arena.clone()
    for arguments in (
        (qk, v, cos, sin, world.layer, torch.tensor([1, 2, 1000])),
        (qk, v, cos, sin, world.layer, torch.tensor([1, 2])),
        (qk, v[:, :1], cos, sin, world.layer, torch.tensor([1, 2, 3])),
        (qk, v, cos[:2], sin[:2], world.layer, torch.tensor([1, 2, 3])),
        (qk[:, :, :4], v, cos, sin, world.layer, torch.tensor([1, 2, 3])),
    ):
        with pytest.raises(KernelArgumentError):
            rotary_store_kv(*arguments)
    assert torch.equal(world.arena.view(torch.uint8), before.view(torch.uint8))
