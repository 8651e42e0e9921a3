"""Products of groups of rows, each with a weight of its own, on a CPU, against the reference."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.types import LinearWeight


def groups_of(*counts):
    return torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 1), (0, 0, 0)])
def test_each_group_has_its_own_weight(counts, with_bias):
    x = torch.randn(sum(counts), 6)
    weight = LinearWeight(torch.randn(3, 4, 6), torch.randn(3, 4) if with_bias else None)
    starts = groups_of(*counts)
    torch.testing.assert_close(grouped_linear(x, weight, starts), reference.grouped_linear(x, weight, starts))


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
