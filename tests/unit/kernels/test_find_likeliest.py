"""find_likeliest on all paths against torch's argmax, with rows that are not numbers, and what it refuses."""

import pytest
import torch

from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.find_likeliest import NOT_FINITE, find_likeliest
from tests.unit.kernels.conftest import KernelPath

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("vocab_size", [1, 5, 4096, 9001])
def test_the_first_of_the_likeliest_is_found(path: KernelPath, vocab_size: int) -> None:
    drawn = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 9, (6, vocab_size), generator=drawn).float()  # with many that are equal
    logits[1] = -INF
    logits[1, vocab_size // 2 :] = -2.0
    wide = torch.full((6, vocab_size + 3), INF)
    wide[:, :vocab_size] = logits
    for given in (logits, wide[:, :vocab_size]):
        likeliest, outcomes = path(find_likeliest)(given)
        assert likeliest.tolist() == outcomes.tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("vocab_size", [4, 8200])
def test_a_row_that_is_not_finite_is_told_and_has_some_token(path: KernelPath, vocab_size: int) -> None:
    logits = torch.zeros((5, vocab_size))
    logits[0, -1], logits[1, 1], logits[2] = NAN, INF, -INF
    logits[3, :-1], logits[4, 2] = -INF, 1.0
    likeliest, outcomes = path(find_likeliest)(logits)
    assert outcomes.tolist() == [NOT_FINITE, NOT_FINITE, NOT_FINITE, vocab_size - 1, 2]
    assert all(0 <= token < vocab_size for token in likeliest.tolist())


def test_no_rows_are_no_launch(path: KernelPath) -> None:
    assert [len(column) for column in path(find_likeliest)(torch.zeros(0, 7))] == [0, 0]


def test_what_does_not_fit_is_refused() -> None:
    for logits in (torch.zeros(2, 3).double(), torch.zeros(3), torch.zeros(2, 0), torch.zeros(3, 2).t()):
        with pytest.raises(KernelArgumentError):
            find_likeliest(logits)
