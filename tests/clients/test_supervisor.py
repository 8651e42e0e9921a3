"""When a service that died is started again, when it is given up, and that nothing runs afterwards."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvkeeper.cli.start import supervisor
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.cli.start.supervisor import GivenUp, RestartRule, Service, Supervisor
from kvkeeper.common.service.process import LOST


class Process:
    """A service's process that lives until a test ends it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exit_code: int | None = None
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.create_task(self._wait())

    async def _wait(self) -> int:
        self.exit_code = await self._end
        return self.exit_code

    def how_it_ended(self) -> str:
        return f"ended with exit code {self.exit_code}"

    async def end(self, grace_s: float) -> None:
        self.die(0)
        await self.ended

    def kill(self) -> None:
        self.die(-9)

    def die(self, exit_code: int = 1) -> None:
        if not self._end.done():
            self._end.set_result(exit_code)


class World:
    """A supervisor of two processes that run here."""

    def __init__(self, on_start: Callable[[Process], None] = lambda process: None) -> None:
        self.started: list[Process] = []
        self.told: list[str] = []
        self._on_start = on_start
        self.supervisor = Supervisor([self._service("cache"), self._service("engine")], self.told.append)

    def _service(self, name: str) -> Service:
        async def start() -> Process:
            self.started.append(Process(name))
            self._on_start(self.started[-1])
            return self.started[-1]

        async def until_serving() -> None:
            await asyncio.sleep(0)

        return Service(name, start, until_serving)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.0)


def test_the_pause_doubles_while_it_dies_young_and_then_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.25)
    rule = RestartRule()
    assert [rule.pause_after(1.0) for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, None]


def test_one_that_lived_long_begins_again_with_the_first_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.25)
    rule = RestartRule()
    pauses = [rule.pause_after(age) for age in (1.0, 1.0, 3600.0, 1.0, 1.0, 1.0, 1.0)]
    assert pauses == [0.25, 0.5, 0.25, 0.5, 1.0, 2.0, None]


async def test_a_service_that_keeps_dying_at_once_is_given_up_and_the_other_ended() -> None:
    world = World()
    await world.supervisor.start()
    world._on_start = lambda process: process.die()
    world.started[1].die()
    with pytest.raises(GivenUp, match="the engine service ended with exit code 1, 5 times in a row"):
        async with asyncio.timeout(10):
            await world.supervisor.keep()
    assert [process.name for process in world.started] == ["cache", *["engine"] * 5]
    assert world.started[0].exit_code is None
    await world.supervisor.end(0)
    assert [process.exit_code for process in world.started] == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("error", [BlockingIOError(11, "no more processes"), RuntimeError("can't start new thread")])
async def test_a_restart_waits_until_the_host_has_a_process(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SHORTAGE_S", 0.0)
    world, refusals, served = World(), [error, error], asyncio.Event()
    await world.supervisor.start()

    def refuse(process: Process) -> None:
        if refusals:
            raise refusals.pop()
        served.set()

    world._on_start = refuse
    world.started[1].die()
    keeping = asyncio.create_task(world.supervisor.keep())
    async with asyncio.timeout(10):
        await served.wait()
    assert sum("cannot be started now" in line for line in world.told) == 2
    assert world.started[0].exit_code is None
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    world._on_start = lambda process: None
    await world.supervisor.end(0)


async def test_a_first_start_that_fails_is_not_tried_again() -> None:
    world = World(lambda process: process.die(2) if process.name == "engine" else None)
    with pytest.raises(GivenUp, match="the engine service ended with exit code 2; ending the cache service") as given_up:
        await world.supervisor.start()
    assert given_up.value.process.exit_code == 2
    assert len(world.started) == 2
    await world.supervisor.end(0)
    assert world.started[0].exit_code == 0


async def test_the_end_while_one_is_being_kept_ends_both_and_starts_none() -> None:
    world = World()
    await world.supervisor.start()
    keeping = asyncio.create_task(world.supervisor.keep())
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await world.supervisor.end(0)
    assert [process.exit_code for process in world.started] == [0, 0]
    assert world.told == ["starting the cache service", "starting the engine service"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-9, "was ended by SIGKILL"),
        (1, "ended with exit code 1"),
        (LOST, "ended with exit code 75, because its device was lost to it"),
    ],
)
async def test_how_a_process_ended_is_told_in_words(code: int, says: str) -> None:
    class Ended:
        returncode = code

        async def wait(self) -> int:
            return code

    ended: Any = Ended()
    assert ServiceProcess("engine", ended).how_it_ended() == says
