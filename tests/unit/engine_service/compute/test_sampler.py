"""The sampler: meaning of every parameter, the distribution, and that a row depends on itself alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.compute.sampler import sample
from kvkeeper.engine_service.values.sampling_params import (
    GREEDY,
    LIKELIEST,
    SamplingParams,
    SamplingParamsError,
    SamplingRow,
    are_likeliest,
)
from kvkeeper.kernels.philox import philox4x32, uniforms
from kvkeeper.kernels.sampling import SamplingTensors, sample_rows

torch.set_num_threads(1)

PLAIN = SamplingParams(temperature=1, top_p=1, top_k=0, repetition_penalty=1)


def params(**changes):
    return SamplingParams(**{"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1, **changes})


def row(params=PLAIN, seed=0, position=4, sample_idx=0, token_ids=None, num_prompt_tokens=0):
    history = np.zeros(position, dtype=np.int64) if token_ids is None else np.array(token_ids, dtype=np.int64)
    return SamplingRow(params, seed, sample_idx, history, num_prompt_tokens)


def draw_many(logits, params, num_draws=4000):
    """Token counts over many seeds."""
    rows = [row(params, seed) for seed in range(num_draws)]
    found = sample(torch.tensor([logits] * num_draws), rows)
    assert not found.bad_rows
    return np.bincount(found.token_ids, minlength=len(logits))


def reference_probs(logits, params):
    """Straightforward filters on one row, in the order top_k, top_p, min_p, typical_p; ties at a threshold stay."""
    scaled = np.array(logits, dtype=np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    if 0 < params.top_k < len(probs):
        probs[probs < np.sort(probs)[-params.top_k]] = 0
    probs /= probs.sum()
    if params.top_p < 1:
        ranked = np.sort(probs)[::-1]
        kept = ranked[: int(np.searchsorted(np.cumsum(ranked), params.top_p)) + 1]
        probs[probs < kept[-1]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    probs /= probs.sum()
    if params.typical_p < 1:
        with np.errstate(divide="ignore"):
            surprise = -np.log(probs)
        entropy = (probs[probs > 0] * surprise[probs > 0]).sum()
        distance = np.abs(surprise - entropy)
        order = np.argsort(distance, kind="stable")
        last = order[int(np.searchsorted(np.cumsum(probs[order]), params.typical_p))]
        probs[distance > distance[last]] = 0
    return probs / probs.sum()


def assert_distribution(counts, probs):
    assert not counts[probs == 0].any()
    rare = probs * counts.sum() < 8  # chi-square needs filled cells: the rare ones share one with the next
    rare[np.flatnonzero(probs == probs[~rare].min())[0]] = True
    expected = np.append(probs[~rare], probs[rare].sum()) * counts.sum()
    statistic = ((np.append(counts[~rare], counts[rare].sum()) - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4  # far in the tail of chi-square; the seeds are fixed


LOGITS = [1.0, -0.5, 0.25, 2.0, -3.0, 0.25, 1.5, -1.0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 5},  # a tie at the threshold
        {"top_k": 100},
        {"top_p": 0.6},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"typical_p": 0.5},
        {"typical_p": 0.9},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3, "typical_p": 0.95},
    ],
)
def test_draws_follow_the_filtered_distribution(changes):
    assert_distribution(draw_many(LOGITS, params(**changes)), reference_probs(LOGITS, params(**changes)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_support_is_exactly_the_references(data):
    size = data.draw(st.integers(1, 12))
    levels = data.draw(st.lists(st.integers(-6, 6), min_size=size, max_size=size))  # many ties
    changes = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "top_k": st.integers(0, 14),
                "top_p": st.sampled_from([0.1, 0.33, 0.7, 0.95, 1.0]),
                "min_p": st.sampled_from([0.0, 0.011, 0.3, 0.9]),
                "temperature": st.sampled_from([0.31, 1.0, 2.3]),
            },
        )
    )
    probs = reference_probs([level * 0.7 for level in levels], params(**changes))
    logits = torch.tensor([[level * 0.7 for level in levels]] * 512)
    grid = (torch.arange(512, dtype=torch.float64) + 0.5) / 512
    one = params(**changes)
    column = {name: torch.full((512,), float(getattr(one, name)), dtype=torch.float64) for name in ("temperature", "top_p", "min_p", "typical_p")}  # fmt: skip # noqa: E501
    tensors = SamplingTensors(top_k=torch.full((512,), one.top_k), **column)
    counts = np.bincount(sample_rows(logits, tensors, grid).numpy(), minlength=size)
    np.testing.assert_allclose(counts / 512, probs, atol=2.1 / 512)
    assert not counts[probs == 0].any()


def test_temperature_zero_is_the_first_of_the_likeliest():
    found = sample(torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]]), [row(GREEDY), row(GREEDY)])
    assert found.token_ids.tolist() == [1, 0]


def test_greedy_ignores_the_filters():
    assert sample(torch.tensor([LOGITS]), [row(params(temperature=0, top_k=1, min_p=1.0))]).token_ids.tolist() == [3]


@pytest.mark.parametrize("top_k", [0, 1, 3, 4, 7, 600])
def test_a_row_does_not_depend_on_its_neighbours(top_k):
    generator = torch.Generator().manual_seed(top_k)
    logits = (torch.randn(64, 600, generator=generator) * 8).round() / 4  # coarse, so that thresholds are tied
    choices = [
        params(top_k=top_k),
        params(top_k=top_k, top_p=0.7),
        params(top_k=5),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.1),
        GREEDY,
        params(min_p=0.1, typical_p=0.8),
        params(frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.3),
    ]
    rows = [row(choices[i % 7], seed=i, token_ids=[i, i, 2 * i, 5], num_prompt_tokens=1, sample_idx=i % 3) for i in range(64)]
    together = sample(logits, rows).token_ids
    alone = [int(sample(logits[i : i + 1], [rows[i]]).token_ids[0]) for i in range(64)]
    backwards = sample(logits.flip(0), rows[::-1]).token_ids[::-1]
    assert together.tolist() == alone == backwards.tolist()


def test_seed_sample_and_position_each_change_the_draw_and_nothing_else_does():
    logits = torch.zeros(1, 1 << 16)

    def one(**changes):
        return int(sample(logits, [row(**changes)]).token_ids[0])

    draws = [one(), one(seed=1), one(seed=1 << 40), one(position=5), one(sample_idx=1)]
    assert len(set(draws)) == 5
    assert one(token_ids=[9, 9, 9, 9], num_prompt_tokens=2) == draws[0]


def test_repetition_penalty_reads_prompt_and_output():
    logits = torch.tensor([[2.0, 1.5, -1.0, 1.9]])
    penalised = params(temperature=0, repetition_penalty=2.0)
    assert sample(logits, [row(penalised, token_ids=[])]).token_ids.tolist() == [0]
    assert sample(logits, [row(penalised, token_ids=[0, 0], num_prompt_tokens=2)]).token_ids.tolist() == [3]
    assert sample(logits, [row(penalised, token_ids=[0, 3])]).token_ids.tolist() == [1]
    assert sample(-logits, [row(penalised, token_ids=[2, 2])]).token_ids.tolist() == [2]
    assert logits.tolist() == [[2.0, 1.5, -1.0, pytest.approx(1.9)]]


def test_frequency_and_presence_count_the_output_alone():
    logits = torch.tensor([[1.0, 0.9, 0.5]])
    frequency, presence = params(temperature=0, frequency_penalty=0.3), params(temperature=0, presence_penalty=0.45)
    assert sample(logits, [row(frequency, token_ids=[0, 0, 0], num_prompt_tokens=3)]).token_ids.tolist() == [0]
    assert sample(logits, [row(frequency, token_ids=[0], num_prompt_tokens=0)]).token_ids.tolist() == [1]
    assert sample(logits, [row(frequency, token_ids=[0, 0, 1, 1])]).token_ids.tolist() == [2]
    assert sample(logits, [row(presence, token_ids=[0, 0, 0, 1])]).token_ids.tolist() == [0]


def test_a_penalised_greedy_row_is_drawn_after_the_penalty_also_beside_sampled_rows():
    logits = torch.tensor([[1.0, 0.9, 0.5]]).expand(3, -1)  # shared memory: it must not be written to
    presence = params(temperature=0, presence_penalty=0.45)
    found = sample(logits, [row(presence, token_ids=[0]), row(top_k_1 := params(top_k=1)), row(GREEDY)])
    assert found.token_ids.tolist() == [1, 0, 0]
    assert sample(logits[:2], [row(top_k_1), row(presence, token_ids=[0])]).token_ids.tolist() == [0, 1]


def test_rows_without_a_history_draw_what_greedy_rows_draw():
    logits = torch.tensor([[0.0, 2.0, 2.0], [math.nan, 0.0, 0.0], [5.0, 0.0, 1.0], [-math.inf] * 3])
    found, expected = sample(logits, [LIKELIEST] * 4), sample(logits, [row(GREEDY)] * 4)
    mixed = sample(logits, [LIKELIEST, row(GREEDY), LIKELIEST, row()])
    assert [one.bad_rows for one in (found, expected, mixed)] == [(1, 3)] * 3
    assert [one.token_ids[[0, 2]].tolist() for one in (found, expected, mixed)] == [[1, 0]] * 3
    assert not are_likeliest([LIKELIEST, row(GREEDY)])


def test_bad_rows_are_reported_and_the_others_sampled():
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, 5.0, -inf], [inf, 0.0, 0.0], [-inf, -inf, -inf], [-inf, 0.0, -inf]])
    found = sample(logits, [row(GREEDY), row(GREEDY), row(), row(), row()])
    assert found.bad_rows == (0, 2, 3)
    assert found.token_ids[[1, 4]].tolist() == [1, 1]


def test_a_uniform_close_to_one_picks_a_token_that_has_weight():
    logits = torch.full((1, 9), -math.inf)
    logits[0, 2:5] = torch.tensor([0.0, 0.1, -0.2])
    one = torch.ones(1, dtype=torch.float64)
    tensors = SamplingTensors(one, torch.zeros(1, dtype=torch.int64), one, one * 0, one)
    assert sample_rows(logits, tensors, one - 2**-53).tolist() == [4]
    assert sample_rows(logits, tensors, one * 0).tolist() == [2]


def test_philox_gives_the_published_words():
    """Known answers of Random123's kat_vectors for philox4x32 with 10 rounds."""

    def words(counter, key):
        column = philox4x32(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
        return [int(word) for word in column[:, 0]]

    ones = 0xFFFFFFFF
    assert words([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_uniforms_fill_the_unit_interval():
    found = uniforms(np.arange(20000, dtype=np.uint64), np.zeros(20000, np.uint64), np.full(20000, 7, np.uint64))
    assert found.min() >= 0
    assert found.max() < 1
    assert_distribution(np.bincount((found * 16).astype(int), minlength=16), np.full(16, 1 / 16))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 1e-5), ("temperature", math.nan), ("temperature", math.inf),
        ("top_p", 0), ("top_p", 1.01), ("top_k", -1), ("top_k", 1.5), ("min_p", -0.1), ("typical_p", 0),
        ("repetition_penalty", 0), ("frequency_penalty", 2.1), ("presence_penalty", math.nan),
    ],
)  # fmt: skip
def test_params_out_of_range_are_refused(field, value):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_by_default_nothing_shapes_the_distribution():
    found = SamplingParams()
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (1, 1, 0, 1)


def test_a_constraint_is_obeyed_and_one_that_allows_nothing_harms_its_row_alone():
    class Only:
        def __init__(self, *token_ids):
            self.token_ids = token_ids

        def allowed(self):
            return np.isin(np.arange(5), self.token_ids)

    def constrained(params, *token_ids):
        return SamplingRow(params, 0, 0, np.zeros(3, np.int64), 0, constraint=Only(*token_ids))

    logits = torch.tensor([[9.0, 0.0, 1.0, 0.0, 0.0]] * 4)
    rows = [constrained(GREEDY, 1, 2), constrained(GREEDY), row(GREEDY), constrained(PLAIN, 3)]
    found = sample(logits, rows)
    assert (found.token_ids[[0, 2, 3]].tolist(), found.stuck_rows, found.bad_rows) == ([2, 0, 3], (1,), ())
    assert logits[0, 0] == 9, "the model's own logits stay as they were"
