"""Beam search as values: which lists go on, which have finished, when it is over, and which candidates a list has."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.logprobs import find_candidates
from kvkeeper.engine_service.outputs.beam_search import BeamOptions, BeamSearch, TokenList, why_ends
from kvkeeper.engine_service.outputs.model_text import StopRules
from kvkeeper.engine_service.values.request import FinishReason
from kvkeeper.engine_service.values.sampling_params import GREEDY, Branch, Candidates, SamplingRow, SearchRow

EOS, STOP = 9, 8


def make(
    num_beams: int, num_returned: int = 1, max_new: int = 5, length_penalty: float = 1.0, early: bool = False
) -> BeamSearch:
    stop = StopRules(frozenset({EOS}), frozenset({STOP}))
    options = BeamOptions(num_beams, length_penalty, early)
    return BeamSearch(options, num_returned, max_new, 1, lambda tokens: why_ends(stop, tokens))


def of(*pairs: tuple[int, float]) -> Candidates:
    return Candidates([token for token, _ in pairs], [logprob for _, logprob in pairs])


def told(search: BeamSearch) -> list[tuple[list[int], float]]:
    return [(found.tokens.token_ids(), round(found.tokens.logprob, 6)) for found in search.best()]


def test_the_first_step_has_one_list_and_its_likeliest_go_on() -> None:
    search = make(2)
    assert search.num_candidates == 3
    assert search.take_candidates(0, of((1, -0.1), (2, -0.5), (3, -1.0), (4, -2.0))) == [Branch(0, 0, 1), Branch(0, 1, 2)]


def test_it_moves_on_when_all_lists_have_theirs_in_any_order() -> None:
    search = make(2)
    search.take_candidates(0, of((1, -0.1), (2, -0.5), (3, -1.0), (4, -2.0)))
    assert search.take_candidates(1, of((1, -0.1), (2, -0.2), (3, -3.0), (4, -4.0))) is None
    assert search.take_candidates(1, of((1, -0.1), (2, -0.2), (3, -3.0), (4, -4.0))) is None, (
        "the same again is no other list's"
    )
    branches = search.take_candidates(0, of((1, -5.0), (2, -6.0), (3, -7.0), (4, -8.0)))
    assert branches == [Branch(1, 1, 1), Branch(1, 0, 2)], "the likeliest stays in its slot, the other takes a free one"


def test_equals_go_by_the_rank_of_their_lists_and_then_by_token() -> None:
    search = make(2)
    search.take_candidates(0, of((1, -0.5), (2, -0.5), (3, -0.5), (4, -0.5)))
    search.take_candidates(1, of((5, -1.0), (6, -1.0), (7, -1.0), (1, -1.0)))
    assert search.take_candidates(0, of((4, -1.0), (3, -1.0), (2, -1.0), (1, -1.0))) == [Branch(0, 0, 1), Branch(0, 1, 2)]


def test_one_that_ends_has_finished_only_among_the_first() -> None:
    search = make(2, max_new=2)
    assert search.take_candidates(0, of((1, -0.1), (2, -0.5), (EOS, -1.0), (4, -2.0))) == [Branch(0, 0, 1), Branch(0, 1, 2)]
    search.take_candidates(0, of((5, -1.0), (6, -1.5), (7, -9.0), (3, -9.0)))
    assert search.take_candidates(1, of((5, -4.0), (6, -9.0), (7, -9.0), (3, -9.0))) == []
    assert told(search) == [([1, 5], -1.1)], "the end was the third"


def test_what_ends_among_the_first_is_kept_and_others_go_on_in_its_place() -> None:
    search = make(2, num_returned=2, max_new=2)
    assert search.take_candidates(0, of((EOS, -0.3), (2, -0.5), (3, -1.0), (4, -2.0))) == [Branch(0, 0, 2), Branch(0, 1, 3)]
    search.take_candidates(0, of((5, -1.0), (6, -1.5), (7, -9.0), (3, -9.0)))
    assert search.take_candidates(1, of((5, -4.0), (6, -9.0), (7, -9.0), (3, -9.0))) == []
    assert told(search) == [([EOS], -0.3), ([2, 5], -1.5)], "by mean: -0.3 and -0.75"
    assert [found.reason for found in search.best()] == [FinishReason.END_OF_SEQUENCE, FinishReason.LENGTH]


@pytest.mark.parametrize(("length_penalty", "first"), [(0.0, [EOS]), (1.0, [EOS]), (3.0, [2, 5])])
def test_the_length_penalty_is_for_longer_ones(length_penalty: float, first: list[int]) -> None:
    search = make(2, max_new=2, length_penalty=length_penalty)
    search.take_candidates(0, of((EOS, -0.3), (2, -0.5), (3, -1.0), (4, -2.0)))
    search.take_candidates(0, of((5, -1.0), (6, -1.5), (7, -9.0), (3, -9.0)))
    search.take_candidates(1, of((5, -4.0), (6, -9.0), (7, -9.0), (3, -9.0)))
    assert told(search)[0][0] == first


def finish_two(search: BeamSearch, going: float) -> list[Branch] | None:
    """Two lists end with the second token, at means of -0.2 and -0.3; the best that goes on has the mean going."""
    search.take_candidates(0, of((1, -0.2), (2, -0.3), (3, -5.0), (4, -5.0)))
    search.take_candidates(0, of((EOS, -0.2), (5, going * 2 + 0.2), (6, -20.0), (7, -20.0)))
    return search.take_candidates(1, of((EOS, -0.3), (5, -20.0), (6, -20.0), (7, -20.0)))


def test_it_is_over_when_none_that_goes_on_is_better_than_the_worst_that_has_finished() -> None:
    assert finish_two(make(2), going=-0.31) == []
    assert finish_two(make(2), going=-0.3001) == []


def test_with_early_stopping_it_is_over_when_as_many_have_finished() -> None:
    def late(search: BeamSearch) -> list[Branch] | None:
        """Two have finished, and the best that goes on may still win by its length."""
        search.take_candidates(0, of((1, -0.2), (2, -0.3), (3, -5.0), (4, -5.0)))
        search.take_candidates(0, of((5, -0.01), (EOS, -0.2), (6, -20.0), (7, -20.0)))
        search.take_candidates(1, of((5, -20.0), (6, -20.0), (7, -20.0), (3, -20.0)))
        search.take_candidates(0, of((5, -0.01), (EOS, -0.4), (6, -20.0), (7, -20.0)))
        return search.take_candidates(1, of((5, -20.0), (6, -20.0), (7, -20.0), (3, -20.0)))

    assert late(make(2, early=True)) == []
    assert late(make(2)) not in ([], None)


def test_all_tokens_of_all_lists_are_counted() -> None:
    search = make(2, max_new=2)
    search.take_candidates(0, of((EOS, -0.3), (2, -0.5), (3, -1.0), (4, -2.0)))
    assert search.num_tokens == 3
    search.take_candidates(0, of((5, -1.0), (6, -1.5), (7, -9.0), (3, -9.0)))
    search.take_candidates(1, of((5, -4.0), (6, -9.0), (7, -9.0), (3, -9.0)))
    assert search.num_tokens == 5


def test_more_ending_ids_need_more_candidates() -> None:
    assert dataclasses.replace(make(4), num_ending_ids=3).num_candidates == 7
    assert dataclasses.replace(make(4), num_ending_ids=0).num_candidates == 4
    assert dataclasses.replace(make(4), num_ending_ids=3, text=Letters()).num_candidates == 11, "a string may end any of them"


class Letters:
    """Text that looks for "12"."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def push(self, token_id: int) -> tuple[str, bool]:
        self.text += str(token_id)
        return "", self.text.endswith("12")

    def flush(self) -> str:
        return self.text

    def copy(self) -> "Letters":
        return Letters(self.text)


