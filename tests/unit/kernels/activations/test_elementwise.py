"""rms_norm, rotary and the gates against their references, on both paths of a CPU."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.gates import clamped_swiglu, gelu_and_mul, silu_and_mul
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.activations.rotary import rotary
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError

pytestmark = pytest.mark.usefixtures("kernel_path")


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 2, 16)])
def test_rms_norm_with_and_without_residual(shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    for given in (None, residual):
        found, kept = rms_norm(x.clone(), weight, 1e-5, given)
        expected, expected_kept = reference.rms_norm(x.clone(), weight, 1e-5, given)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(kept, expected_kept)


def test_rms_norm_with_a_weight_per_head():
    x, weight = torch.randn(3, 2, 16), torch.randn(2, 16)
    found, _ = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, reference.rms_norm(x, weight, 1e-6)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [2, 16, 80])
def test_rotary_on_a_strided_slice(head_dim):
    x = torch.randn(5, 6 * head_dim)[:, : 3 * head_dim].view(5, 3, head_dim)
    angle = torch.randn(5, head_dim // 2)
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    found = rotary(x, cos, sin)
    torch.testing.assert_close(found, reference.rotary(x, cos, sin), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))


def test_silu_and_mul():
    gate_up = torch.randn(5, 24)
    torch.testing.assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up), rtol=1e-6, atol=1e-6)


def test_gelu_and_mul():
    gate_up = torch.randn(5, 24)
    torch.testing.assert_close(gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up), rtol=1e-5, atol=1e-6)


def test_clamped_swiglu():
    gate_up = torch.randn(5, 24) * 6
    expected = reference.clamped_swiglu(gate_up, 1.702, 7.0)
    torch.testing.assert_close(clamped_swiglu(gate_up, 1.702, 7.0), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, reference.clamped_swiglu(gate_up, 1.702, 1e9)), "something was clamped"
    for bad in (float("nan"), float("inf")):
        assert clamped_swiglu(torch.tensor([[bad, 1.0]]), 1.702, 7.0).isnan().item() == (bad != bad)
    assert clamped_swiglu(torch.tensor([[1.0, float("nan")]]), 1.702, 7.0).isnan().all()


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
    ):
        with pytest.raises(UnsupportedDeviceError):
            call()
