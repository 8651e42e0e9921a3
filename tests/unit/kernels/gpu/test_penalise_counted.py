"""penalise_counted on the Triton path, interpreted, to the bits of the CPU's."""

import pytest
import torch

from kvkeeper.kernels.penalise_counted import penalise_counted
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.worlds import make_counted


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("vocab_size", [5, 1024, 2500])
def test_a_device_gives_the_hosts_bits(vocab_size, dtype):
    world = make_counted(vocab_size=vocab_size, dtype=dtype)
    counts, expected_counts = world.counts.clone(), world.counts.clone()
    expected = penalise_counted(world.logits, expected_counts, *world.columns)
    found = penalise_counted(*on_cuda(world.logits, counts, *world.columns))
    assert torch.equal(found.as_subclass(torch.Tensor), expected)
    assert torch.equal(counts, expected_counts)


def test_no_rows_are_no_launch():
    world = make_counted(vocab_size=5)
    none = [column[..., :0] for column in world.columns]
    assert penalise_counted(*on_cuda(world.logits[:0], world.counts, *none)).shape == (0, 5)