def test_stop_ids_and_stop_strings_end_a_list_each_by_its_own_text() -> None:
    stop = StopRules(frozenset({EOS}), frozenset({STOP}))
    root = TokenList(None, 0, 0.0, 0, Letters())
    one, two = TokenList(root, 1, -1.0, 1), TokenList(root, 2, -1.0, 1)
    assert why_ends(stop, one) is why_ends(stop, two) is None
    assert why_ends(stop, TokenList(one, 2, -2.0, 2)) is FinishReason.STOP
    assert why_ends(stop, TokenList(two, 2, -2.0, 2)) is None
    assert why_ends(stop, TokenList(one, 2, -2.0, 2)) is FinishReason.STOP, "asking leaves no trace"
    assert why_ends(stop, TokenList(one, STOP, -2.0, 2)) is FinishReason.STOP
    assert why_ends(stop, TokenList(one, EOS, -2.0, 2)) is FinishReason.END_OF_SEQUENCE
    assert why_ends(stop, TokenList(TokenList(None, 0, 0.0, 0), 2, -2.0, 1)) is None, "without stop strings no text is made"


def row(token_ids: list[int], num_candidates: int, num_prompt: int = 2, **params: float) -> SearchRow:
    chosen = dataclasses.replace(GREEDY, **params)
    return SearchRow(SamplingRow(chosen, 0, 0, np.array(token_ids, np.int32), num_prompt), num_candidates)


def test_candidates_are_the_likeliest_with_penalties_on_the_log_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0], [2.0, 1.0, 0.5, -1.0], [0.0, 1.0, 2.0, 3.0]])
    logprobs = logits.log_softmax(1).tolist()
    rows = [row([0, 1], 2), row([1, 1, 0, 0], 3, repetition_penalty=2.0, frequency_penalty=0.25), row([0, 3], 9)]
    plain, penalised, all_of_them = find_candidates(logits, rows)
    assert plain is not None
    assert plain.token_ids == [0, 1]
    assert plain.logprobs == pytest.approx(logprobs[0][:2], abs=1e-6)
    assert penalised is not None
    changed = [2 * logprobs[1][0] - 0.5, 2 * logprobs[1][1], logprobs[1][2], logprobs[1][3]]
    order = sorted(range(4), key=lambda token: -changed[token])[:3]
    assert penalised.token_ids == order != [0, 1, 2]
    assert penalised.logprobs == pytest.approx([changed[token] for token in order], abs=1e-6)
    assert all_of_them is not None
    assert all_of_them.token_ids == [3, 2, 1, 0]


def test_logits_that_are_not_finite_have_no_candidates() -> None:
    logits = torch.tensor([[1.0, math.nan, 0.0], [1.0, 2.0, 0.0], [-math.inf] * 3, [1.0, -math.inf, 0.0]])
    found = find_candidates(logits, [row([0], 2)] * 4)
    assert [one is None for one in found] == [True, False, True, False]
    assert found[3] is not None
    assert found[3].token_ids == [0, 2]
