"""How many calls are let in at a time: those allowed, in turn of their connections; after a pause without a word, one more."""

import asyncio

import pytest

from kvkeeper.service import turns as module
from kvkeeper.service.turns import TurnLimits, Turns, leave_place

DEADLINE_S = 20.0


class Calls:
    """Calls that have their turn and then last until they are ended, by name; the first letter is the client."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.let_in: list[str] = []
        self.came: dict[str, asyncio.Event] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        for name in names:
            self.came[name], self._ends[name] = asyncio.Event(), asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._last(name))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self._tasks[name]
        await self.settle()

    async def _last(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.let_in.append(name)
            self.came[name].set()
            await self._ends[name].wait()


async def test_calls_beyond_those_allowed_wait_for_the_next_word() -> None:
    turns = Turns(TurnLimits(8, 8))
    calls = Calls(turns)
    turns.allow(2)
    await calls.come("a1", "a2", "b1", "c1")
    assert calls.let_in == ["a1", "a2"]
    await calls.end("a1")
    assert calls.let_in == ["a1", "a2"], "a place is free, and nothing more is allowed"
    turns.allow(1)
    await calls.settle()
    assert calls.let_in == ["a1", "a2", "b1"]
    turns.allow(None)
    await calls.settle()
    assert calls.let_in == ["a1", "a2", "b1", "c1"]
    await calls.come("d1")
    assert calls.let_in[-1] == "d1"
    await calls.end("a2", "b1", "c1", "d1")
    assert turns.num_taken == turns.num_waiting == 0


async def test_connections_take_turns_in_what_is_allowed() -> None:
    turns = Turns(TurnLimits(64, 64))
    calls = Calls(turns)
    turns.allow(0)
    await calls.come("a1", "a2", "a3", "a4", "b1", "c1")
    turns.allow(4)
    await calls.settle()
    assert calls.let_in == ["a1", "b1", "c1", "a2"]
    turns.allow(None)
    await calls.settle()
    await calls.end(*calls.let_in)


async def test_calls_are_let_in_where_no_word_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.001)
    turns = Turns(TurnLimits(64, 64))
    calls = Calls(turns)
    turns.allow(1)
    await calls.come("a1", "a2", "a3")
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(calls.came[name].wait() for name in ("a1", "a2", "a3")))
    await calls.end("a1", "a2", "a3")


async def test_a_call_that_goes_away_takes_no_turn_with_it() -> None:
    turns = Turns(TurnLimits(4, 8))  # one place for each client
    calls = Calls(turns)
    await calls.come("a1", "a2", "a3")
    calls._tasks["a2"].cancel()
    await calls.end("a1")
    assert calls.let_in == ["a1", "a3"]
    calls._tasks["a3"].cancel()
    await calls.settle()
    assert turns.num_taken == turns.num_waiting == 0
    await calls.come("a4")
    assert calls.let_in[-1] == "a4"
    await calls.end("a4")


async def test_a_call_that_is_cancelled_as_its_turn_comes_gives_it_on() -> None:
    turns = Turns(TurnLimits(4, 8))
    calls = Calls(turns)
    await calls.come("a1", "a2", "a3")
    calls._ends["a1"].set()
    await asyncio.sleep(0)
    await calls._tasks["a1"]  # its place was given to a2, which has not run since
    calls._tasks["a2"].cancel()
    await calls.settle()
    assert calls.let_in[-1] == "a3"
    await calls.end("a3")
    assert turns.num_taken == 0


async def test_a_place_is_left_once() -> None:
    turns = Turns(TurnLimits(4, 8))
    leave_place()  # of a call that has none
    async with turns.turn("a") as place:
        assert turns.num_taken == 1
        leave_place()
        place.leave()
        assert turns.num_taken == 0
    assert turns.num_taken == 0
