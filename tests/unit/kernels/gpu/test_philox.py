"""The interpreted kernel draws the host's numbers, to the bit."""

import numpy as np
import pytest
import torch

from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.philox import uniforms, uniforms_there
from tests.unit.kernels.gpu.pretend import on_cuda


@pytest.mark.parametrize("num_rows", [0, 1, 128, 200])
def test_numbers_are_the_hosts(num_rows):
    numbers = np.random.default_rng(num_rows).integers(0, 2**64, (3, num_rows), np.uint64, endpoint=False)
    numbers[1:, ::2] %= 1000  # as sample indices and positions are
    memory = torch.from_numpy(np.pad(numbers, ((0, 0), (0, 7))).view(np.int64))[:, :num_rows]
    found, on_host = uniforms_there(*on_cuda(memory)), uniforms_there(memory)
    assert (
        found.numpy().view(np.uint64).tolist()
        == uniforms(*numbers).view(np.uint64).tolist()
        == on_host.numpy().view(np.uint64).tolist()
    )


def test_numbers_of_another_shape_or_dtype_are_refused():
    for numbers in (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 4)):
        with pytest.raises(KernelArgumentError, match=r"int64 \[3, n\]"):
            uniforms_there(numbers)
