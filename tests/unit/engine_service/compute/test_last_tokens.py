"""LastTokens: what each row drew last, for the step behind the one that drew it."""

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.device.token_counts import LastTokens

NONE = np.array([-1, -1])


def test_each_row_keeps_what_it_drew_last():
    last = LastTokens()
    assert last.filled(np.array([5, 6]), NONE).tolist() == [5, 6], "before the first"
    last.put(np.array([2, 0]), torch.tensor([20, 10]))
    last.put(np.array([9, 2]), torch.tensor([90, 21]))
    assert last.filled(np.array([1, 1, 1, 7]), np.array([9, 2, 0, -1])).tolist() == [90, 21, 10, 7]


def test_the_host_gets_a_copy_that_later_draws_leave_alone():
    last = LastTokens()
    last.put(np.array([0]), torch.tensor([3]))
    found = last.filled(np.array([0]), np.array([0]))
    last.put(np.array([0]), torch.tensor([4]))
    assert found.tolist() == [3]


def test_memory_that_is_there_from_the_beginning_keeps_its_address():
    last = LastTokens()
    last.fix(4)
    address = last.tensor.data_ptr()
    last.put(np.array([3, 0]), torch.tensor([1, 2]))
    last.put(NONE[:0], torch.empty(0, dtype=torch.int64))
    assert last.tensor.data_ptr() == address
    with pytest.raises(AssertionError):
        last.put(np.array([4]), torch.tensor([1]))
