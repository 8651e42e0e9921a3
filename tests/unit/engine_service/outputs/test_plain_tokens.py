"""Tokens that a reader takes give what tokens that are sent give: the same output, counts and ends, whenever it takes them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.outputs.best_of import BestOf
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.model_text import StopRules
from kvkeeper.engine_service.outputs.unread_tokens import UnreadTokens
from kvkeeper.engine_service.values.errors import EngineError, RequestFailed
from kvkeeper.engine_service.values.output_chunk import OutputChunk, joined
from kvkeeper.engine_service.values.request import FinishReason, Request
from kvkeeper.engine_service.values.sampling_params import GREEDY, LIKELIEST, SamplingParams
from tests.support.slices import scaled
from tests.support.stand_ins.no_text import NoText

EOS = 9
MAX_TOKENS = 12


class Reader:
    """A generation and what its client has got."""

    def __init__(self, *, takes: bool, width: int = 128, **changes: Any) -> None:
        self.got: list[OutputChunk | EngineError] = []
        self.num_notified = self.num_ends = 0
        self.unread = UnreadTokens(width)
        request = Request("r", np.arange(3, dtype=np.int32), MAX_TOKENS, n=changes.pop("n", 1))
        outputs = changes.pop("outputs", [NoText() for _ in range(request.n)])
        self.generation = Generation(
            request, GREEDY, 0, StopRules(frozenset({EOS})), outputs, self.got.append, self._note_end, **changes
        )
        if takes:
            self.generation.take_slot(self.unread)
            self.generation.let_read(self, 7)

    def notify(self) -> None:
        self.num_notified += 1

    def _note_end(self, generation: Generation) -> None:
        self.num_ends += 1

    def take(self, *token_ids: int) -> None:
        for token_id in token_ids:
            if self.generation.is_open and not self.generation.take_plain(token_id):
                self.generation.take_token(0, token_id)

    def deliver(self) -> None:
        """As the loop does behind a step."""
        self.generation.deliver()
        self.unread.notify_readers()

    def read(self) -> None:
        columns = self.unread.take_columns(self)
        assert columns.numbers.tolist() in ([], [7])
        if len(columns.token_ids):
            self.got.append(OutputChunk(0, "", tuple(columns.token_ids.tolist())))

    def all(self) -> tuple[OutputChunk | None, str]:
        """All chunks as one, and the reason of the error behind them."""
        errors = [one for one in self.got if isinstance(one, EngineError)]
        assert not errors or self.got[-1] is errors[0], "nothing comes behind an error"
        chunks = [one for one in self.got if isinstance(one, OutputChunk)]
        return (joined(chunks) if chunks else None), (errors[0].reason if errors else "")

    def counts(self) -> tuple[object, ...]:
        one = self.generation
        return one.num_taken, one.count_taken(0), one.usage, one.is_open, one.finish_reasons


ENDS = {
    "cancel": lambda one: one.cancel(),
    "fail": lambda one: one.fail(RequestFailed("a fault")),
    "cut_short": lambda one: one.cut_short(FinishReason.TIMED_OUT, RequestFailed("nothing yet")),
}
actions = st.one_of(st.integers(0, EOS), st.sampled_from(["deliver", "read", *ENDS]))


@settings(max_examples=scaled(400), deadline=None)
@given(st.lists(actions, max_size=30), st.sampled_from([2, 128]))
def test_the_output_is_the_same_whenever_it_is_taken(script: list[int | str], width: int) -> None:
    taking, pushed = Reader(takes=True, width=width), Reader(takes=False)
    for action in [*script, "deliver", "read"]:
        for one in (taking, pushed):
            if isinstance(action, int):
                one.take(action)
            elif action in ENDS:
                ENDS[action](one.generation)
            elif action == "deliver":
                one.deliver()
            elif one is taking:
                one.read()
        assert taking.counts() == pushed.counts()
    assert taking.all() == pushed.all()
    assert taking.num_ends == pushed.num_ends == (not pushed.generation.is_open)


def test_the_first_token_is_a_chunk_and_the_reader_hears_of_others() -> None:
    one = Reader(takes=True)
    one.take(2)
    one.deliver()
    assert (len(one.got), one.num_notified) == (1, 0)
    for _ in range(3):
        one.take(4)
    one.deliver()
    one.deliver()
    assert (len(one.got), one.num_notified) == (1, 1)
    one.read()
    assert one.got[1:] == [OutputChunk(0, "", (4, 4, 4))]


def test_what_is_never_taken_is_sent_in_parts() -> None:
    one = Reader(takes=True, width=3)
    for _ in range(9):
        one.take(2)
        one.deliver()
    assert [chunk.token_ids for chunk in one.got if isinstance(chunk, OutputChunk)] == [(2,), (2,) * 3, (2,), (2,) * 3, (2,)]


class Letters(NoText):
    """Text that is made here."""

    has_text = True


@pytest.mark.parametrize("changes", [{"num_logprobs": 0}, {"n": 2}, {"outputs": [Letters()]}], ids=["logprobs", "n", "text"])
def test_tokens_that_bring_more_than_themselves_are_not_plain(changes: dict[str, Any]) -> None:
    one = Reader(takes=True, **changes)
    one.take(2)
    one.deliver()
    assert not one.generation.take_plain(2)


@pytest.mark.parametrize(
    ("params", "changes", "is_likeliest"),
    [
        (GREEDY, {}, True),
        (SamplingParams(temperature=0, repetition_penalty=1.1), {}, False),
        (SamplingParams(temperature=0, presence_penalty=0.1), {}, False),
        (SamplingParams(temperature=0, frequency_penalty=-0.1), {}, False),
        (SamplingParams(temperature=0.1), {}, False),
        (GREEDY, {"num_logprobs": 0}, False),
        (GREEDY, {"best_of": BestOf(1)}, False),
        (GREEDY, {"constraints": [object()]}, False),
    ],
)
def test_a_row_without_a_history_stands_for_those_that_need_none(
    params: SamplingParams, changes: dict[str, Any], is_likeliest: bool
) -> None:
    request = Request("r", np.arange(3, dtype=np.int32), MAX_TOKENS)
    generation = Generation(request, params, 0, StopRules(), [NoText()], lambda output: None, **changes)
    assert (generation.sampling_row(0, request.prompt) is LIKELIEST) == is_likeliest


def test_a_stop_string_that_another_process_found_ends_a_continuation_where_it_was() -> None:
    reader = Reader(takes=False, n=2)
    for index in (0, 1):
        for token_id in (1, 3, 5):
            reader.generation.take_token(index, token_id)
    assert reader.generation.stop_at(0, 2)
    assert not reader.generation.stop_at(0, 1), "it has ended"
    assert not reader.generation.take_token(0, 7), "a step that was under way brings nothing more"
    assert (reader.generation.count_taken(0), reader.num_ends) == (2, 0)
    assert reader.generation.stop_at(1, 3)
    last = reader.got[-1]
    assert isinstance(last, OutputChunk)
    assert last.usage is not None
    assert (last.index, last.finish_reason, last.usage.new_tokens, reader.num_ends) == (1, FinishReason.STOP, 5, 1)
