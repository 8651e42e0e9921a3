"""penalise_counted on the Triton path, interpreted, to the bits of the CPU's."""

import pytest
import torch

from kvkeeper.kernels.penalise_counted import penalise_counted
from kvkeeper.kernels.types import CountedTensors
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.worlds import make_counted


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("vocab_size", [5, 1024, 2500])
def test_a_device_gives_the_hosts_bits(vocab_size, dtype):
    logits, counts, rows = make_counted(vocab_size=vocab_size, dtype=dtype)
    expected_counts = counts.clone()
    expected = penalise_counted(logits, expected_counts, rows)
    found = penalise_counted(*on_cuda(logits, counts), CountedTensors(*on_cuda(*rows)))
    assert torch.equal(found.as_subclass(torch.Tensor), expected)
    assert torch.equal(counts, expected_counts)


def test_no_rows_are_no_launch():
    logits, counts, rows = make_counted(vocab_size=5)
    none = CountedTensors(*on_cuda(*(column[..., :0] for column in rows)))
    assert penalise_counted(*on_cuda(logits[:0], counts), none).shape == (0, 5)
