"""Weights of integers on a device: how they are quantised there, and products with them in the interpreter."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations import linear_integers
from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_integers import quantise_linear
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.types import LinearWeight
from tests.unit.kernels.gpu.pretend import on_cuda

BITS = [8, 4]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)


def quantised(data, bits, bias=None):
    """As on a device."""
    there = [None if each is None else on_cuda(each)[0] for each in (data, bias)]
    return quantise_linear(LinearWeight(*there), bits)


def multiply(x, weight):
    return linear(*on_cuda(x), weight).as_subclass(torch.Tensor)


def multiply_groups(x, weight, *counts):
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    found = grouped_linear(*on_cuda(x), weight, *on_cuda(starts)).as_subclass(torch.Tensor)
    return found, reference.grouped_linear(x, reference.restore_integers(weight), starts)


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def grid_of(shape, group, num_levels=16):
    """A weight as one restored from 4 bits: a low and a step for so many inputs, all levels used, in bfloat16."""
    num_out, num_in = shape
    levels = torch.randint(0, num_levels, (num_out, num_in // group, group))
    levels[..., 0], levels[..., 1] = 0, num_levels - 1
    steps, lows = (torch.rand(num_out, num_in // group, 1) + 0.2 for _ in range(2))
    return (levels * steps - 8 * lows).flatten(1).bfloat16()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (192, 64), (130, 520)])
def test_a_product_is_that_with_the_restored_weights(shape, bias, bits):
    weight = quantised(torch.randn(shape), bits, torch.randn(shape[0]) if bias else None)
    dense = reference.restore_integers(weight)
    for num_rows in (1, 2, 16, 33, 97):
        x = torch.randn(num_rows, 2 * shape[1])[:, : shape[1]]
        torch.testing.assert_close(multiply(x, weight), reference.linear(x, dense), rtol=1e-5, atol=1e-4)
    assert multiply(torch.randn(0, shape[1]), weight).shape == (0, shape[0])
    x = torch.randn(2, 3, shape[1])
    torch.testing.assert_close(multiply(x, weight), reference.linear(x, dense), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_a_product_of_half_precision(bits):
    weight = quantised(torch.randn(70, 300).half(), bits, torch.randn(70).half())
    x = (torch.randn(20, 300) / 300**0.5).half()
    expected = reference.linear(x, reference.restore_integers(weight))
    torch.testing.assert_close(multiply(x, weight), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [1, 18])
def test_programs_share_the_inputs_of_a_narrow_weight(bits, num_rows, monkeypatch):
    added = []
    from kvkeeper.kernels.gpu import integer_linear

    splits = integer_linear.num_splits
    monkeypatch.setattr(integer_linear, "num_splits", lambda *sizes: added.append(splits(*sizes)) or added[-1])
    weight = quantised(torch.randn(20, 3400), bits, torch.randn(20))  # of which no split has as many slabs as the last
    x = torch.randn(num_rows, 3400)
    expected = reference.linear(x, reference.restore_integers(weight))
    torch.testing.assert_close(multiply(x, weight), expected, rtol=1e-5, atol=1e-4)
    assert added[0] > 2


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bits", BITS)
def test_a_row_depends_on_no_other_and_one_that_is_not_finite_spoils_no_other(bits):
    num_in = 9000 // bits  # several programs share them
    weight = quantised(torch.randn(24, num_in), bits)
    x = torch.randn(6, num_in) * torch.tensor([1e-6, 1.0, 1e4, 3.0, 0.0, 1e-3])[:, None]
    together = multiply(x, weight)
    for row in (0, 2, 5):
        assert torch.equal(multiply(x[row : row + 1], weight), together[row : row + 1])
    spoiled = x.clone()
    spoiled[0, -1], spoiled[1, 40], spoiled[3, 0] = float("inf"), float("-inf"), float("nan")  # the first behind a row's last
    found = multiply(spoiled, weight)
    assert not found[[0, 1, 3]].isfinite().any()
    assert torch.equal(found[[2, 4, 5]], together[[2, 4, 5]])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("counts", "num_in", "num_out"),
    [
        ((1,), 8, 4),
        ((3, 0, 5), 6, 4),
        ((0, 3, 0, 0, 17, 1), 40, 20),
        ((70, 0, 65), 100, 140),
        ((0, 0), 8, 8),
        ((0, 300), 16, 16),
    ],
)
def test_every_row_meets_the_weight_of_its_group(monkeypatch, bits, counts, num_in, num_out):
    monkeypatch.setattr("kvkeeper.kernels.gpu.integer_linear.GROUPS_AT_ONCE", 4)
    for bias in (None, torch.randn(len(counts), num_out)):
        weight = quantised(torch.randn(len(counts), num_out, num_in), bits, bias)
        found, expected = multiply_groups(torch.randn(sum(counts), num_in), weight, *counts)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_several_weights_are_each_as_it_is_alone(bits):
    """Whatever its dtype, and however many outputs are quantised at a time."""
    data = torch.stack([torch.randn(40, 200), grid_of((40, 200), 40).float(), torch.zeros(40, 200)]).bfloat16()
    together = quantised(data, bits)
    assert (together.in_features, together.out_features) == (200, 40)
    for expert in range(3):
        alone = quantised(data[expert].float(), bits)
        for own, other in zip(together.blocks.of_expert(expert)[1:], alone.blocks[1:], strict=True):
            assert own is other is None or torch.equal(own, other)


@pytest.mark.parametrize("bits", BITS)
def test_outputs_are_quantised_a_few_at_a_time(bits, monkeypatch):
    data = torch.randn(50, 200).bfloat16()
    at_once, widened, in_groups = quantised(data, bits), [], linear_integers._in_groups
    monkeypatch.setattr(linear_integers, "_AT_A_TIME", {"cuda": 16})
    monkeypatch.setattr(linear_integers, "_SAMPLE", 10)
    monkeypatch.setattr(linear_integers, "_in_groups", lambda rows: widened.append(len(rows)) or in_groups(rows))
    for own, other in zip(quantised(data, bits).blocks[1:], at_once.blocks[1:], strict=True):
        assert own is other is None or torch.equal(own, other)
    assert widened == [10] * (bits == 4) + [16, 16, 16, 2]


@pytest.mark.parametrize("bits", BITS)
def test_restored_weights_are_within_half_a_step(bits):
    data = torch.randn(64, 256) * 10.0 ** torch.randint(-3, 3, (64, 1))
    groups = data.unflatten(1, (-1, 32))
    steps = groups.abs().amax(2) / 127 if bits == 8 else (groups.amax(2) - groups.amin(2)) / 15
    lows = 0 if bits == 8 else data.abs().amax(1)[:, None] * 1e-3
    off = (reference.restore_integers(quantised(data, bits)).data - data).abs().unflatten(1, (-1, 32)).amax(2)
    assert bool((off <= steps * 0.52 + lows).all())


@pytest.mark.parametrize("bits", BITS)
def test_integers_and_scales_are_all_that_is_kept(bits):
    shape = (96, 1024)
    blocks = quantised(torch.randn(shape), bits).blocks
    num_bits = 8 * sum(each.nbytes for each in blocks[1:4] if each is not None)
    assert num_bits == {8: 8.5, 4: 5}[bits] * 96 * 1024


@pytest.mark.skipif(not compiled.is_installed(), reason="numba, of the extra cpu, is not installed")
@pytest.mark.parametrize("bits", BITS)
def test_a_cpu_finds_the_same_integers(bits):
    """Rows of one input each, which are exact in 8 bits."""
    compiled.switch(on=True)
    data = torch.randn(30, 100)
    found = linear(torch.eye(100), quantise_linear(LinearWeight(data), bits))
    compiled.switch(on=False)
    torch.testing.assert_close(found, reference.restore_integers(quantised(data, bits)).data.T.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_levels", [16, 15, 12])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_grid_of_4_bits_costs_what_bfloat16_costs(group, num_levels):
    """Both products are less than 2^-8 of their size off the exact one.

    The interpreter has no products of bfloat16, so the roundings of the kernel, of weights over factors, are written out.
    """
    data = grid_of((60, 512), group, num_levels)
    weight, x = quantised(data, 4), torch.randn(9, 512).bfloat16()
    factors = weight.blocks.factors.double()[:, None]
    rounded = (reference.restore_integers(weight).data / factors).bfloat16().double() * factors
    exact = x.double() @ data.double().T
    assert relative_error(x @ data.T, exact) < 2**-8
    assert relative_error((x.double() @ rounded.T).bfloat16(), exact) < 2**-8
    torch.testing.assert_close(multiply(x.float(), weight).double(), exact, rtol=0, atol=float(exact.norm(dim=1).min()) * 2**-8)


def test_refusals():
    for data in (torch.randn(4, 3).double(), torch.full((4, 3), float("nan")), torch.randn(3), torch.randn(2, 2, 4, 3)):
        with pytest.raises(KernelArgumentError):
            quantised(data, 8)
    one, several = quantised(torch.randn(4, 6), 4), quantised(torch.randn(2, 4, 6), 4)
    for x in (torch.randn(2, 5), torch.randn(2, 6).double()):
        with pytest.raises(KernelArgumentError, match="does not fit"):
            multiply(x, one)
        with pytest.raises(KernelArgumentError, match="does not fit"):
            multiply_groups(x, several, 1, 1)
    with pytest.raises(KernelArgumentError, match="on CUDA"):
        linear(torch.randn(2, 6), one)
    with pytest.raises(KernelArgumentError, match="must be one"):
        multiply(torch.randn(2, 6), several)
    with pytest.raises(KernelArgumentError, match="must be several"):
        grouped_linear(torch.randn(2, 6), one, torch.tensor([0, 2], dtype=torch.int32))
    with pytest.raises(KernelArgumentError, match="contiguous"):
        multiply_groups(torch.randn(6, 2).T, several, 1, 1)
    with pytest.raises(KernelArgumentError, match="starts"):
        grouped_linear(*on_cuda(torch.randn(2, 6)), several, *on_cuda(torch.tensor([0, 2], dtype=torch.int32)))
