"""penalise_counted on all paths against its reference, to the bit, and what it refuses."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.penalise_counted import penalise_counted
from kvkeeper.kernels.types import CountedTensors
from tests.unit.kernels.conftest import KernelPath
from tests.unit.kernels.worlds import make_counted


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("vocab_size", [5, 37, 1024, 2500])
def test_rows_are_penalised_by_what_they_have_seen_and_their_new_token(
    path: KernelPath, vocab_size: int, dtype: torch.dtype
) -> None:
    logits, counts, rows = make_counted(vocab_size=vocab_size, dtype=dtype)
    expected_counts, before = counts.clone(), logits.clone()
    expected = reference.penalise_counted(logits, expected_counts, rows)
    found = path(penalise_counted)(logits, counts, rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(logits, before)
    assert torch.equal(found[-1], logits[-1]), "a row without penalties is as it was"


def test_no_rows_are_no_launch(path: KernelPath) -> None:
    logits, counts, rows = make_counted(vocab_size=5)
    none = CountedTensors(*(column[..., :0] for column in rows))
    assert path(penalise_counted)(logits[:0], counts, none).shape == (0, 5)


def test_what_does_not_fit_is_refused() -> None:
    logits, counts, rows = make_counted(vocab_size=8)
    for arguments in (
        (logits.double(), counts, rows),
        (logits, counts.long(), rows),
        (logits, counts[:, :4], rows),
        (logits, counts, rows._replace(slots=rows.slots[:1])),
        (logits, counts, rows._replace(tokens=rows.tokens.int())),
        (logits, counts, rows._replace(penalties=rows.penalties.float())),
    ):
        with pytest.raises(KernelArgumentError):
            penalise_counted(*arguments)
