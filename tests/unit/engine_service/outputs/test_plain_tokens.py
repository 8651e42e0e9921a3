"""Tokens that a reader asks for give what tokens that are sent give: the same output, counts and ends, whenever it asks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.outputs.best_of import BestOf
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.plain_reader import PlainReader
from kvkeeper.engine_service.outputs.stopping import StopRules
from kvkeeper.engine_service.outputs.unread_tokens import UnreadTokens
from kvkeeper.engine_service.values.errors import EngineError, RequestFailed
from kvkeeper.engine_service.values.output_chunk import OutputChunk, joined
from kvkeeper.engine_service.values.request import FinishReason, Request
from kvkeeper.engine_service.values.sampling_params import GREEDY, LIKELIEST, SamplingParams

EOS, BROKEN = 9, 8
MAX_TOKENS = 12


class Letters:
    """Text of a token is its number; what is odd comes one token late, and BROKEN has none."""

    has_text, may_stop = True, False

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> tuple[str, bool]:
        if token_id == BROKEN:
            raise ValueError("no such token")
        text, self.held = (self.held, str(token_id)) if token_id % 2 else (self.held + str(token_id), "")
        return text, False

    def flush(self) -> str:
        return self.held


class Reader:
    """A generation and what its client has got."""

    def __init__(self, *, asks: bool, width: int = 128, **changes: Any) -> None:
        self.got: list[OutputChunk | EngineError] = []
        self.num_told = self.num_ends = 0
        request = Request("r", np.arange(3, dtype=np.int32), MAX_TOKENS, n=changes.pop("n", 1))
        outputs = changes.pop("outputs", [Letters() for _ in range(request.n)])
        self.generation = Generation(
            request, GREEDY, 0, StopRules(frozenset({EOS})), outputs, self.got.append, self._note_end, **changes
        )
        if asks:
            self.generation.take_slot(UnreadTokens(width))
            self.generation.let_take_more(self._note_told)

    def _note_told(self) -> None:
        self.num_told += 1

    def _note_end(self, generation: Generation) -> None:
        self.num_ends += 1

    def take(self, *token_ids: int) -> None:
        for token_id in token_ids:
            if self.generation.is_open and not self.generation.take_plain(token_id):
                self.generation.take_token(0, token_id)

    def ask(self) -> None:
        if (taken := self.generation.take_more()) is not None:
            self.got.append(taken.chunk())

    def all(self) -> tuple[OutputChunk | None, str]:
        """All chunks as one, and the reason of the error behind them."""
        errors = [one for one in self.got if isinstance(one, EngineError)]
        assert not errors or self.got[-1] is errors[0], "nothing comes behind an error"
        chunks = [one for one in self.got if isinstance(one, OutputChunk)]
        return (joined(chunks) if chunks else None), (errors[0].reason if errors else "")

    def counts(self) -> tuple[object, ...]:
        one = self.generation
        return one.num_taken, one.num_taken_of(0), one.usage, one.is_open, one.finish_reasons


ENDS = {
    "cancel": lambda one: one.cancel(),
    "fail": lambda one: one.fail(RequestFailed("a fault")),
    "cut_short": lambda one: one.cut_short(FinishReason.TIMED_OUT, RequestFailed("nothing yet")),
}
actions = st.one_of(st.integers(0, EOS).filter(lambda token_id: token_id != BROKEN), st.sampled_from(["ask", "deliver", *ENDS]))


@settings(max_examples=300, deadline=None)
@given(st.lists(actions, max_size=30))
def test_the_output_is_the_same_whenever_it_is_asked_for(script: list[int | str]) -> None:
    asking, pushed = Reader(asks=True), Reader(asks=False)
    for action in script:
        for one in (asking, pushed):
            if isinstance(action, int):
                one.take(action)
            elif action in ENDS:
                ENDS[action](one.generation)
            elif action == "deliver":
                one.generation.deliver()
            elif one is asking:
                one.ask()
        assert asking.counts() == pushed.counts()
    for one in (asking, pushed):
        one.generation.deliver()
        one.ask()
    assert asking.all() == pushed.all()
    assert asking.num_ends == pushed.num_ends == (not pushed.generation.is_open)


class NoText(Letters):
    """Of a model without a tokenizer."""

    has_text = False

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False


@settings(max_examples=200, deadline=None)
@given(st.lists(actions, max_size=30))
def test_the_output_is_the_same_for_a_reader_of_many_requests(script: list[int | str]) -> None:
    together, pushed = Reader(asks=True, outputs=[NoText()]), Reader(asks=False, outputs=[NoText()])
    reader = PlainReader(together._note_told)
    assert together.generation.let_read(reader, 7)
    for action in [*script, "deliver", "ask"]:
        for one in (together, pushed):
            if isinstance(action, int):
                one.take(action)
            elif action in ENDS:
                ENDS[action](one.generation)
            elif action == "deliver":
                one.generation.deliver()
            elif one is together and len(columns := reader.take().token_ids):
                one.got.append(OutputChunk(0, "", tuple(columns.tolist())))
        assert together.counts() == pushed.counts()
    assert together.all() == pushed.all()


def test_text_is_not_for_a_reader_of_many_requests() -> None:
    reader = PlainReader(lambda: None)
    one = Reader(asks=True)
    assert not one.generation.let_read(reader, 1)
    assert not Reader(asks=False, outputs=[NoText()]).generation.let_read(reader, 1), "it has no plain tokens"
    one.take(2)
    one.generation.deliver()
    one.take(2)
    assert not len(reader.take().token_ids)
    assert one.generation.take_more() is not None


def test_the_reader_is_told_once_until_it_asks() -> None:
    one = Reader(asks=True)
    one.take(2)
    one.generation.deliver()
    assert (len(one.got), one.num_told) == (1, 0), "the first token is sent"
    for _ in range(3):
        one.take(4)
        one.generation.deliver()
    assert (len(one.got), one.num_told) == (1, 1)
    one.ask()
    assert one.got[1:] == [OutputChunk(0, "444", (4, 4, 4))]
    one.take(6)
    one.generation.deliver()
    assert one.num_told == 2


def test_a_token_without_text_ends_the_request_behind_those_before_it() -> None:
    one = Reader(asks=True)
    one.take(2, 4, BROKEN, 6)
    one.generation.deliver()
    one.ask()
    chunk, reason = one.all()
    assert chunk is not None
    assert (chunk.token_ids, chunk.text, reason, one.num_ends) == ((2, 4), "24", "REQUEST_FAILED", 1)
    one.take(6)
    one.ask()
    assert one.all() == (chunk, reason)


def test_what_is_never_asked_for_is_sent_in_parts() -> None:
    one = Reader(asks=True, width=3)
    for _ in range(9):
        one.take(2)
        one.generation.deliver()
    assert [chunk.token_ids for chunk in one.got if isinstance(chunk, OutputChunk)] == [(2,), (2,) * 3, (2,), (2,) * 3, (2,)]


class Stopping(Letters):
    may_stop = True


@pytest.mark.parametrize("changes", [{"num_logprobs": 0}, {"n": 2}, {"outputs": [Stopping()]}], ids=["logprobs", "n", "stop"])
def test_tokens_that_bring_more_than_text_are_not_plain(changes: dict[str, Any]) -> None:
    one = Reader(asks=True, **changes)
    one.take(2)
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
    generation = Generation(request, params, 0, StopRules(), [Letters()], lambda output: None, **changes)
    assert (generation.sampling_row(0, request.prompt) is LIKELIEST) == is_likeliest


def test_a_stop_string_that_another_process_found_ends_a_continuation_where_it_was() -> None:
    reader = Reader(asks=False, n=2)
    for index in (0, 1):
        for token_id in (1, 3, 5):
            reader.generation.take_token(index, token_id)
    assert reader.generation.stop_at(0, 2)
    assert not reader.generation.stop_at(0, 1), "it has ended"
    assert not reader.generation.take_token(0, 7), "a step that was under way brings nothing more"
    assert (reader.generation.num_taken_of(0), reader.num_ends) == (2, 0)
    assert reader.generation.stop_at(1, 3)
    last = reader.got[-1]
    assert isinstance(last, OutputChunk)
    assert last.usage is not None
    assert (last.index, last.finish_reason, last.usage.new_tokens, reader.num_ends) == (1, FinishReason.STOP, 5, 1)
