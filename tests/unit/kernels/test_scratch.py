"""Working memory that is reused: where it lies, and until when."""

import pytest
import torch

from kvkeeper.kernels.scratch import Scratch


def test_it_grows_and_is_reused():
    scratch = Scratch()
    first = scratch.take(10, torch.float32)
    assert first.shape == (10,)
    grown = scratch.take(1000, torch.float32)
    assert scratch.take(1000, torch.float32).data_ptr() == grown.data_ptr()
    assert scratch.take(1, torch.int64).data_ptr() == grown.data_ptr()


def test_once_graphs_have_its_address_it_does_not_grow():
    scratch = Scratch()
    before = scratch.take(100, torch.float32).data_ptr()
    scratch.fix()
    assert scratch.take(100, torch.float32).data_ptr() == before
    with pytest.raises(AssertionError, match="a graph has the address"):
        scratch.take(1000, torch.float32)
