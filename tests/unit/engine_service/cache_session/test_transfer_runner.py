"""Transfer orders move whole blocks between the tiers, and each is reported once, done or failed."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from kvkeeper.client import StepResult
from kvkeeper.engine_service.cache_session.transfer_runner import TransferRunner

SWAP_OUT, SWAP_IN = 1, 2
BLOCK_BYTES = 4


@pytest.fixture
def tiers() -> tuple[torch.Tensor, torch.Tensor]:
    """Device blocks of 10 and more, host blocks of 100 and more: uint8 [3, 4] each."""
    device = torch.arange(10, 13, dtype=torch.uint8)[:, None].repeat(1, BLOCK_BYTES)
    host = torch.arange(100, 103, dtype=torch.uint8)[:, None].repeat(1, BLOCK_BYTES)
    return device, host


def orders(*rows: tuple[int, int, int, int]) -> StepResult:
    """An answer with these orders: id, kind, source, destination."""
    columns = np.array(rows, np.int64).reshape(-1, 4).T

    class Answer:
        transfer_ids, transfer_kinds, transfer_sources, transfer_destinations = columns

    return cast(StepResult, cast(Any, Answer))


def run(transfers: TransferRunner, *rows: tuple[int, int, int, int]) -> None:
    moves = transfers.moves_of(orders(*rows))
    assert moves is not None
    moves.run()


def test_orders_run_in_order_and_are_reported_once(tiers: tuple[torch.Tensor, torch.Tensor]) -> None:
    device, host = tiers
    transfers = TransferRunner(device, host)
    run(transfers, (7, SWAP_OUT, 1, 2), (8, SWAP_IN, 0, 1))  # the second overwrites the source of the first
    assert (host[2].tolist(), device[1].tolist()) == ([11] * BLOCK_BYTES, [100] * BLOCK_BYTES)
    assert not transfers.has_unreported, "the step is still computed"
    assert not transfers.note_computed()
    assert transfers.has_unreported
    assert transfers.take_ended() == ([7, 8], [])
    assert transfers.take_ended() == ([], [])


def test_an_order_that_fails_is_reported_so_and_the_others_run(tiers: tuple[torch.Tensor, torch.Tensor]) -> None:
    device, host = tiers
    transfers = TransferRunner(device, host)
    run(transfers, (1, SWAP_OUT, 3, 0), (2, SWAP_IN, 1, 0))  # there is no block 3
    assert transfers.note_computed(), "one has failed"
    assert transfers.take_ended() == ([2], [1])
    assert (device[0].tolist(), host[0].tolist()) == ([101] * BLOCK_BYTES, [100] * BLOCK_BYTES)


def test_what_moved_is_counted_for_one_step(tiers: tuple[torch.Tensor, torch.Tensor]) -> None:
    transfers = TransferRunner(*tiers)
    run(transfers, (1, SWAP_OUT, 1, 1), (2, SWAP_OUT, 2, 2))
    transfers.note_computed()
    assert transfers.take_moved().num_bytes == 2 * BLOCK_BYTES
    assert transfers.take_moved().num_bytes == 0
    assert transfers.moves_of(orders()) is None
    assert transfers.take_moved().num_bytes == 0
