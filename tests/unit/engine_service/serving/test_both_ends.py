"""A request with its text in a front gives what one with its text in the engine gives, however late each hears of the other.

Both ends are the real ones. Between them lie two queues, so that draws, rounds, stops, reads and cancellations come in any
order.
"""

import asyncio
import random
from collections import deque
from contextlib import nullcontext
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.common.service.turns import TurnLimits, Turns
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.model_text import StopRules
from kvkeeper.engine_service.outputs.unread_tokens import UnreadTokens
from kvkeeper.engine_service.rpc.stream_pace import StreamPace
from kvkeeper.engine_service.serving.calls import FrontCalls, FrontServices
from kvkeeper.engine_service.serving.engine_link import EngineLink
from kvkeeper.engine_service.serving.frames import Frame, Kind
from kvkeeper.engine_service.serving.front_requests import FrontRequests
from kvkeeper.engine_service.serving.stream_buffer import StreamBuffer
from kvkeeper.engine_service.values.errors import EngineError
from kvkeeper.engine_service.values.output_chunk import OutputChunk
from kvkeeper.engine_service.values.request import Request
from kvkeeper.engine_service.values.sampling_params import GREEDY
from tests.support.slices import scaled
from tests.support.stand_ins.no_text import NoText
from tests.unit.engine_service.serving.test_front_requests import Letters

EOS, MAX_TOKENS = 9, 12
Outputs = dict[int, tuple[str, list[int], str | None]]  # of each continuation text, tokens and how it ended


class LettersText:
    def output(self, prompt: list[int], stops: tuple[str, ...], min_tokens: int, keep_special_tokens: bool = False) -> Letters:
        return Letters(stops)


class Queue:
    """One direction of a lane."""

    is_full = False

    def __init__(self) -> None:
        self.frames = deque[Frame]()
        self.on_room: Any = None

    def send(self, kind: Kind, number: int = 0, body: Any = None) -> None:
        self.frames.append((kind, number, body))


class Engine:
    """What draws, of one request."""

    def __init__(self, drawn: list[list[int]], stops: tuple[str, ...], unread: UnreadTokens) -> None:
        self.drawn, self.stops, self.unread = drawn, stops, unread
        self.places = [0] * len(drawn)
        self.generation: Generation | None = None

    def make(self, send: Any, *, makes_text: bool) -> Generation:
        count = len(self.drawn)
        prompt = np.arange(1, 4, dtype=np.int32)
        outputs: list[Any] = [Letters(self.stops) if makes_text else NoText() for _ in range(count)]
        self.generation = Generation(
            Request("r", prompt, MAX_TOKENS, n=count), GREEDY, 0, StopRules(frozenset({EOS})), outputs, send
        )
        self.generation.take_slot(self.unread)
        return self.generation

    def draw(self) -> None:
        generation = self.generation
        if generation is None or not generation.is_open:
            return
        for index, place in enumerate(self.places):
            if generation.is_open and index not in generation._ended:
                token_id = self.drawn[index][place]
                self.places[index] += 1
                if not generation.take_plain(token_id):
                    generation.take_token(index, token_id)


def collected(outputs: list[OutputChunk | EngineError]) -> tuple[Outputs, int | None]:
    """And the number of new tokens."""
    found: Outputs = {}
    num_new = None
    for each in outputs:
        assert isinstance(each, OutputChunk), each
        text, token_ids, reason = found.get(each.index, ("", [], None))
        assert reason is None, "nothing comes behind the end of a continuation"
        assert num_new is None, "nothing comes behind the end of the request"
        reason = None if each.finish_reason is None else each.finish_reason.name
        found[each.index] = text + each.text, [*token_ids, *each.token_ids], reason
        num_new = None if each.usage is None else each.usage.new_tokens
    return found, num_new


def expected(drawn: list[list[int]], stops: tuple[str, ...]) -> tuple[Outputs, int | None]:
    got: list[OutputChunk | EngineError] = []
    engine = Engine(drawn, stops, UnreadTokens())
    generation = engine.make(got.append, makes_text=True)
    while generation.is_open:
        engine.draw()
    generation.deliver()
    return collected(got)


