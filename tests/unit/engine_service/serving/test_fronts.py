"""Fronts that end, hang or cannot be started: their engine starts them again, whatever the machine says meanwhile."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvkeeper.engine_service.serving import front_process, fronts
from kvkeeper.engine_service.serving.front_process import FrontProcess, start_front_process


class Front(SimpleNamespace):
    """One whose process has ended, or one that goes on."""

    def __init__(self, *, has_ended: bool) -> None:
        lost, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        ready.set_result(None)
        if has_ended:
            lost.set()
        super().__init__(lost=lost, ready=ready, refused=Counter(), processor_s=0.0)
        self.runner, self.is_set_up = SimpleNamespace(pid=1), asyncio.Event()

    async def wait_end(self) -> int:
        await self.lost.wait()
        return -9

    def set_up(self, *args: object) -> None:
        self.is_set_up.set()


async def test_a_front_is_started_again_once_the_machine_has_a_process_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [BlockingIOError(11, "no process"), OSError(24, "no descriptor"), RuntimeError("no thread")]
    front = Front(has_ended=False)

    async def start() -> Front:
        if errors:
            raise errors.pop(0)
        return front

    monkeypatch.setattr(fronts, "_FIRST_PAUSE_S", 0.0)
    address: Any = SimpleNamespace(address="x")
    ended: Any = Front(has_ended=True)
    kept = fronts.Fronts(address, [ended], start)  # type: ignore[arg-type]
    unused: Any = None
    kept._services = kept._config = unused
    with capture_logs() as told:
        keeping = asyncio.create_task(kept._keep(0))
        async with asyncio.timeout(20):
            is_set_up = asyncio.create_task(front.is_set_up.wait())
            await asyncio.wait({keeping, is_set_up}, return_when=asyncio.FIRST_COMPLETED)
        assert not keeping.done(), "it goes on trying"
    keeping.cancel()
    failed = [entry["message"] for entry in told if entry["event"] == "front_failed"]
    assert [text.rpartition("no ")[2] for text in failed] == ["process", "descriptor", "thread"]
    assert kept.num_restarts == 1


async def test_a_start_that_fails_leaves_nothing_in_the_way_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_process(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "no process")

    with monkeypatch.context() as patched:
        patched.setattr(front_process.asyncio, "create_subprocess_exec", no_process)
        with pytest.raises(BlockingIOError):
            await start_front_process("info")
    front = await start_front_process("info")  # its lane has the descriptors of the one before
    await front.close()


async def test_what_an_ended_front_has_counted_is_told_once_and_never_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between its end and the start of the one that takes its place, when it is still among the fronts."""
    starting, may_start, front = asyncio.Event(), asyncio.Event(), Front(has_ended=False)

    async def start() -> Front:
        starting.set()
        await may_start.wait()
        return front

    monkeypatch.setattr(fronts, "_FIRST_PAUSE_S", 0.0)
    address: Any = SimpleNamespace(address="x")
    ended: Any = Front(has_ended=True)
    ended.refused, ended.processor_s = Counter(ROLE_NOT_ALLOWED=3), 7.0
    kept = fronts.Fronts(address, [ended], start)  # type: ignore[arg-type]
    unused: Any = None
    kept._services = kept._config = unused
    keeping = asyncio.create_task(kept._keep(0))
    async with asyncio.timeout(20):
        for moment in (asyncio.sleep(0), starting.wait(), front.is_set_up.wait()):
            await moment
            assert (kept._processor_s(), kept.refused["ROLE_NOT_ALLOWED"]) == (7.0, 3)
            if starting.is_set():
                may_start.set()
    keeping.cancel()


async def test_the_time_of_a_process_is_known_once_it_has_ended() -> None:
    front = await start_front_process("info")
    assert isinstance(front.runner, FrontProcess)
    front.runner._spent_s = 9.0  # as was read while it ran
    front.runner.kill()
    await front.wait_end()
    assert front.processor_s == 9.0
