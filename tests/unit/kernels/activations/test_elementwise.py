"""rms_norm, rotary and the gates against their references, on all paths."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.add import add
from kvkeeper.kernels.activations.gates import clamped_swiglu, gelu_and_mul, silu_and_mul, square_of_relu, weigh_by_sigmoid
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.activations.rotary import rotary
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from tests.unit.kernels.gpu.pretend import on_cuda

# 2 to a large power is inf, and a number divided by it 0: as on a device, which does not warn.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def close(path, found, expected, rtol=1e-6):
    if expected.dtype is torch.float16:
        tolerance = {"rtol": 1e-3 if path.is_device else 2e-3, "atol": 1e-3}  # torch rounds some gates once more
    else:
        tolerance = {"rtol": 2e-6, "atol": 2e-6} if path.is_device else {"rtol": rtol, "atol": 2e-6}
    torch.testing.assert_close(found, expected, **tolerance)


@dtypes
@pytest.mark.parametrize("shape", [(1, 8), (37, 100), (3, 2, 16), (2, 3000), (0, 8)])
def test_rms_norm_with_and_without_residual(path, dtype, shape):
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for given in (None, residual):
        expected, expected_sum = reference.rms_norm(x.clone(), weight, 1e-5, given)
        changed = x.clone()
        found, kept = path(rms_norm)(changed, weight, 1e-5, given)
        close(path, found, expected)
        assert torch.equal(kept, expected_sum)
        if path.is_device:
            assert kept.data_ptr() == changed.data_ptr()


@dtypes
def test_rms_norm_with_a_weight_per_head_of_a_slice(path, dtype):
    x = torch.randn(9, 5, 96).to(dtype)[:, 1:4]
    weight = torch.randn(3, 96).to(dtype)
    close(path, path(rms_norm)(x, weight, 1e-6)[0], reference.rms_norm(x, weight, 1e-6)[0])


@dtypes
@pytest.mark.parametrize("shape", [(1, 8), (7, 300), (0, 8)])
def test_a_sigmoid_of_a_strided_gate_weighs(path, dtype, shape):
    x, gate = torch.randn(shape).to(dtype), torch.randn(shape[0], shape[1] + 5).to(dtype)[:, 5:]
    expected = (x.double() * torch.sigmoid(gate.double())).to(dtype)
    close(path, path(weigh_by_sigmoid)(x, gate), expected)
    of_row = (x.double() * torch.sigmoid(gate[:, :1].double())).to(dtype)
    close(path, path(weigh_by_sigmoid)(x, gate[:, :1]), of_row)
    with pytest.raises(KernelArgumentError, match="gate"):
        path(weigh_by_sigmoid)(x, gate[:, 1:])


@dtypes
@pytest.mark.parametrize(("head_dim", "num_heads"), [(2, 1), (16, 3), (80, 3), (64, 18)])
def test_rotary_on_a_strided_slice(path, dtype, head_dim, num_heads):
    x = torch.randn(5, 2 * num_heads, head_dim).to(dtype)[:, :num_heads]
    angle = torch.randn(5, head_dim // 2)
    cos, sin = (torch.cat(pair, -1).to(dtype) for pair in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin())))
    found = path(rotary)(x, cos, sin)
    close(path, found, reference.rotary(x, cos, sin))
    if dtype is torch.float32:
        torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))


@dtypes
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 4200), (0, 8)])
def test_gates(path, dtype, shape):
    gate_up = torch.randn(shape).to(dtype) * 4
    close(path, path(silu_and_mul)(gate_up), reference.silu_and_mul(gate_up))
    close(path, path(gelu_and_mul)(gate_up), reference.gelu_and_mul(gate_up), rtol=1e-5)
    close(path, path(clamped_swiglu)(gate_up, 1.702, 3.0), reference.clamped_swiglu(gate_up, 1.702, 3.0), rtol=1e-5)
    close(path, path(square_of_relu)(gate_up), reference.square_of_relu(gate_up))


@dtypes
def test_gates_with_an_up_of_its_own_whose_rows_are_a_stride_apart(path, dtype):
    gate, up = torch.randn(5, 24).to(dtype) * 4, torch.randn(5, 60).to(dtype)[:, 30:54]
    gate_up = torch.cat((gate, up), 1)
    close(path, path(silu_and_mul)(gate, up), reference.silu_and_mul(gate_up))
    close(path, path(gelu_and_mul)(gate, up), reference.gelu_and_mul(gate_up), rtol=1e-5)
    with pytest.raises(KernelArgumentError, match="up"):
        path(gelu_and_mul)(gate, up[:, 1:])


@dtypes
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 4200), (0, 8)])
def test_a_sum_is_scaled_by_a_number_of_a_tensor(path, dtype, shape):
    x, other, scale = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.tensor([0.37], dtype=dtype)
    assert torch.equal(path(add)(x, other), x + other)
    assert torch.equal(path(add)(x, other, scale), (x + other) * scale)
    for wrong in ((x, other.double()), (x, other[:, 1:]), (x, other, scale.double()), (x, other, torch.ones(2, dtype=dtype))):
        with pytest.raises(KernelArgumentError):
            path(add)(*wrong)


def test_gates_and_norms_far_out_stay_finite(path):
    far = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    for gate in (silu_and_mul, gelu_and_mul):
        expected = torch.tensor([[0.0, 0.0, 200.0, 1e4]])
        torch.testing.assert_close(path(gate)(far), expected, rtol=0, atol=0 if path.is_device else 1e-30)


def test_clamped_swiglu(path):
    gate_up = torch.randn(5, 24) * 6
    expected = reference.clamped_swiglu(gate_up, 1.702, 7.0)
    close(path, path(clamped_swiglu)(gate_up, 1.702, 7.0), expected, rtol=1e-5)
    assert not torch.allclose(expected, reference.clamped_swiglu(gate_up, 1.702, 1e9)), "something was clamped"
    for bad in (float("nan"), float("inf")):
        assert path(clamped_swiglu)(torch.tensor([[bad, 1.0]]), 1.702, 7.0).isnan().item() == (bad != bad)
        assert path(square_of_relu)(torch.tensor([[bad]])).isnan().item() == (bad != bad)
    assert path(clamped_swiglu)(torch.tensor([[1.0, float("nan")]]), 1.702, 7.0).isnan().all()


def test_refusals():
    x, table = torch.randn(3, 2, 8), torch.randn(3, 8)
    for call in (
        lambda: rms_norm(x, torch.ones(4), 1e-5),
        lambda: rms_norm(x, torch.ones(8).half(), 1e-5),
        lambda: rms_norm(x, torch.ones(8), 1e-5, x[:1]),
        lambda: rotary(x, table[:2], table[:2]),
        lambda: rotary(x[:, :, :5], table, table),
        lambda: silu_and_mul(torch.randn(2, 3)),
        lambda: gelu_and_mul(torch.randn(2, 3)),
        lambda: clamped_swiglu(torch.randn(2, 3), 1.702, 7.0),
    ):
        with pytest.raises(KernelArgumentError):
            call()
    for call in (
        lambda: rms_norm(x.to("meta"), torch.ones(8), 1e-5),
        lambda: rotary(x.to("meta"), table, table),
        lambda: silu_and_mul(x.to("meta")),
        lambda: gelu_and_mul(x.to("meta")),
        lambda: clamped_swiglu(x.to("meta"), 1.702, 7.0),
        lambda: square_of_relu(x.to("meta")),
    ):
        with pytest.raises(UnsupportedDeviceError):
            call()


def test_heads_with_gaps_are_refused_on_a_device():
    x = torch.randn(3, 2, 8)
    for call in (
        lambda: rms_norm(*on_cuda(x.transpose(1, 2), torch.ones(2)), 1e-5),
        lambda: silu_and_mul(*on_cuda(x.transpose(1, 2))),
    ):
        with pytest.raises(KernelArgumentError):
            call()
