"""linear_integers against the product that it approximates, and against what its definition says of each number."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_integers import linear_integers, quantise_linear
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.types import LinearWeight

pytest.importorskip("numba")
BITS = [8, 4]


@pytest.fixture(autouse=True)
def kernels():
    torch.manual_seed(0)
    compiled.switch(on=True)
    yield
    compiled.switch(on=False)


def in_groups(numbers):
    return torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % 32)).unflatten(1, (-1, 32))


def most_error(x, weight, bits):
    """Of rounding each factor to its group's steps, half a step and a bit for the halves, [rows of x, rows of weight]."""
    x_steps = in_groups(x).abs().amax(2) / 127 * 0.51
    groups = in_groups(weight)
    steps = groups.abs().amax(2) / 127 * 0.52 if bits == 8 else (groups.amax(2) - groups.amin(2)) / 15 * 0.52
    lows = 0 if bits == 8 else groups.abs().amax((1, 2))[:, None] * 1e-3
    own = x_steps @ groups.abs().sum(2).T
    return own + in_groups(x).abs().sum(2) @ (steps + lows).T + 32 * x_steps @ (steps + lows).T + 1e-5


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (192, 64), (33, 520)])
def test_the_product_is_close(shape, bias, bits):
    dense = LinearWeight(torch.randn(shape), torch.randn(shape[0]) if bias else None)
    weight = quantise_linear(dense, bits)
    for num_rows in (1, 2, 16, 33, 97):
        x = torch.randn(num_rows, 2 * shape[1])[:, : shape[1]]
        assert bool(((linear(x, weight) - reference.linear(x, dense)).abs() <= most_error(x, dense.data, bits)).all())
    assert linear(torch.randn(0, shape[1]), weight).shape == (0, shape[0])
    assert linear(torch.randn(2, 3, shape[1]), weight).shape == (2, 3, shape[0])


def test_integers_that_fit_are_multiplied_exactly():
    whole = torch.randint(-127, 128, (40, 320)).float()
    whole[:, ::32] = 127  # so that the scales are 1
    x = torch.randint(-127, 128, (5, 320)).float()
    x[:, ::32] = -127
    torch.testing.assert_close(linear_integers(x, quantise_linear(LinearWeight(whole), 8)), x @ whole.T, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("num_levels", [16, 15, 12, 9])
def test_a_grid_of_4_bits_is_found_again(num_levels):
    """As weights lie that were restored from a checkpoint in 4 bits: a low and a step for each 128 inputs, all levels used."""
    levels = torch.randint(0, num_levels, (40, 4, 4, 32))
    levels[..., 0], levels[..., 1] = 0, num_levels - 1
    grid = (levels * torch.rand(40, 4, 1, 1) - torch.rand(40, 4, 1, 1)).flatten(1)
    x = torch.randint(-127, 128, (5, 512)).float()
    x[:, ::32] = 127
    assert relative_error(linear_integers(x, quantise_linear(LinearWeight(grid), 4)), x @ grid.T) < 1e-3


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_sums_do_not_overflow(bits):
    ones = torch.ones(16, 512)
    ones[:, 1::2] = 0.0 if bits == 4 else 1.0  # so that the steps of 4 bits are large
    for sign in (1, -1):
        found = linear_integers(sign * torch.ones(3, 512), quantise_linear(LinearWeight(ones), bits))
        torch.testing.assert_close(found, sign * ones.sum(1).expand(3, 16), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_the_rows_beside_it(bits):
    weight = quantise_linear(LinearWeight(torch.randn(24, 48)), bits)
    x = torch.randn(6, 48) * torch.tensor([1e-6, 1.0, 1e4, 3.0, 0.0, 1e-3])[:, None]
    together = linear_integers(x, weight)
    for row in range(6):
        assert torch.equal(linear_integers(x[row : row + 1], weight), together[row : row + 1])
    assert torch.equal(together[4], torch.zeros(24))


@pytest.mark.parametrize("bits", BITS)
def test_one_large_number_costs_its_own_group_alone_its_precision(bits):
    dense = LinearWeight(torch.randn(64, 256))
    dense.data[:, :32] = 0.0
    x = torch.randn(4, 256)
    exact, weight = reference.linear(x, dense), quantise_linear(dense, bits)
    x[:, 0] = 1e4
    assert relative_error(linear_integers(x, weight), exact) < (0.02 if bits == 8 else 0.1)


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e7])
@pytest.mark.parametrize("bits", BITS)
def test_weights_of_any_size_are_each_exact_to_their_own_output(bits, scale):
    dense = LinearWeight(torch.randn(3, 64) * torch.tensor([1e-4, 1.0, 1e4])[:, None] * scale)
    x = torch.randn(8, 64)
    found, expected = linear_integers(x, quantise_linear(dense, bits)), reference.linear(x, dense)
    assert all(relative_error(found[:, column], expected[:, column]) < (0.02 if bits == 8 else 0.15) for column in range(3))


@pytest.mark.parametrize("bits", BITS)
def test_equal_weights_and_none_at_all_are_exact(bits):
    dense = LinearWeight(torch.tensor([3.0, 0.0, -1e-3])[:, None].expand(3, 40).contiguous())
    x = torch.ones(2, 40)
    torch.testing.assert_close(linear_integers(x, quantise_linear(dense, bits)), x @ dense.data.T, rtol=1e-3, atol=0)


def test_refusals():
    for weight in (torch.randn(4, 3).half(), torch.full((4, 3), float("nan"))):
        with pytest.raises(KernelArgumentError):
            quantise_linear(LinearWeight(weight), 8)
    with pytest.raises(UnsupportedDeviceError):
        quantise_linear(LinearWeight(torch.randn(4, 3, device="meta")), 4)
    weight = quantise_linear(LinearWeight(torch.randn(4, 3)), 4)
    for x in (torch.randn(2, 4), torch.randn(2, 3).half()):
        with pytest.raises(KernelArgumentError, match="does not fit"):
            linear(x, weight)
    compiled.switch(on=False)
    with pytest.raises(UnsupportedDeviceError):
        quantise_linear(LinearWeight(torch.randn(4, 3)), 8)
