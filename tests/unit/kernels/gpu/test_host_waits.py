"""How often the host waits for a device in a step that draws: once, for the mark behind it, whatever way it draws.

Logits claim to be on CUDA, kernels are interpreted, and the device does nothing until the host waits for it. A beam search is
the one that reads what it has found where it is launched, so no step is launched ahead of its tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.step_compute import Computed, StepCompute, StepRows
from kvkeeper.engine_service.scheduler.plan import PromptScore, StepChanges, Work
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.engine_service.values.sampling_params import (
    LIKELIEST,
    PenalisedRows,
    PlainDraws,
    SamplingParams,
    SamplingRow,
    SearchRow,
)
from kvkeeper.engine_service.values.token_rules import TokenRules
from kvkeeper.kernels.layout import KvLayout
from tests.support.stand_ins.host_reads import HostReads
from tests.support.stand_ins.late_queue import LateQueue
from tests.unit.kernels.gpu.pretend import on_cuda

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
NUM_ROWS, VOCAB_SIZE, NUM_STEPS = 3, 40, 4
HISTORY = np.array([1, 2, 3, 2], np.int32)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
SHAPED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01)
RULES = TokenRules({3: 1.5}, np.arange(20, dtype=np.int32), [(4,), (2, 5), (3, 2, 6)], 9, frozenset({7}))


class Runner:
    """Its logits are on a device."""

    layout = KvLayout(1, 1, 2, torch.float16, 2)
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self._draw = torch.Generator().manual_seed(3)

    def forward(self, batch: Batch) -> torch.Tensor:
        return on_cuda(torch.randn(NUM_ROWS, VOCAB_SIZE, generator=self._draw))[0]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        assert not pairs

    def synchronize(self) -> None: ...


class WatchedQueue(LateQueue):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def submit(self, work: Callable[[], None]) -> None:
        def watched() -> None:
            with self._reads.watched():
                work()

        super().submit(watched)


class OneInTwo:
    """A constraint."""

    def allowed(self) -> np.ndarray:
        return np.arange(VOCAB_SIZE) % 2 == 0


def rows_of(params: SamplingParams, awaits: bool, **fields: Any) -> list[SamplingRow]:
    """awaits: the step before draws the last token of each history."""
    return [
        SamplingRow(params, seed, 0, HISTORY[: 4 - awaits], 2, awaited_row=seed if awaits else None, **fields)
        for seed in range(NUM_ROWS)
    ]


def by_column(rows: list[SamplingRow]) -> PlainDraws:
    return dataclasses.replace(PlainDraws.of(rows), penalised=PenalisedRows.of(rows))


WAYS: dict[str, Callable[[bool], Any]] = {
    "the likeliest": lambda awaits: [LIKELIEST] * NUM_ROWS,
    "drawn": lambda awaits: rows_of(SHAPED, awaits),
    "drawn by column": lambda awaits: PlainDraws.of(rows_of(SHAPED, awaits)),
    "some drawn": lambda awaits: [LIKELIEST, *rows_of(SHAPED, awaits)[1:]],
    "log probabilities": lambda awaits: rows_of(SHAPED, awaits, num_logprobs=2),
    "penalised": lambda awaits: rows_of(PENALISED, awaits),
    "penalised by column": lambda awaits: by_column(rows_of(PENALISED, awaits)),
    "penalised with log probabilities": lambda awaits: rows_of(PENALISED, awaits, num_logprobs=0),
    "the likeliest of penalised": lambda awaits: rows_of(dataclasses.replace(PENALISED, temperature=0), awaits),
    "ruled": lambda awaits: rows_of(SHAPED, awaits, rules=RULES),
    "penalised with rules": lambda awaits: rows_of(PENALISED, awaits, rules=RULES),
    "constrained": lambda awaits: rows_of(SHAPED, False, constraint=OneInTwo()),  # it waits for the step before
}


def work_of(**fields: Any) -> Work:
    """A step in which each row decodes."""
    ids, flags, ints = np.arange(NUM_ROWS), np.zeros(NUM_ROWS, np.bool_), np.ones(NUM_ROWS, np.int32)
    none: Any = np.empty(0, np.int64)
    batch = Batch(
        token_ids=ids,
        positions=ids,
        slot_mapping=ids,
        query_start_loc=np.arange(NUM_ROWS + 1, dtype=np.int32),
        seq_lens=ints,
        block_tables=np.zeros((NUM_ROWS, 1), np.int32),
        logit_rows=ids,
        logit_start_loc=np.arange(NUM_ROWS + 1, dtype=np.int32),
    )
    sampled: list[Any] = [None] * NUM_ROWS
    changes = StepChanges((), (), (), ())
    work = Work(ids, ints, ids, 0, [], batch, ids, flags, sampled, [], ids, [], none, (), [], none, [], ints, changes)
    return dataclasses.replace(work, **fields)


class World:
    """Steps of which one runs ahead, and what the host waited for meanwhile."""

    def __init__(self) -> None:
        self.reads = HostReads()
        self.queue = WatchedQueue(self.reads)
        self.compute = StepCompute(Runner(), self.queue)
        self.found: list[Computed] = []

    def run(self, work: Work, how: Callable[[bool], StepRows], *, ahead: bool = True) -> None:
        before = None
        for at in range(NUM_STEPS):
            with self.reads.watched():
                flight = self.compute.launch(work, how(at > 0))
            for done in [before] if ahead else [flight]:
                if done is not None:
                    computed = done.read()
                    assert computed is not None, "the step failed"
                    self.found.append(computed)
            assert self.queue.num_blocked == len(self.found), "for the mark of each step that is read"
            before = flight
        if ahead:
            assert before is not None
            last = before.read()
            assert last is not None
            self.found.append(last)


@pytest.mark.parametrize("way", WAYS)
def test_the_host_waits_once_a_step_whatever_way_its_tokens_are_drawn(way: str) -> None:
    world = World()
    world.run(work_of(), lambda awaits: StepRows(WAYS[way](awaits), []))
    assert (world.queue.num_blocked, world.reads.count) == (NUM_STEPS, 0)
    tokens = [computed.sampled.token_ids for computed in world.found]
    assert all(((each >= 0) & (each < VOCAB_SIZE)).all() for each in tokens)
    assert [len(computed.logprobs) for computed in world.found] == [NUM_ROWS * ("log" in way)] * NUM_STEPS
    assert way != "constrained" or not (np.concatenate(tokens) % 2).any()


def test_prompts_that_are_told_or_go_on_cost_no_wait_of_their_own() -> None:
    nobody: Any = None
    score = PromptScore(nobody, 0, [4, 5], 0, 2)
    world = World()
    work = work_of(scores=(score,), unfinished=[nobody], check_idx=np.array([1]))
    world.run(work, lambda awaits: StepRows([LIKELIEST] * NUM_ROWS, []))
    assert (world.queue.num_blocked, world.reads.count) == (NUM_STEPS, 0)
    assert all(len(computed.prompt_logprobs[0]) == 2 and computed.broken == [] for computed in world.found)


def test_a_beam_search_reads_its_candidates_where_it_is_launched() -> None:
    """Whether they are finite, their tokens, and their log probabilities."""
    rows = [SearchRow(row, 2) for row in rows_of(PENALISED, False, rules=RULES)]
    world = World()
    work = work_of(sampled=[], sample_rows=np.empty(0, np.int64), logit_idx=np.empty(0, np.int64))
    work = dataclasses.replace(work, search_idx=np.arange(NUM_ROWS))
    world.run(work, lambda awaits: StepRows([], rows), ahead=False)
    assert (world.queue.num_blocked, world.reads.count) == (NUM_STEPS, 3 * NUM_STEPS)
    assert all(len(each.token_ids) == 2 for computed in world.found for each in computed.candidates if each is not None)
