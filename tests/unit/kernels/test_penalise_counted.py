"""penalise_counted on the CPU against its reference, and what it refuses. For its Triton path see gpu/."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.penalise_counted import penalise_counted
from tests.unit.kernels.worlds import make_counted


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_rows_are_penalised_by_what_they_have_seen_and_their_new_token(dtype: torch.dtype) -> None:
    world = make_counted(vocab_size=37, dtype=dtype)
    counts, expected_counts, logits = world.counts.clone(), world.counts.clone(), world.logits.clone()
    expected = reference.penalise_counted(logits, expected_counts, *world.columns)
    found = penalise_counted(logits, counts, *world.columns)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(logits, world.logits)
    assert torch.equal(found[-1], logits[-1]), "a row without penalties is as it was"


def test_what_does_not_fit_is_refused() -> None:
    world = make_counted(vocab_size=8)
    slots, tokens, addends, penalties = world.columns
    for logits, counts, *columns in (
        (world.logits.double(), world.counts, slots, tokens, addends, penalties),
        (world.logits, world.counts.long(), slots, tokens, addends, penalties),
        (world.logits, world.counts[:, :4], slots, tokens, addends, penalties),
        (world.logits, world.counts, slots[:1], tokens, addends, penalties),
        (world.logits, world.counts, slots, tokens.int(), addends, penalties),
        (world.logits, world.counts, slots, tokens, addends, penalties.float()),
    ):
        with pytest.raises(KernelArgumentError):
            penalise_counted(logits, counts, *columns)
