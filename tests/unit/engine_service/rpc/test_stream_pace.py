"""When streams are written: their first word at once, then together, not too often, and nothing is left unwritten."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvkeeper.engine_service.rpc.stream_pace import HasUnread, StreamPace

INTERVAL_S = 0.05


class Clock:
    """The clock and the timers of a loop, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, work: Callable[[], None]) -> object:
        self.timers.append((when, work))
        return work

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [work for when, work in self.timers if when <= self.now + 1e-9]
        self.timers = [one for one in self.timers if one[0] > self.now + 1e-9]
        for work in due:
            work()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pace_of(clock: Clock, interval_s: float = INTERVAL_S) -> StreamPace:
    return StreamPace(interval_s, lambda: cast(Any, clock))


async def is_written(has_unread: HasUnread) -> bool:
    """Whether a stream that waits is woken now."""
    waiting = asyncio.ensure_future(has_unread.wait())
    for _ in range(3):
        await asyncio.sleep(0)
    if waiting.done():
        return True
    waiting.cancel()
    return False


async def begun(pace: StreamPace, count: int) -> list[HasUnread]:
    """Streams whose first word is written."""
    streams = [HasUnread(pace) for _ in range(count)]
    for stream in streams:
        stream.notify(at_once=False)
        assert await is_written(stream), "the first word is written at once"
        assert not await is_written(stream), "once"
    return streams


async def test_streams_are_written_together_and_not_more_often_than_the_interval(clock: Clock) -> None:
    streams = await begun(pace_of(clock), 3)
    for round_number in range(4):
        for stream in streams:
            stream.notify(at_once=False)
            stream.notify(at_once=False)
        assert len(clock.timers) == 1, "one timer for all streams"
        if round_number:
            clock.advance(INTERVAL_S * 0.9)
            assert not any([await is_written(stream) for stream in streams])
        clock.advance(INTERVAL_S * 0.1)
        assert all([await is_written(stream) for stream in streams])
        assert not any([await is_written(stream) for stream in streams]), "once a round"


async def test_a_word_after_a_long_silence_is_written_with_the_loops_next_turn(clock: Clock) -> None:
    (stream,) = await begun(pace_of(clock), 1)
    for _ in range(3):
        clock.advance(INTERVAL_S * 2)
        stream.notify(at_once=False)
        clock.advance(0.0)
        assert await is_written(stream)


async def test_what_is_told_after_a_round_is_written_with_the_next_one(clock: Clock) -> None:
    (stream,) = await begun(pace_of(clock), 1)
    stream.notify(at_once=False)
    clock.advance(0.0)
    stream.notify(at_once=False)  # before the stream's task ran
    assert await is_written(stream), "with the round before"
    stream.notify(at_once=False)
    clock.advance(INTERVAL_S)
    assert await is_written(stream)


async def test_what_does_not_wait_for_a_round_leaves_what_does_to_the_next(clock: Clock) -> None:
    (stream,) = await begun(pace_of(clock), 1)
    stream.notify(at_once=False)
    clock.advance(0.0)
    assert await stream.wait(), "a round"
    stream.notify(at_once=False)
    stream.notify(at_once=True)
    assert not await stream.wait(), "an end alone"
    assert not await is_written(stream)
    clock.advance(INTERVAL_S)
    assert await stream.wait()


async def test_an_end_does_not_wait_for_a_round(clock: Clock) -> None:
    (stream,) = await begun(pace_of(clock), 1)
    stream.notify(at_once=False)
    clock.advance(0.0)
    assert await is_written(stream)
    stream.notify(at_once=False)
    stream.notify(at_once=True)
    assert await is_written(stream)


async def test_many_streams_are_written_less_often_so_that_steps_have_time(clock: Clock) -> None:
    streams = await begun(pace_of(clock), 1000)
    for stream in streams:
        stream.notify(at_once=False)
    clock.advance(0.0)
    for stream in streams:
        assert await is_written(stream)
        stream.notify(at_once=False)
    clock.advance(0.19)
    assert len(clock.timers) == 1, "1,000 writes take a tenth of a second, which is half of the time of the loop"
    clock.advance(0.02)
    assert clock.timers == []


@pytest.mark.parametrize("at_once", [True, False])
async def test_without_an_interval_each_word_is_written_at_once(clock: Clock, at_once: bool) -> None:
    (stream,) = await begun(pace_of(clock, 0.0), 1)
    for _ in range(3):
        stream.notify(at_once=at_once)
        assert await is_written(stream)
    assert clock.timers == []
