"""A front's request: text, stop strings and counts come out as the engine would have made them itself."""

import asyncio
from typing import Any

import pytest

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.outputs.model_text import TextOutput
from kvkeeper.engine_service.outputs.tokenizer import StopStrings
from kvkeeper.engine_service.serving import stream_buffer
from kvkeeper.engine_service.serving.frames import Admitted, Kind, Stopped
from kvkeeper.engine_service.serving.front_requests import FrontRequest
from kvkeeper.engine_service.serving.stream_buffer import StreamBuffer
from kvkeeper.engine_service.values.errors import EngineError, NotRead, RequestMoved
from kvkeeper.engine_service.values.output_chunk import OutputChunk, TokenLogprobs, Usage
from kvkeeper.engine_service.values.request import FinishReason

BROKEN_TOKEN = 0
HALF_A_CHARACTER = 26  # z: what is held back behind it cannot be made text
USAGE = Usage(3, 1, 50, 0, 0)


class Letters:
    """Text of which token n is the nth letter; "" stands for a letter that is not complete."""

    has_text = True

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.pushed: list[int] = []
        self._stops = StopStrings(stops) if stops else None

    def push(self, token_id: int) -> tuple[str, bool]:
        self.pushed.append(token_id)
        if token_id == BROKEN_TOKEN:
            raise RuntimeError("a bug of the tokenizer")
        text = chr(ord("a") + token_id - 1)
        if self._stops is None:
            return text, False
        match = self._stops.add_piece(text)
        return match.text, match.stop is not None

    def flush(self) -> str:
        if HALF_A_CHARACTER in self.pushed:
            raise RuntimeError("a bug of the tokenizer")
        return "" if self._stops is None else self._stops.flush()

    def copy(self) -> "Letters":
        raise NotImplementedError


class LettersText:
    def output(
        self, prompt: list[int], stops: tuple[str, ...], min_tokens: int, keep_special_tokens: bool = False
    ) -> TextOutput:
        return Letters(stops)


