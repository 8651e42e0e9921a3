"""What a stream's client has not read: handed over whole, and bounded where the client does not read at all."""

import asyncio

import pytest

from kvkeeper.engine_service.rpc.stream_pace import StreamPace
from kvkeeper.engine_service.serving import stream_buffer
from kvkeeper.engine_service.serving.stream_buffer import PacedBuffer, StreamBuffer
from kvkeeper.engine_service.values.errors import EngineError, NotRead, RequestFailed
from kvkeeper.engine_service.values.output_chunk import OutputChunk, TokenLogprobs, Usage
from kvkeeper.engine_service.values.request import FinishReason

LIMIT = 10
USAGE = Usage(1, 0, LIMIT, 0, 0)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> PacedBuffer:
    monkeypatch.setattr(stream_buffer, "MAX_UNREAD", LIMIT)
    return PacedBuffer(StreamPace(1e-6))


@pytest.fixture
def box(paced: PacedBuffer) -> StreamBuffer:
    return paced.buffer


def token(place: int) -> OutputChunk:
    return OutputChunk(0, str(place), (place,))


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_neighbours_are_taken_as_one_and_an_error_after_them(box: StreamBuffer) -> None:
    failure = RequestFailed("no more")
    for output in (token(1), token(2), failure):
        box.put(output)
    assert box.take() == ([OutputChunk(0, "12", (1, 2))], failure)


async def test_without_an_interval_each_token_is_taken_as_it_came() -> None:
    box = PacedBuffer(StreamPace(0)).buffer
    for place in (1, 2):
        box.put(token(place))
    assert box.take() == ([token(1), token(2)], None)


@pytest.mark.parametrize("interval_s", [1e-6, 0])
async def test_tokens_keep_their_place_between_chunks(interval_s: float) -> None:
    box = PacedBuffer(StreamPace(interval_s)).buffer
    box.put(OutputChunk(1, "a", (1,)))
    box.add([2, 3], ["b", "c"])
    box.put(OutputChunk(1, "d", (4,)))
    box.add([5], ["e"])
    assert box.take_tokens() is None, "there are chunks"
    chunks, _ = box.take()
    singly = [OutputChunk(0, "b", (2,)), OutputChunk(0, "c", (3,))]
    between = [OutputChunk(0, "bc", (2, 3))] if interval_s else singly
    assert chunks == [OutputChunk(1, "a", (1,)), *between, OutputChunk(1, "d", (4,)), OutputChunk(0, "e", (5,))]
    box.add([6, 7], ["f", "g"])
    box.add([8], ["h"])
    assert box.take_tokens() == ([6, 7, 8], "fgh")
    assert box.take_tokens() is None


async def test_tokens_that_are_not_read_count_and_are_dropped_too(box: StreamBuffer) -> None:
    told: list[EngineError] = []
    box.on_full = told.append
    for place in range(LIMIT + 1):
        box.add([place], [""])
    await turns()
    box.add([1], [""])
    assert box.take_tokens() is None
    assert box.take() == ([], told[0])


async def test_too_much_that_is_not_read_ends_the_request_once(box: StreamBuffer) -> None:
    told: list[EngineError] = []
    box.on_full = told.append
    for place in range(LIMIT):
        box.put(token(place))
    await turns()
    assert told == []
    for place in range(3):
        box.put(token(place))
        await turns()
    (error,) = told
    assert isinstance(error, NotRead)
    assert error.metadata == {"limit": str(LIMIT)}
    assert box.take() == ([], error), "what was not read is dropped"


async def test_much_at_once_is_no_fault_while_the_client_reads(paced: PacedBuffer, box: StreamBuffer) -> None:
    told: list[EngineError] = []
    box.on_full = told.append
    reading = asyncio.create_task(paced.take_unread())
    await turns()
    for place in range(5 * LIMIT):
        box.put(token(place))
    box.put(OutputChunk(0, "", (), FinishReason.LENGTH, USAGE))
    ((chunk,), error) = await reading
    await turns()
    assert (len(chunk.token_ids), chunk.usage, error, told) == (5 * LIMIT, USAGE, None, [])


async def test_log_probabilities_count(box: StreamBuffer) -> None:
    told: list[EngineError] = []
    box.on_full = told.append
    likely = TokenLogprobs(1, -1.0, 1, tuple(range(LIMIT)), (0.0,) * LIMIT)
    box.put(OutputChunk(0, "", (1,), logprobs=(likely,)))
    await turns()
    assert len(told) == 1


async def test_an_end_that_is_not_read_is_dropped_too(box: StreamBuffer) -> None:
    """The request has ended by itself, so that only the buffer can tell why its chunks are gone."""
    for place in range(LIMIT + 1):
        box.put(token(place))
    box.put(OutputChunk(0, "", (), FinishReason.LENGTH, USAGE))
    await turns()
    chunks, error = box.take()
    assert (chunks, isinstance(error, NotRead)) == ([], True)
