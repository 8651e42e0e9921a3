"""rms_norm, rotary, rotary_store_kv and the gates on the Triton path against their references, interpreted."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.gates import clamped_swiglu, gelu_and_mul, silu_and_mul
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.activations.rotary import rotary
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.rotary_store_kv import rotary_store_kv
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.worlds import make_world

# 2 to a large power is inf, and a number divided by it 0: as on a device, which does not warn.
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.each_value]
FLOATS = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.float16: {"rtol": 1e-3, "atol": 1e-3}}


def close(found, expected):
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, **TOLERANCE[expected.dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 8), (37, 100), (3, 2, 16), (2, 3000), (0, 8)])
def test_rms_norm_with_and_without_residual(dtype, shape):
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for given in (None, residual):
        expected, expected_sum = reference.rms_norm(x.clone(), weight, 1e-5, given)
        changed = x.clone()
        found, kept = rms_norm(*on_cuda(changed, weight), 1e-5, None if given is None else on_cuda(given)[0])
        close(found, expected)
        assert torch.equal(changed, expected_sum)
        assert kept.data_ptr() == changed.data_ptr()


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_with_a_weight_per_head_of_a_slice(dtype):
    x = torch.randn(9, 5, 96).to(dtype)[:, 1:4]
    weight = torch.randn(3, 96).to(dtype)
    close(rms_norm(*on_cuda(x, weight), 1e-6)[0], reference.rms_norm(x, weight, 1e-6)[0])


def tables(num_tokens, head_dim, dtype):
    angle = torch.randn(num_tokens, head_dim // 2)
    return (torch.cat(pair, -1).to(dtype) for pair in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin())))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("head_dim", "num_heads"), [(2, 1), (80, 3), (64, 18)])
def test_rotary_on_a_strided_slice(dtype, head_dim, num_heads):
    x = torch.randn(5, 2 * num_heads, head_dim).to(dtype)[:, :num_heads]
    cos, sin = tables(5, head_dim, dtype)
    close(rotary(*on_cuda(x, cos, sin)), reference.rotary(x, cos, sin))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (3, 1), (6, 6)])
def test_rotary_and_store_in_one_pass(dtype, num_heads, num_kv_heads):
    world, expected = (make_world([9], head_dim=20, num_kv_heads=num_kv_heads, dtype=dtype) for _ in range(2))
    qkv = torch.randn(5, num_heads + 2 * num_kv_heads, 20).to(dtype)
    qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    cos, sin = tables(5, 20, dtype)
    slots = torch.tensor([3, -1, 16, 9, -7])
    for path in ([qk, v, cos, sin, expected.layer, slots], on_cuda(qk, v, cos, sin, world.layer, slots)):
        close(rotary_store_kv(*path), reference.rotary(qk, cos, sin)[:, :num_heads])
    torch.testing.assert_close(world.arena, expected.arena, equal_nan=True, **TOLERANCE[dtype])
    assert torch.equal(world.layer[4, 1, 0], v[2])
    assert torch.equal(world.arena.isnan(), expected.arena.isnan())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (3, 1)])
def test_the_norm_of_queries_and_keys_in_the_same_pass(dtype, num_heads, num_kv_heads):
    world, expected = (make_world([9], head_dim=20, num_kv_heads=num_kv_heads, dtype=dtype) for _ in range(2))
    qkv = torch.randn(5, num_heads + 2 * num_kv_heads, 20).to(dtype) * 3
    qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    weight = torch.randn(num_heads + num_kv_heads, 20).to(dtype)
    cos, sin = tables(5, 20, dtype)
    slots = torch.tensor([3, -1, 16, 9, -7])
    turned = reference.rotary(reference.rms_norm(qk, weight, 1e-3)[0], cos, sin)
    reference.store_kv(turned[:, num_heads:], v, expected.layer, slots)
    found = rotary_store_kv(*on_cuda(qk, v, cos, sin, world.layer, slots), None, (weight, 1e-3))
    tolerance = {"rtol": 2e-3, "atol": 4e-3} if dtype is torch.float16 else TOLERANCE[dtype]  # rounded once more
    torch.testing.assert_close(found.as_subclass(torch.Tensor), turned[:, :num_heads], **tolerance)
    torch.testing.assert_close(world.arena, expected.arena, equal_nan=True, **tolerance)
    with pytest.raises(KernelArgumentError, match="norm"):
        rotary_store_kv(*on_cuda(qk, v, cos, sin, world.layer, slots), None, (weight[1:], 1e-3))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 4200), (0, 8)])
def test_gates(dtype, shape):
    gate_up = torch.randn(shape).to(dtype) * 4
    close(silu_and_mul(*on_cuda(gate_up)), reference.silu_and_mul(gate_up))
    close(gelu_and_mul(*on_cuda(gate_up)), reference.gelu_and_mul(gate_up))
    close(clamped_swiglu(*on_cuda(gate_up), 1.702, 3.0), reference.clamped_swiglu(gate_up, 1.702, 3.0))


def test_gates_and_norms_far_out_stay_finite():
    far = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    for gate in (silu_and_mul, gelu_and_mul):
        assert torch.equal(gate(*on_cuda(far)).as_subclass(torch.Tensor), torch.tensor([[0.0, 0.0, 200.0, 1e4]]))


def test_refusals():
    x = torch.randn(3, 2, 8)
    for call in (
        lambda: rms_norm(*on_cuda(x.transpose(1, 2), torch.ones(2)), 1e-5),
        lambda: silu_and_mul(*on_cuda(x.transpose(1, 2))),
        lambda: rotary_store_kv(*on_cuda(x, x, x[:, 0], x[:, 0], make_world([3]).layer, torch.tensor([0, 1, 2]))),
    ):
        with pytest.raises(KernelArgumentError):
            call()
