"""grouped_linear on the Triton path against its reference, interpreted."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.activations.linear_weight import LinearWeight
from kvkeeper.kernels.errors import KernelArgumentError
from tests.unit.kernels.gpu.pretend import on_cuda

pytestmark = pytest.mark.each_value
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def starts_of(counts):
    return torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("counts", "num_in", "num_out"),
    [
        ((1,), 8, 4),
        ((0, 3, 0, 0, 17, 1), 40, 20),
        ((16, 16), 64, 64),
        ((70, 0, 65), 100, 70),
        ((0, 0), 8, 8),
        ((0, 300), 16, 16),
    ],
)
def test_every_row_meets_the_weight_of_its_group(monkeypatch, dtype, counts, num_in, num_out):
    monkeypatch.setattr("kvkeeper.kernels.gpu.grouped_linear._GROUPS_AT_ONCE", 4)
    for bias in (None, torch.randn(len(counts), num_out).to(dtype)):
        x, data = ((torch.randn(shape) / 3).to(dtype) for shape in ((sum(counts), num_in), (len(counts), num_out, num_in)))
        expected = reference.grouped_linear(x, LinearWeight(data, bias), starts_of(counts))
        pretended = LinearWeight(*on_cuda(data), None if bias is None else on_cuda(bias)[0])
        found = grouped_linear(*on_cuda(x), pretended, *on_cuda(starts_of(counts)))
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=TOLERANCE[dtype])


def test_gaps_are_refused():
    x, data = torch.randn(4, 6), torch.randn(2, 3, 6)
    with pytest.raises(KernelArgumentError, match="contiguous"):
        grouped_linear(*on_cuda(torch.randn(6, 4).T), LinearWeight(*on_cuda(data)), *on_cuda(starts_of((2, 2))))
    weight = LinearWeight(*on_cuda(data.transpose(1, 2).contiguous().transpose(1, 2)))
    with pytest.raises(KernelArgumentError, match="contiguous"):
        grouped_linear(*on_cuda(x), weight, *on_cuda(starts_of((2, 2))))
