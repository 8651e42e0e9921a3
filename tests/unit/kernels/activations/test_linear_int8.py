"""linear_int8 against the product that it approximates, on both paths of a CPU."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_int8 import linear_int8, quantise_linear
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.types import LinearWeight

pytestmark = pytest.mark.usefixtures("kernel_path")


def most_error(x, weight):
    """Of rounding to 90 steps on either side of 0: half a step of every factor, [rows of x, rows of weight]."""
    x_steps, weight_steps = (part.abs().amax(1, keepdim=True) / 180 for part in (x, weight))
    rounding = x_steps * weight.abs().sum(1) + x.abs().sum(1, keepdim=True) * weight_steps.T
    return rounding + x.shape[1] * x_steps * weight_steps.T + 1e-5


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (192, 64), (33, 512)])
def test_the_product_is_close(shape, bias):
    dense = LinearWeight(torch.randn(shape), torch.randn(shape[0]) if bias else None)
    weight = quantise_linear(dense)
    for num_rows in (1, 2, 16, 33):
        x = torch.randn(num_rows, 2 * shape[1])[:, : shape[1]]
        assert bool(((linear(x, weight) - reference.linear(x, dense)).abs() <= most_error(x, dense.data)).all())
    assert linear(torch.randn(0, shape[1]), weight).shape == (0, shape[0])
    assert linear(torch.randn(2, 3, shape[1]), weight).shape == (2, 3, shape[0])


def test_integers_that_fit_are_multiplied_exactly():
    whole = torch.randint(-90, 91, (40, 300)).float()
    whole[:, 0] = 90  # so that the scale is 1
    x = torch.randint(-90, 91, (5, 300)).float()
    x[:, 0] = -90
    torch.testing.assert_close(linear_int8(x, quantise_linear(LinearWeight(whole))), x @ whole.T, rtol=1e-6, atol=1e-3)


def test_the_largest_sums_do_not_overflow():
    ones = torch.ones(16, 512)
    for sign in (1, -1):
        torch.testing.assert_close(
            linear_int8(sign * ones[:3], quantise_linear(LinearWeight(ones))), sign * torch.full((3, 16), 512.0)
        )


def test_a_row_does_not_depend_on_the_rows_beside_it():
    weight = quantise_linear(LinearWeight(torch.randn(24, 48)))
    x = torch.randn(6, 48) * torch.tensor([1e-6, 1.0, 1e4, 3.0, 0.0, 1e-3])[:, None]
    together = linear_int8(x, weight)
    for row in range(6):
        assert torch.equal(linear_int8(x[row : row + 1], weight), together[row : row + 1])
    assert torch.equal(together[4], torch.zeros(24))


def test_outputs_of_unlike_size_are_each_exact_to_their_own_scale():
    dense = LinearWeight(torch.randn(3, 64) * torch.tensor([1e-4, 1.0, 1e4])[:, None])
    x = torch.randn(8, 64)
    found, expected = linear_int8(x, quantise_linear(dense)), reference.linear(x, dense)
    assert all(relative_error(found[:, column], expected[:, column]) < 0.05 for column in range(3))


def test_refusals(monkeypatch):
    for weight in (torch.randn(4, 3).half(), torch.full((4, 3), float("nan"))):
        with pytest.raises(KernelArgumentError):
            quantise_linear(LinearWeight(weight))
    with pytest.raises(UnsupportedDeviceError):
        quantise_linear(LinearWeight(torch.randn(4, 3, device="meta")))
    weight = quantise_linear(LinearWeight(torch.randn(4, 3)))
    for x in (torch.randn(2, 4), torch.randn(2, 3).half()):
        with pytest.raises(KernelArgumentError, match="does not fit"):
            linear(x, weight)
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")  # as on CPUs of other makes
    compiled.switch(on=False)  # the kernels need no product of torch's
    with pytest.raises(UnsupportedDeviceError):
        quantise_linear(LinearWeight(torch.randn(4, 3)))
