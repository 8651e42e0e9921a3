"""For how long calls are let in: a share of the time, by windows, in turn of their connections, and one call at least."""

import asyncio

import pytest

from kvkeeper.common.service import turns as module
from kvkeeper.common.service.turns import TurnLimits, Turns, leave_place

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


class Clock:
    """Seconds, told by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_window_lets_calls_in_for_its_share_of_the_time() -> None:
    clock = Clock()
    turns = Turns(TurnLimits(4, 64), clock)  # one message of a connection at a time
    calls = Calls(turns)
    turns.open_window(0.25)
    clock.now += 0.04  # a step: the next window is 10 ms
    await calls.come("a1", "a2", "a3", "a4", "a5")
    await calls.end("a1")
    assert calls.let_in == ["a1"], "one at least, although the first window has no length"
    turns.open_window(0.25)
    await calls.settle()
    clock.now += 0.006  # what a call costs
    await calls.end("a2")
    assert calls.let_in == ["a1", "a2", "a3"], "4 ms are left"
    clock.now += 0.006
    await calls.end("a3")
    assert calls.let_in == ["a1", "a2", "a3"], "12 ms are over"
    clock.now += 0.03
    await calls.settle()
    turns.open_window(0.25)
    await calls.settle()
    assert calls.let_in[3:] == ["a4"]
    turns.open_window(1)
    clock.now += 5
    await calls.end("a4")
    assert calls.let_in[4:] == ["a5"], "open for good"
    await calls.end("a5")
    assert turns.num_taken == turns.num_waiting == 0


async def test_costly_calls_and_short_steps_let_in_one_call_each_step() -> None:
    clock = Clock()
    turns = Turns(TurnLimits(4, 64), clock)
    calls = Calls(turns)
    names = [f"a{number}" for number in range(6)]
    turns.open_window(0.01)
    await calls.come(*names)
    for number, name in enumerate(names):
        assert calls.let_in == names[: number + 1]
        clock.now += 0.001
        await calls.end(name)
        turns.open_window(0.01)
        await calls.settle()


async def test_connections_take_turns_in_a_window() -> None:
    clock = Clock()
    turns = Turns(TurnLimits(64, 64), clock)
    calls = Calls(turns)
    turns.open_window(0.5)
    await calls.come("x1", "a1", "a2", "a3", "a4", "b1", "c1")
    assert calls.let_in == ["x1"]
    clock.now += 0.01
    turns.open_window(0.5)
    await calls.settle()
    assert calls.let_in == ["x1", "a1", "b1", "c1", "a2", "a3", "a4"]
    await calls.end(*calls.let_in)


async def test_a_connection_that_floods_leaves_the_next_turn_to_another() -> None:
    clock = Clock()
    turns = Turns(TurnLimits(8, 1000), clock)
    calls = Calls(turns)
    flood = [f"a{number}" for number in range(200)]
    turns.open_window(0.01)
    await calls.come(*flood)
    await calls.come("b1")
    num_before = 0
    while "b1" not in calls.let_in:
        num_before += 1
        await calls.end(calls.let_in[-1])
        clock.now += 0.003
        turns.open_window(0.01)
        await calls.settle()
    assert num_before <= 2
    while len(calls.let_in) < 201:  # and the flood is served, too
        await calls.end(calls.let_in[-1])
        clock.now += 0.003
        turns.open_window(0.01)
        await calls.settle()
    assert [name for name in calls.let_in if name != "b1"] == flood


async def test_calls_are_let_in_where_a_step_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_PERIOD_S", 0.001)
    turns = Turns(TurnLimits(64, 64))
    calls = Calls(turns)
    turns.open_window(0.01)
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
