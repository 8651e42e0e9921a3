"""Many blocks in one call: neighbours as one copy, by the driver's call for many, or one by one where it has none."""

import numpy as np
import pytest
import torch

from kvkeeper.common.cuda import runtime
from kvkeeper.engine_service.ranks import block_copies
from kvkeeper.engine_service.ranks.block_copies import (
    SWAP_OUT,
    BatchedCopies,
    BlockMover,
    SmallCopies,
    copies_between,
    copy_spans,
    find_spans,
)
from tests.support.stand_ins.fake_cuda import FakeCuda

SWAP_IN, STREAM = 2, 7


@pytest.fixture
def cuda(tmp_path, monkeypatch):
    fake = FakeCuda(tmp_path, "a")
    monkeypatch.setattr(runtime, "_bound", fake)
    return fake


def blocks(first, count=8, num_bytes=4):
    return torch.arange(first, first + count, dtype=torch.uint8)[:, None].repeat(1, num_bytes)


def test_neighbours_in_both_tiers_are_one_span():
    source, target = blocks(0), blocks(100)
    pairs = [(5, 2), (1, 4), (2, 5), (3, 6), (6, 7), (7, 3)]
    assert list(find_spans(source, target, pairs)) == [(1, 4, 3), (5, 2, 1), (6, 7, 1), (7, 3, 1)]
    assert list(find_spans(source, target, [])) == []


def test_blocks_that_ranks_share_are_no_neighbours():
    shared = torch.zeros(8, 2, 4, dtype=torch.uint8)[:, 1]
    assert list(find_spans(blocks(0), shared, [(1, 1), (2, 2)])) == [(1, 1, 1), (2, 2, 1)]
    copy_spans(blocks(0), shared, [(1, 1), (2, 2)])
    assert shared[:, 0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("can_copy_many", [True, False])
def test_a_step_s_orders_go_in_one_call_for_each_direction(cuda, can_copy_many, capfd):
    cuda.can_copy_many = can_copy_many
    device, host = blocks(0), torch.zeros(8, 2, 4, dtype=torch.uint8)[:, 1].copy_(blocks(100))
    mover = BlockMover(device, host, BatchedCopies(0, lambda: STREAM))
    orders = [(at, SWAP_OUT, at, 7 - at) for at in range(3)] + [(at, SWAP_IN, at - 3, at) for at in range(3, 6)]
    assert mover.move(orders) == ([0, 1, 2, 3, 4, 5], [])
    assert host[:, 0].tolist() == [100, 101, 102, 103, 104, 2, 1, 0]
    assert device[:, 0].tolist() == [0, 1, 2, 100, 101, 102, 6, 7]
    assert cuda.batches == ([3, 3] if can_copy_many else [])
    mover.move(orders)
    assert capfd.readouterr().out.count("no_batched_copies") == (0 if can_copy_many else 1), "told once"


def test_orders_that_depend_on_each_other_are_not_in_one_call(cuda):
    device, host = blocks(0), blocks(100)
    mover = BlockMover(device, host, BatchedCopies(0, lambda: STREAM))
    # Out of 1, another block into 1, and what was swapped out into 2.
    done, failed = mover.move(
        [(1, SWAP_OUT, 1, 3), (2, SWAP_OUT, 4, 5), (3, SWAP_IN, 6, 1), (4, SWAP_IN, 3, 2), (5, SWAP_IN, 7, 7)]
    )
    assert (sorted(done), failed) == ([1, 2, 3, 4, 5], [])
    assert (device[1, 0].item(), device[2, 0].item(), device[7, 0].item()) == (106, 1, 107)
    assert (host[3, 0].item(), host[5, 0].item()) == (1, 4)
    assert cuda.batches == [2, 3]


def test_a_batch_has_no_more_copies_than_a_driver_bears(cuda, monkeypatch):
    monkeypatch.setattr("kvkeeper.engine_service.ranks.block_copies.MOST_COPIES", 3)
    source, target = blocks(0), blocks(100)
    BatchedCopies(0, lambda: STREAM)(source, target, [(at, 7 - at) for at in range(8)])
    assert cuda.batches == [3, 3, 2]
    assert target[:, 0].tolist() == list(range(7, -1, -1))


def test_the_default_stream_is_given_no_batch(cuda):
    source, target = blocks(0), blocks(100)
    BatchedCopies(0, lambda: 0)(source, target, [(1, 5), (2, 3)])
    assert cuda.batches == []
    assert (target[5, 0].item(), target[3, 0].item()) == (1, 2)


def test_an_order_without_a_block_fails_alone_and_a_call_that_fails_with_all_of_its_orders():
    device, host = blocks(0), blocks(100)
    wrong = [(1, SWAP_OUT, 8, 0), (2, SWAP_OUT, -1, 0), (3, SWAP_IN, 0, 8), (4, SWAP_IN, -1, 0)]
    assert BlockMover(device, host).move([*wrong, (5, SWAP_IN, 1, 2)]) == ([5], [1, 2, 3, 4])
    assert device[2, 0].item() == 101

    def broken(source, target, pairs):
        if source is host:
            raise RuntimeError("an illegal memory access was encountered")
        copy_spans(source, target, pairs)

    mover = BlockMover(device, host, broken)
    assert mover.move([(6, SWAP_OUT, 1, 1), (7, SWAP_IN, 2, 3), (8, SWAP_IN, 4, 5)]) == ([6], [7, 8])


def test_orders_in_one_call_are_as_those_one_by_one(cuda):
    draw = np.random.default_rng(3)
    for _ in range(40):
        device, host = blocks(0), blocks(100)
        expected_device, expected_host = device.clone(), host.clone()
        orders = [(at, int(draw.integers(1, 3)), *draw.integers(0, 8, 2).tolist()) for at in range(6)]
        for _, kind, source, to in orders:
            if kind == SWAP_OUT:
                expected_host[to] = expected_device[source]
            else:
                expected_device[to] = expected_host[source]
        BlockMover(device, host, BatchedCopies(0, lambda: STREAM)).move(orders)
        assert torch.equal(device, expected_device) and torch.equal(host, expected_host), orders


def test_small_blocks_are_copied_by_a_kernel_where_they_are_many_and_pinned_by_then(monkeypatch):
    """The host's memory is pinned once the ways are chosen, since that takes seconds."""
    calls, pinned = [], []
    monkeypatch.setattr(block_copies, "move_blocks", lambda source, target, pairs: calls.append("kernel"))
    small = SmallCopies(lambda source, target, pairs: calls.append(len(pairs)), lambda: bool(pinned))
    small(blocks(0), blocks(100), [(1, 2)] * 16)
    pinned.append(True)
    small(blocks(0), blocks(100), [(1, 2)] * 15)
    small(blocks(0), blocks(100), [(1, 2)] * 16)
    assert calls == [16, 15, "kernel"]


def test_the_size_of_a_block_on_the_host_says_which_way_it_goes():
    device = torch.device("cuda", 1)
    assert isinstance(copies_between(device, torch.zeros(1, 28 * 1024 - 16, dtype=torch.uint8)), SmallCopies)
    assert isinstance(copies_between(device, torch.zeros(1, 28 * 1024, dtype=torch.uint8)), BatchedCopies)
    assert isinstance(copies_between(device, torch.zeros(0, 1, dtype=torch.uint8)), BatchedCopies), "no host tier"
    assert copies_between(torch.device("cpu"), blocks(100)) is copy_spans