async def through_a_front(
    drawn: list[list[int]], stops: tuple[str, ...], dice: random.Random, *, cancels: bool
) -> tuple[Outputs, int | None]:
    down, up, got = Queue(), Queue(), list[OutputChunk | EngineError]()
    engine = Engine(drawn, stops, UnreadTokens(dice.choice([1, 2, 128])))
    pace = StreamPace(dice.choice([0.0, 60.0]))

    async def admit(message: pb.GenerateRequest, send: Any, *, makes_text: bool) -> Generation:
        return engine.make(send, makes_text=makes_text)

    def stop_at(generation: Generation, index: int, num_tokens: int) -> None:
        generation.stop_at(index, num_tokens)

    nothing: Any = None
    turns = Turns(TurnLimits(1, 1))
    services = FrontServices({}, turns, admit, stop_at, nullcontext, pace, lambda path, caller: None, nothing, engine.unread)
    calls = FrontCalls(services, down)  # type: ignore[arg-type]
    link = EngineLink(nothing, nothing)
    link.lane = up  # type: ignore[assignment]
    front = FrontRequests(link, LettersText())  # type: ignore[arg-type]
    buffer = StreamBuffer(lambda *, at_once: None, merges=dice.random() < 0.8)
    message = pb.GenerateRequest(n=len(drawn), sampling=pb.SamplingParams(stop=stops))
    admitting = asyncio.create_task(front.admit(message, buffer))

    def pump(queue: Queue, take: Any) -> None:
        if queue.frames:
            take(*queue.frames.popleft())

    def read() -> None:
        chunks, error = buffer.take()
        got.extend([*chunks, *([] if error is None else [error])])

    def flush() -> None:
        if engine.generation is not None:
            engine.generation.deliver()
            engine.unread.notify_readers()
        if any(call.generation is not None for call in calls._calls.values()):
            calls._send_unread(has_round=dice.random() < 0.7)

    while not admitting.done():
        pump(up, calls.take)
        await asyncio.sleep(0)
        pump(down, link.take)
    admitting.result()
    moves: list[Any] = [engine.draw, flush, read, lambda: pump(down, link.take), lambda: pump(up, calls.take)]
    weights = [dice.random() + 0.05 for _ in moves]
    for turn in range(400):
        dice.choices(moves, weights)[0]()
        if cancels and turn == 20 and engine.generation is not None:
            engine.generation.cancel()
    for _ in range(60):
        for move in moves:
            move()
    calls.end()
    return collected(got)


@st.composite
def requests_of(draw: st.DrawFn) -> tuple[list[list[int]], tuple[str, ...]]:
    """Tokens that are drawn for each continuation, and stop strings: of few letters, so that these are found."""
    tokens = st.lists(st.sampled_from([1, 1, 2, 2, 3, 3, 4, EOS]), min_size=MAX_TOKENS, max_size=MAX_TOKENS)
    if draw(st.booleans()):  # nearly all of its tokens are plain
        return [draw(tokens)], ()
    return draw(st.lists(tokens, min_size=1, max_size=3)), tuple(
        draw(st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2))
    )


@settings(max_examples=scaled(60), deadline=None)
@given(request=requests_of(), seed=st.integers(0, 1 << 32), cancels=st.booleans())
def test_output_is_the_same_however_late_each_end_hears_of_the_other(
    request: tuple[list[list[int]], tuple[str, ...]], seed: int, cancels: bool
) -> None:
    drawn, stops = request
    whole, num_new = expected(drawn, stops)
    found, num_told = asyncio.run(through_a_front(drawn, stops, random.Random(seed), cancels=cancels))
    assert num_told == sum(len(token_ids) for _, token_ids, _ in found.values())
    if not any(reason == "CANCELLED" for *_, reason in found.values()):
        assert (found, num_told) == (whole, num_new)
    for index, (_, token_ids, reason) in found.items():
        assert reason is not None
        assert token_ids == whole[index][1][: len(token_ids)], "a part of what it would have been"
