"""rotary_store_kv on all paths against the references of its two parts."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.rotary_store_kv import rotary_store_kv
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.worlds import make_world

TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def tolerance_of(path, dtype):
    return {"rtol": 2e-6, "atol": 2e-6} if path.is_device and dtype is torch.float32 else TOLERANCE[dtype]


def rows(num_tokens, head_dim, dtype=torch.float32, num_heads=6, num_kv_heads=2):
    """qk and v as slices of a fused projection, and the tables of their positions."""
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype).unflatten(1, (-1, head_dim))
    angle = torch.randn(num_tokens, head_dim // 2)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1).to(dtype), torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    return qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :], cos, sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads"), [(2, 6, 2), (16, 3, 1), (20, 6, 6), (80, 8, 2), (256, 6, 2)]
)
@pytest.mark.parametrize("slots", [[3, 0, 17, 9, 10], [5], [3, -1, 16, 9, -7]], ids=["all", "one", "padding"])
def test_queries_are_turned_and_exactly_the_named_slots_written(path, slots, head_dim, num_heads, num_kv_heads, dtype):
    world = make_world([9], head_dim=head_dim, num_kv_heads=num_kv_heads, dtype=dtype)
    expected = world.arena.clone()
    qk, v, cos, sin = rows(len(slots), head_dim, dtype, num_heads, num_kv_heads)
    turned = reference.rotary(qk, cos, sin)
    reference.store_kv(turned[:, num_heads:], v, expected[:, 1], torch.tensor(slots))
    found = path(rotary_store_kv)(qk, v, cos, sin, world.layer, torch.tensor(slots))
    tolerance = tolerance_of(path, dtype)
    torch.testing.assert_close(found, turned[:, :num_heads], **tolerance)
    torch.testing.assert_close(world.arena, expected, equal_nan=True, **tolerance)
    assert torch.equal(world.arena.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (3, 1)])
def test_the_norm_of_queries_and_keys_in_the_same_pass(path, dtype, num_heads, num_kv_heads):
    world, expected = (make_world([9], head_dim=20, num_kv_heads=num_kv_heads, dtype=dtype) for _ in range(2))
    qk, v, cos, sin = rows(5, 20, dtype, num_heads, num_kv_heads)
    qk, weight, slots = qk * 3, torch.randn(num_heads + num_kv_heads, 20).to(dtype), torch.tensor([3, -1, 16, 9, -7])
    turned = reference.rotary(reference.rms_norm(qk, weight, 1e-3)[0], cos, sin)
    reference.store_kv(turned[:, num_heads:], v, expected.layer, slots)
    found = path(rotary_store_kv)(qk, v, cos, sin, world.layer, slots, None, (weight, 1e-3))
    tolerance = {"rtol": 2e-3, "atol": 4e-3} if dtype is torch.float16 else tolerance_of(path, dtype)  # rounded once more
    torch.testing.assert_close(found, turned[:, :num_heads], **tolerance)
    torch.testing.assert_close(world.arena, expected.arena, equal_nan=True, **tolerance)
    with pytest.raises(KernelArgumentError, match="norm"):
        path(rotary_store_kv)(qk, v, cos, sin, world.layer, slots, None, (weight[1:], 1e-3))


@pytest.mark.usefixtures("kernel_path")
def test_on_a_cpu_they_are_exactly_those_of_the_norm_before_it():
    worlds = [make_world([9], head_dim=16) for _ in range(2)]
    qk, v, cos, sin = rows(3, 16)
    weight, slots = torch.randn(8, 16), torch.tensor([3, 0, 17])
    apart = rotary_store_kv(rms_norm(qk, weight, 1e-5)[0], v, cos, sin, worlds[0].layer, slots)
    together = rotary_store_kv(qk, v, cos, sin, worlds[1].layer, slots, norm=(weight, 1e-5))
    assert torch.equal(together, apart)
    assert torch.equal(worlds[1].arena.view(torch.uint8), worlds[0].arena.view(torch.uint8))


def test_without_tokens_nothing_is_written(path):
    world = make_world([9], head_dim=8)
    before = world.arena.clone()
    assert path(rotary_store_kv)(*rows(0, 8), world.layer, torch.zeros(0, dtype=torch.long)).shape == (0, 6, 8)
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
    x = torch.randn(3, 2, 8)
    with pytest.raises(KernelArgumentError):
        rotary_store_kv(*on_cuda(x, x, x[:, 0], x[:, 0], make_world([3]).layer, torch.tensor([0, 1, 2])))
