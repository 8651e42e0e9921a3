"""Products of groups of rows, each with a weight of its own, on all paths, against the reference."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.types import LinearWeight
from tests.unit.kernels.gpu.pretend import on_cuda


def groups_of(*counts):
    return torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("counts", "num_in", "num_out"),
    [
        ((1,), 8, 4),
        ((3, 0, 5), 6, 4),
        ((0, 3, 0, 0, 17, 1), 40, 20),
        ((16, 16), 64, 64),
        ((70, 0, 65), 100, 70),
        ((0, 0), 8, 8),
        ((0, 300), 16, 16),
    ],
)
def test_every_row_meets_the_weight_of_its_group(path, monkeypatch, dtype, counts, num_in, num_out):
    monkeypatch.setattr("kvkeeper.kernels.gpu.grouped_linear.GROUPS_AT_ONCE", 4)
    for bias in (None, torch.randn(len(counts), num_out).to(dtype)):
        x, data = ((torch.randn(shape) / 3).to(dtype) for shape in ((sum(counts), num_in), (len(counts), num_out, num_in)))
        weight, starts = LinearWeight(data, bias), groups_of(*counts)
        expected = reference.grouped_linear(x, weight, starts)
        tolerance = {"rtol": 0, "atol": {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]} if path.is_device else {}
        torch.testing.assert_close(path(grouped_linear)(x, weight, starts), expected, **tolerance)


def test_refusals():
    x, weight = torch.randn(3, 6), LinearWeight(torch.randn(2, 4, 6))
    for call in (
        lambda: grouped_linear(x[:, :5], weight, groups_of(1, 2)),
        lambda: grouped_linear(x.half(), weight, groups_of(1, 2)),
        lambda: grouped_linear(x, weight, groups_of(1, 1)),
        lambda: grouped_linear(x, weight, groups_of(1, 1, 1)),
        lambda: grouped_linear(x, weight, groups_of(4, -1)),
        lambda: grouped_linear(x, weight, groups_of(1, 2).long()),
        lambda: grouped_linear(x, LinearWeight(weight.data, torch.zeros(4)), groups_of(1, 2)),
    ):
        with pytest.raises(KernelArgumentError):
            call()
    with pytest.raises(UnsupportedDeviceError):
        grouped_linear(x.to("meta"), weight, groups_of(1, 2))


def test_gaps_are_refused():
    x, data = torch.randn(4, 6), torch.randn(2, 3, 6)
    with pytest.raises(KernelArgumentError, match="contiguous"):
        grouped_linear(*on_cuda(torch.randn(6, 4).T), LinearWeight(*on_cuda(data)), *on_cuda(groups_of(2, 2)))
    weight = LinearWeight(*on_cuda(data.transpose(1, 2).contiguous().transpose(1, 2)))
    with pytest.raises(KernelArgumentError, match="contiguous"):
        grouped_linear(*on_cuda(x), weight, *on_cuda(groups_of(2, 2)))
