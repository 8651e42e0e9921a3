"""A front's process: it ends with its engine and with nothing else, and says why it cannot serve."""

import asyncio
import os
import signal
from contextlib import nullcontext
from typing import Any

import pytest

from kvkeeper.common.service.turns import TurnLimits, Turns
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.rpc.fronts import front_process
from kvkeeper.engine_service.rpc.fronts.calls import FrontServices
from kvkeeper.engine_service.rpc.fronts.frames import Kind
from kvkeeper.engine_service.rpc.fronts.front_process import FrontFailed, start_front
from kvkeeper.engine_service.rpc.fronts.set_up import front_config
from kvkeeper.engine_service.rpc.fronts.told import FrontSetUp, FrontState
from kvkeeper.engine_service.rpc.streams.stream_pace import StreamPace

NOBODY: Any = None
STATE = FrontState(is_serving=False, is_leaving=False, max_len=0)


def services() -> FrontServices:
    turns = Turns(TurnLimits(1, 1))
    return FrontServices({}, turns, NOBODY, NOBODY, nullcontext, StreamPace(0), NOBODY)


def set_up(address: str) -> FrontSetUp:
    return FrontSetUp(front_config(EngineConfig(fronts=1), address, 4 << 20, has_gateway=False).to_json(), None)


async def test_it_ends_with_its_lane_and_with_no_signal_of_a_terminal_or_manager() -> None:
    front = await start_front()
    front.set_up(set_up("127.0.0.1:0"), STATE, services())
    await front.ready
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(front.process.pid, number)
    assert front.processor_s > 0
    front._lane.close()
    async with asyncio.timeout(20):
        assert await front.process.wait() == 0


async def test_an_address_that_cannot_be_had_is_told() -> None:
    front = await start_front()
    front.set_up(set_up("unix:/nowhere/at/all"), STATE, services())
    with pytest.raises(FrontFailed, match="cannot be had"):
        await front.ready
    await front.close()


async def test_one_that_dies_before_it_serves_is_a_start_that_failed() -> None:
    front = await start_front()
    front.process.kill()
    with pytest.raises(FrontFailed, match="ended before it served"):
        await front.ready
    assert await front.wait_end() == -signal.SIGKILL


async def test_one_that_hangs_is_killed_and_one_that_answers_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_process, "_PING_S", 0.01)
    for limit in ("_MOST_SILENT", "_MOST_SILENT_LOADING"):  # however long a busy machine takes to load it
        monkeypatch.setattr(front_process, limit, 1 << 30)
    front, answered = await start_front(), asyncio.Event()
    take = front._lane._take

    def noting(kind: Kind, number: int, body: bytes) -> None:
        take(kind, number, body)
        if kind is Kind.PONG and front.ready.done():
            assert front._num_silent == 0
            answered.set()

    front._lane._take = noting
    front.set_up(set_up("127.0.0.1:0"), STATE, services())
    await front.ready
    async with asyncio.timeout(20):
        await answered.wait()
    os.kill(front.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(front_process, "_MOST_SILENT", 3)
    async with asyncio.timeout(20):
        assert await front.wait_end() == -signal.SIGKILL


async def test_one_that_hangs_before_it_serves_is_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_process, "_PING_S", 0.01)
    monkeypatch.setattr(front_process, "_MOST_SILENT_LOADING", 3)
    front = await start_front()
    os.kill(front.process.pid, signal.SIGSTOP)
    front.set_up(set_up("127.0.0.1:0"), STATE, services())
    async with asyncio.timeout(20):
        with pytest.raises(FrontFailed, match="ended before it served"):
            await front.ready
    assert await front.wait_end() == -signal.SIGKILL