class Asked:
    """What the engine is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Kind, Any]] = []
        self.is_dropped = False
        self.take_tokens: Any = None

    def send_kind(self, kind: Kind, body: Any = None) -> None:
        self.told.append((kind, body))

    def drop(self) -> None:
        self.is_dropped = True


class World:
    def __init__(self, *stops: str, makes_text: bool = True) -> None:
        self.asked, self.got = Asked(), list[OutputChunk | EngineError]()
        self.unread = StreamBuffer(lambda *, at_once: None)
        message = pb.GenerateRequest(sampling=pb.SamplingParams(stop=stops))
        asked: Any = self.asked
        text: Any = LettersText()
        self.request = FrontRequest(asked, message, self.unread, text)
        self.request.take(Kind.ADMITTED, Admitted("id", makes_text, []))

    def chunk(self, token_ids: str | list[int], index: int = 0, text: str = "", **fields: Any) -> None:
        """Tokens, as the letters that they stand for."""
        ids = [ord(letter) - ord("a") + 1 for letter in token_ids] if isinstance(token_ids, str) else token_ids
        self.request.take(Kind.CHUNK, OutputChunk(index, text, tuple(ids), **fields))

    def tokens(self, letters: str) -> None:
        self.asked.take_tokens([ord(letter) - ord("a") + 1 for letter in letters])

    @property
    def sent(self) -> list[OutputChunk | EngineError]:
        """All that is there to be read, what was read before first."""
        chunks, error = self.unread.take()
        self.got += [*chunks, *([error] if error is not None and error not in self.got else [])]
        return self.got

    @property
    def chunks(self) -> list[OutputChunk]:
        return [each for each in self.sent if isinstance(each, OutputChunk)]

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.chunks)


async def test_tokens_keep_their_place_between_chunks() -> None:
    world = World()
    world.chunk("a")
    world.tokens("bc")
    world.tokens("d")
    assert world.text == "abcd"
    world.tokens("e")
    world.chunk("f", finish_reason=FinishReason.LENGTH, usage=USAGE)
    assert world.text == "abcdef"
    assert world.chunks[-1].usage is not None
    assert world.chunks[-1].usage.new_tokens == 50, "without stop strings the engine's count is right"


async def test_a_stop_string_ends_the_output_once_the_engine_has_confirmed_it() -> None:
    world = World("de")
    world.chunk("ab")
    world.tokens("cdexyw")
    assert (world.text, len(world.chunks)) == ("ab", 1), "its last chunk waits for the counts"
    assert world.asked.told == [(Kind.STOPPED, Stopped(0, 5))]
    world.tokens("more")
    world.chunk("still")
    world.chunk("", finish_reason=FinishReason.STOP, usage=USAGE)
    last = world.chunks[-1]
    assert (world.text, last.finish_reason, len(last.token_ids)) == ("abc", FinishReason.STOP, 3)
    assert last.usage is not None
    assert last.usage.new_tokens == 5, "what the engine computed behind the stop is not counted"


async def test_a_stop_string_in_the_engines_last_chunk_needs_no_confirmation() -> None:
    world = World("cd")
    world.chunk("abcd", finish_reason=FinishReason.LENGTH, usage=USAGE)
    (last,) = world.chunks
    assert (last.text, last.finish_reason, world.asked.told) == ("ab", FinishReason.STOP, [])


async def test_text_that_was_held_back_comes_with_the_end() -> None:
    world = World("cx")
    world.chunk("abc")
    assert world.text == "ab"
    world.chunk("", finish_reason=FinishReason.CANCELLED, usage=USAGE)
    assert (world.text, world.chunks[-1].finish_reason) == ("abc", FinishReason.CANCELLED)


@pytest.mark.parametrize(("reason", "is_told"), [("CANCELLED", True), ("STALLED", True), ("LENGTH", False)])
async def test_a_request_that_is_cut_short_ends_also_where_its_rest_cannot_be_made_text(reason: str, is_told: bool) -> None:
    world = World()
    world.chunk("az")
    world.chunk("", finish_reason=FinishReason[reason], usage=USAGE)
    last = world.sent[-1]
    if is_told:
        assert isinstance(last, OutputChunk)
        assert last.finish_reason is FinishReason[reason]
    else:
        assert isinstance(last, EngineError)
        assert last.reason == "REQUEST_FAILED"


async def test_continuations_stop_apart() -> None:
    world = World("b")
    world.chunk("ab", index=1)
    world.chunk("ac", index=0)
    world.chunk("", index=1, finish_reason=FinishReason.STOP)
    world.chunk("d", index=0, finish_reason=FinishReason.LENGTH, usage=USAGE)
    ends = [(each.index, each.text, each.finish_reason) for each in world.chunks if each.finish_reason is not None]
    assert ends == [(1, "a", FinishReason.STOP), (0, "d", FinishReason.LENGTH)]
    assert world.chunks[-1].usage is not None
    assert world.chunks[-1].usage.new_tokens == 5


async def test_log_probabilities_behind_a_stop_are_dropped() -> None:
    world = World("b")
    told = tuple(TokenLogprobs(token, -1.0, 1, (), ()) for token in (1, 2, 3))
    world.chunk("abc", logprobs=told)
    world.chunk("", finish_reason=FinishReason.STOP, usage=USAGE)
    assert [one.token_id for one in world.chunks[-1].logprobs] == [1, 2]


async def test_an_engine_that_made_the_text_is_believed() -> None:
    world = World("ab", makes_text=False)
    world.chunk("ab", text="xy", finish_reason=FinishReason.STOP, usage=USAGE, cumulative_logprob=-2.0)
    (last,) = world.chunks
    assert (last.text, last.cumulative_logprob, last.usage and last.usage.new_tokens) == ("xy", -2.0, 50)


async def test_an_error_ends_it_also_while_a_stop_waits() -> None:
    world = World("b")
    world.chunk("ab")
    moved = RequestMoved("elsewhere", address="there", request_id="id")
    world.request.take(Kind.ERROR, moved)
    (error,) = world.sent
    assert isinstance(error, EngineError)
    assert (error.reason, error.metadata) == (moved.reason, moved.metadata)


@pytest.mark.parametrize("is_chunk", [False, True])
async def test_tokens_that_cannot_be_made_text_end_the_request(is_chunk: bool) -> None:
    world = World()
    if not is_chunk:
        world.asked.take_tokens([1, BROKEN_TOKEN])
        assert world.text == "a", "what came before it is told"
    else:
        world.chunk([1, BROKEN_TOKEN])
    ((kind, body),) = world.asked.told
    assert (kind, body.reason) == (Kind.BROKEN, "REQUEST_FAILED")
    last = world.sent[-1]
    assert isinstance(last, EngineError)
    assert last.reason == "REQUEST_FAILED"
    world.chunk("b")
    assert world.sent[-1] is last, "nothing comes behind it"


async def test_a_client_that_does_not_read_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_buffer, "MAX_UNREAD", 3)
    world = World()
    world.tokens("abcd")
    await asyncio.sleep(0)
    ((kind, body),) = world.asked.told
    assert (kind, body.reason) == (Kind.BROKEN, "NOT_READ")
    world.tokens("e")
    (error,) = world.sent
    assert isinstance(error, NotRead), "nothing else, neither before nor behind it"


async def test_a_client_that_went_away_drops_the_call() -> None:
    world = World()
    world.request.cancel()
    assert world.asked.is_dropped
    world.tokens("abc")
    world.chunk("d")
    assert world.sent == []
