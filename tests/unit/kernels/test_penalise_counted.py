"""penalise_counted on the CPU against its reference, and what it refuses. For its Triton path see gpu/."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.penalise_counted import penalise_counted
from tests.unit.kernels.worlds import make_counted


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_rows_are_penalised_by_what_they_have_seen_and_their_new_token(dtype: torch.dtype) -> None:
    logits, counts, rows = make_counted(vocab_size=37, dtype=dtype)
    expected_counts, before = counts.clone(), logits.clone()
    expected = reference.penalise_counted(logits, expected_counts, rows)
    found = penalise_counted(logits, counts, rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(logits, before)
    assert torch.equal(found[-1], logits[-1]), "a row without penalties is as it was"


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
