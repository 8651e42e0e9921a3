"""What the first rank asks of the others for a step, and with which step an order that failed on one of them is told."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.cache_session.transfer_runner import TransferRunner
from kvkeeper.engine_service.compute.step_compute import StepCompute, StepRows
from kvkeeper.engine_service.model.hash_toy import HashToyConfig, HashToyRunner
from kvkeeper.engine_service.ranks.messages import Kind, encode_ids
from kvkeeper.engine_service.ranks.ranked_runner import RankedRunner
from kvkeeper.engine_service.scheduler.plan import StepChanges, Work
from kvkeeper.engine_service.values.batch import Batch
from tests.support.worlds.batches import ScheduledRow, build_batch

SWAP_OUT, BLOCK_SIZE, NUM_BLOCKS = 1, 4, 4
BATCH = build_batch([ScheduledRow([1, 2], 0, np.array([1], np.int32))], BLOCK_SIZE)


class NotedRanks:
    """Ranks of which all is noted that is asked of them. failed: the orders that fail, by the answers."""

    def __init__(self, *failed: list[int]) -> None:
        self.asked: list[Kind] = []
        self._failed = list(failed)

    def send_all(self, kind: Kind, body: bytes = b"") -> None:
        self.asked.append(kind)

    def hear(self) -> list[bytearray]:
        return [bytearray(encode_ids(self._failed.pop(0) if self._failed else []))]


def runner_of(ranks: Any) -> RankedRunner:
    config = HashToyConfig()
    layout = config.kv_layout(BLOCK_SIZE)
    view = layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8))
    return RankedRunner(HashToyRunner(config, view, layout), ranks)


def work_of(batch: Batch | None, *copies: tuple[int, int]) -> Work:
    none: Any = np.empty(0, np.int64)
    changes = StepChanges((), (), (), ())
    return Work(none, none, none, 0, [*copies], batch, none, none, [], [], none, [], none, (), [], none, [], none, changes)


@pytest.mark.parametrize(
    ("batch", "copies", "asked"),
    [
        (BATCH, [], [Kind.FORWARD]),
        (BATCH, [(1, 2)], [Kind.COPIES, Kind.FORWARD]),
        (None, [(1, 2)], [Kind.COPIES, Kind.SYNCHRONIZE]),
        (None, [], []),
    ],
    ids=["a batch", "a batch behind copies", "copies alone", "nothing"],
)
def test_a_step_waits_for_the_ranks_once(batch: Batch | None, copies: list[tuple[int, int]], asked: list[Kind]) -> None:
    ranks = NotedRanks()
    compute = StepCompute(runner_of(ranks))
    for _ in range(2):
        assert compute.launch(work_of(batch, *copies), StepRows([], [])).read() is not None
    assert ranks.asked == asked * 2


def test_an_order_that_fails_elsewhere_is_told_with_its_step_though_the_next_one_was_launched() -> None:
    """Also where both ranks fail it, and where another order of the step that runs ahead fails."""
    ranks = NotedRanks([2], [3, 4])
    runner = runner_of(ranks)
    blocks = torch.zeros((NUM_BLOCKS, 8), dtype=torch.uint8)
    transfers = TransferRunner(blocks, blocks.clone(), runner)
    for order_ids in ([1, 2], [3, 4]):
        sources = [0 if order != 4 else NUM_BLOCKS for order in order_ids]  # there is no such block
        columns = np.array([order_ids, [SWAP_OUT] * 2, sources, [1, 2]], np.int64)
        names = [f"transfer_{column}" for column in ("ids", "kinds", "sources", "destinations")]
        answer: Any = SimpleNamespace(**dict(zip(names, columns, strict=True)))
        moves = transfers.make_moves(answer)
        assert moves is not None
        moves.run()
        runner.forward(BATCH)
    assert transfers.note_computed()
    assert transfers.take_ended() == ([1], [2])
    assert transfers.note_computed()
    assert transfers.take_ended() == ([], [4, 3])
