"""Rules about single tokens against a naive reference: any history, awaited tokens, beside rows of any kind, and beams."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.compute.device.token_counts import LastTokens
from kvkeeper.engine_service.compute.logprobs import find_candidates
from kvkeeper.engine_service.compute.sampler import StepLogits, draw, sample
from kvkeeper.engine_service.compute.token_changes import apply_rules
from kvkeeper.engine_service.values.sampling_params import GREEDY, SamplingParams, SamplingRow, SearchRow, as_plain
from kvkeeper.engine_service.values.token_rules import TokenRules

torch.set_num_threads(1)
VOCAB = 6
NO_RULES = {"bias": {}, "allowed": None, "bad_words": (), "min_tokens": 0, "ending_ids": frozenset()}

tokens = st.integers(0, VOCAB - 1)
all_rules = st.builds(
    TokenRules,
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, -0.5, 3.0, 100.0]), max_size=4),
    allowed=st.none() | st.sets(tokens, min_size=1).map(lambda ids: np.array(sorted(ids), np.int32)),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=5),
    min_tokens=st.integers(0, 5),
    ending_ids=st.frozensets(tokens, max_size=2),
)


def rules(**changes):
    return TokenRules(**{**NO_RULES, **changes})


def row(rules, output=(), prompt=(0, 0), params=GREEDY, awaited_row=None):
    return SamplingRow(params, 0, 0, np.array([*prompt, *output], np.int32), len(prompt), None, None, awaited_row, rules)


def changed(logits, rules, output):
    """Token by token, from what the rules say."""
    found = []
    for token, logit in enumerate(logits):
        is_allowed = rules.allowed is None or token in rules.allowed.tolist()
        is_bad = any((*output, token)[-len(word) :] == word for word in rules.bad_words)
        ends_early = token in rules.ending_ids and len(output) < rules.min_tokens
        found.append(logit + rules.bias.get(token, 0.0) if is_allowed and not is_bad and not ends_early else -math.inf)
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_logits_are_the_references(data):
    cases = data.draw(st.lists(st.tuples(st.none() | all_rules, st.lists(tokens, max_size=6)), min_size=1, max_size=4))
    logits = torch.arange(len(cases) * VOCAB, dtype=torch.float32).view(len(cases), VOCAB).sin()
    expected = [
        own if one is None else changed(own, one, output) for (one, output), own in zip(cases, logits.tolist(), strict=True)
    ]
    before = logits.clone()
    found = apply_rules(logits, [row(one, output) for one, output in cases])
    torch.testing.assert_close(found, torch.tensor(expected))
    assert torch.equal(logits, before)

    last = LastTokens()  # the same, where the host does not know the last token of some outputs
    awaiting = [at for at, (_, output) in enumerate(cases) if output and data.draw(st.booleans())]
    last.put(np.array(awaiting, np.int64), torch.tensor([cases[at][1][-1] for at in awaiting], dtype=torch.int64))
    rows = [
        row(one, output[:-1], awaited_row=at) if at in awaiting else row(one, output) for at, (one, output) in enumerate(cases)
    ]
    assert torch.equal(apply_rules(logits, rows, last), found)
    candidates = find_candidates(logits, [SearchRow(row(one, output), VOCAB) for one, output in cases])
    for (one, output), own, candidate in zip(cases, logits.log_softmax(dim=1).tolist(), candidates, strict=True):
        left = own if one is None else changed(own, one, output)
        wanted = sorted((-value, token) for token, value in enumerate(left) if value > -math.inf)
        assert candidate.token_ids == [token for _, token in wanted]


def test_a_word_that_the_prompt_begins_may_end_in_the_output():
    one = rules(bad_words=[(4, 5)])
    logits = torch.tensor([[0.0, 0, 0, 0, 0, 9]])
    assert sample(logits, [row(one, prompt=(1, 4))]).token_ids.tolist() == [5]
    assert sample(logits, [row(one, [4], prompt=(1,))]).token_ids.tolist() == [0]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=5.0), SamplingParams(temperature=0, presence_penalty=2.0)]
)
def test_a_row_without_a_token_left_is_stuck_and_the_others_go_on(params):
    nothing = rules(allowed=np.array([2], np.int32), bad_words=[(2,)])
    only = rules(allowed=np.array([3], np.int32))
    logits = torch.zeros(1, VOCAB).expand(4, -1)  # shared memory: it must not be written to
    found = sample(logits, [row(nothing, params=params), row(only, params=params), row(None, params=params), row(None)])
    assert (found.stuck_rows, found.bad_rows) == ((0,), ())
    assert found.token_ids[1] == 3


def test_a_bias_comes_before_penalties_and_hides_no_number_that_is_not_finite():
    penalised = SamplingParams(temperature=0, repetition_penalty=10.0)
    logits = torch.tensor([[-1.0, 0, 0, 0, 0, 0], [math.nan, 0, 0, 0, 0, 0]])
    one = rules(bias={0: 1.5}, bad_words=[(0, 1)])  # 0.5 divided, where -1 would be multiplied
    found = sample(logits, [row(one, params=penalised), row(one)])
    assert (found.token_ids[0], found.bad_rows) == (0, (1,))


def test_no_graph_draws_such_rows():
    assert as_plain([row(rules(bias={0: 1.0}))]) is None
    assert as_plain([row(None)]) is not None


def test_rows_that_a_step_draws_behind_what_is_not_read_depend_on_it_alone_where_words_do():
    assert row(rules(bad_words=[(1, 2)]), awaited_row=0).depends_on_awaited
    assert not row(rules(bad_words=[(1,)], bias={0: 1.0}, min_tokens=3), awaited_row=0).depends_on_awaited
    last = LastTokens()
    last.put(np.array([0]), torch.tensor([1]))
    step = draw(StepLogits(torch.tensor([[0.0, 0, 9, 0, 0, 0]])), [row(rules(bad_words=[(1, 2)]), awaited_row=0)], last)
    assert step.drawn.tolist() == [0]
