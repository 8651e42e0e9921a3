"""Draws by column are those of the requests' own rows, and stand for these only where nothing else matters."""

from typing import Any

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.device.token_counts import LastTokens
from kvkeeper.engine_service.compute.sampler import StepLogits, draw, sample
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.model_text import StopRules
from kvkeeper.engine_service.outputs.unread_tokens import Histories, SlotDraws
from kvkeeper.engine_service.values.request import NO_SLOT, Request
from kvkeeper.engine_service.values.sampling_params import GREEDY, LIKELIEST, PlainDraws, SamplingParams, as_plain

WARM = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, typical_p=0.95)
KINDS = [GREEDY, WARM, SamplingParams(), SamplingParams(temperature=2.0, top_p=0.5)]
PENALISED = [
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=-0.4),
    *KINDS,
]


def behind(lens: list[int]) -> Histories:
    """Rows with so many tokens, the same in each, and nothing awaited."""
    num = np.array(lens, np.int32)
    which = np.arange(len(num))
    return Histories(np.zeros((len(num), 9), np.int32), which, num, num // 2, np.zeros(len(num), np.bool_), which + 1)


def generation(params: SamplingParams, seed: int = 0, **changes: Any) -> Generation:
    return Generation(
        Request("r", np.arange(3, dtype=np.int32), 9), params, seed, StopRules(), [], lambda output: None, **changes
    )


def test_they_are_drawn_as_the_rows_of_their_requests() -> None:
    draws, random = SlotDraws(), np.random.default_rng(0)
    generations = [generation(KINDS[number % 4], seed=2**64 - 1 - number) for number in range(40)]
    for slot, one in enumerate(generations, 1):
        draws.set(slot, one.plain_params, one.seed)
    logits = torch.from_numpy(random.normal(size=(40, 64)).astype(np.float32))
    for _ in range(20):
        order, lens = random.permutation(40), random.integers(3, 9, 40).astype(np.int32)
        rows = [generations[at].sampling_row(0, np.zeros(length, np.int32)) for at, length in zip(order, lens, strict=True)]
        plain = draws.rows(order + 1, behind(lens.tolist()))
        assert isinstance(plain, PlainDraws)
        assert plain.penalised is None
        assert as_plain(plain) is plain
        assert sample(logits, plain).token_ids.tolist() == sample(logits, rows).token_ids.tolist()


def test_penalties_by_column_are_those_of_the_requests_rows_also_of_tokens_that_are_awaited() -> None:
    draws, random, last = SlotDraws(), np.random.default_rng(1), LastTokens()
    generations = [generation(PENALISED[number % 6], seed=number) for number in range(24)]
    for slot, one in enumerate(generations, 1):
        draws.set(slot, one.plain_params, one.seed)
    logits, tokens = torch.from_numpy(random.normal(size=(24, 32)).astype(np.float32)), random.integers(0, 32, (40, 30))
    last.put(np.arange(40), torch.from_numpy(random.integers(0, 32, 40)))
    for _ in range(20):
        order, which = random.permutation(24), random.permutation(40)[:24]
        lens, awaited = random.integers(3, 31, 24), random.random(24) < 0.5
        histories = Histories(tokens.astype(np.int32), which, lens, np.full(24, 3), awaited, 100 + which)
        plain = draws.rows(order + 1, histories)
        assert isinstance(plain, PlainDraws)
        assert plain.penalised is not None
        assert len(plain.penalised) == 8
        assert plain.penalised.serials is not None
        assert plain.penalised.serials.tolist() == (100 + plain.penalised.which).tolist()
        assert as_plain(plain) is None, "a graph that draws knows no history"
        rows = [
            generations[at].sampling_row(0, tokens[row, :length], int(row) if waits else None)
            for at, row, length, waits in zip(order, which, lens, awaited, strict=True)
        ]
        found, expected = (draw(StepLogits(logits), each, last).outcomes for each in (plain, rows))
        assert found.tolist() == expected.tolist()


def test_the_likeliest_alone_need_no_columns() -> None:
    draws = SlotDraws()
    for slot in (1, 2, 3):
        draws.set(slot, GREEDY if slot < 3 else WARM, 7)
    assert draws.rows(np.array([2, 1]), behind([4, 5])) == [LIKELIEST, LIKELIEST]
    assert isinstance(draws.rows(np.array([2, 3]), behind([4, 5])), PlainDraws)


@pytest.mark.parametrize(
    "other",
    [
        generation(WARM, num_logprobs=0),
        generation(WARM, constraints=[object()]),
    ],
    ids=["logprobs", "constraint"],
)
def test_where_more_matters_rows_are_the_requests_to_make(other: Generation) -> None:
    draws = SlotDraws()
    draws.set(40, WARM, 0)
    assert draws.rows(np.array([40]), behind([4])) is not None
    assert draws.rows(np.array([40, NO_SLOT]), behind([4, 4])) is None
    draws.set(40, other.plain_params, other.seed)
    assert draws.rows(np.array([40]), behind([4])) is None, "a slot has another owner"
