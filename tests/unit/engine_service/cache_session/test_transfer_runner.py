"""Transfer orders move whole blocks between the tiers, and each is reported once, done or failed."""

import json
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvkeeper.client import StepResult
from kvkeeper.engine_service.cache_session.transfer_runner import TransferRunner
from kvkeeper.engine_service.ranks.mapped_arena import make_packing, packing_fields, packing_from
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.host_blocks import HostBlocks
from kvkeeper.kernels.quantised.layout import QuantisedLayout

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
    moves = transfers.make_moves(orders(*rows))
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


def test_orders_of_a_step_that_runs_ahead_are_reported_with_that_step(tiers: tuple[torch.Tensor, torch.Tensor]) -> None:
    transfers = TransferRunner(*tiers)
    run(transfers, (1, SWAP_OUT, 1, 1))
    run(transfers, (2, SWAP_OUT, 3, 0), (3, SWAP_OUT, 2, 2))  # there is no block 3
    assert not transfers.note_computed()
    assert transfers.take_ended() == ([1], [])
    assert transfers.take_moved().num_bytes == BLOCK_BYTES
    assert transfers.note_computed()
    assert transfers.take_ended() == ([3], [2])
    assert transfers.take_moved().num_bytes == BLOCK_BYTES


def test_what_moved_is_counted_for_one_step(tiers: tuple[torch.Tensor, torch.Tensor]) -> None:
    transfers = TransferRunner(*tiers)
    run(transfers, (1, SWAP_OUT, 1, 1), (2, SWAP_OUT, 2, 2))
    transfers.note_computed()
    assert transfers.take_moved().num_bytes == 2 * BLOCK_BYTES
    assert transfers.take_moved().num_bytes == 0
    assert transfers.make_moves(orders()) is None
    assert transfers.take_moved().num_bytes == 0


def test_blocks_are_converted_on_their_way_to_a_tier_of_few_bits_and_back() -> None:
    """Many orders of both kinds, in an order that has to be kept, and one that fails."""
    packing = HostBlocks(4, 2, 2, 4, torch.bfloat16, FORMATS["int8"])
    numbers = torch.randn((40, 4 * 2 * 2 * 4), generator=torch.Generator().manual_seed(2)).bfloat16()
    device, host = numbers.view(torch.uint8).clone(), torch.zeros((40, packing.block_bytes), dtype=torch.uint8)
    exact = device.clone()
    transfers = TransferRunner(device, host, packing=packing)
    out = [(at, SWAP_OUT, at, 39 - at) for at in range(1, 36)]
    back = [(100 + at, SWAP_IN, 39 - at, at + 1) for at in range(1, 34)]
    run(transfers, *out[:20], (99, SWAP_OUT, 40, 1), *out[20:], *back)  # there is no block 40
    assert transfers.note_computed()
    done, failed = transfers.take_ended()
    assert (sorted(done), failed) == ([order[0] for order in out + back], [99])
    once = packing.unpack(packing.pack(exact))
    assert torch.equal(host[4:39].flip(0), packing.pack(exact[1:36]))
    assert torch.equal(device[2:35], once[1:34])
    assert not torch.equal(once, exact)
    assert torch.equal(device[35:], exact[35:])


def test_how_blocks_are_kept_on_the_host_is_told_to_other_ranks() -> None:
    plain = KvLayout(3, 2, 8, torch.float16, 4)
    packing = make_packing(plain, "int4")
    assert packing == HostBlocks(6, 4, 2, 8, torch.float16, FORMATS["int4"])
    assert packing_from(json.loads(json.dumps(packing_fields(packing)))) == packing
    assert make_packing(plain, "") is None is packing_from(packing_fields(None))
    halves = QuantisedLayout(3, 2, 8, 4, FORMATS["fp16"], torch.float32)
    assert make_packing(halves, "int8") == HostBlocks(6, 4, 2, 8, torch.float16, FORMATS["int8"])
