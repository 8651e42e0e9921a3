"""A front's process: it ends with its engine and with nothing else, and says why it cannot serve."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from kvkeeper.common.service.turns import TurnLimits, Turns
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.outputs.model_text import ModelText
from kvkeeper.engine_service.outputs.unread_tokens import UnreadTokens
from kvkeeper.engine_service.rpc.stream_pace import StreamPace
from kvkeeper.engine_service.serving import front_process
from kvkeeper.engine_service.serving.calls import FrontServices
from kvkeeper.engine_service.serving.frames import FrontConfig, FrontState, Kind
from kvkeeper.engine_service.serving.front_process import FrontFailed, FrontHandle, start_front_process, start_front_task
from kvkeeper.engine_service.serving.fronts import front_config

NOBODY: Any = None
STATE = FrontState(is_serving=False, is_leaving=False, max_len=0)


def services() -> FrontServices:
    turns = Turns(TurnLimits(1, 1))
    return FrontServices({}, turns, NOBODY, NOBODY, nullcontext, StreamPace(0), NOBODY, ModelText(None), UnreadTokens())


def set_up(address: str) -> FrontConfig:
    return front_config(EngineConfig(fronts=1), address, 4 << 20, has_gateway=False)


async def test_it_ends_with_its_lane_and_with_no_signal_of_a_terminal_or_manager() -> None:
    front = await start_front_process("info")
    front.set_up(set_up("127.0.0.1:0"), STATE, services())
    await front.ready
    assert front.runner.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(front.runner.pid, number)
    assert front.processor_s > 0
    front.lane.close()
    async with asyncio.timeout(20):
        assert await front.wait_end() == 0


async def test_one_in_this_process_serves_and_ends_with_its_lane() -> None:
    front = await start_front_task()
    front.set_up(set_up("127.0.0.1:0"), STATE, services())
    await front.ready
    assert (front.runner.pid, front.processor_s) == (None, 0.0)
    front.lane.close()
    async with asyncio.timeout(20):
        assert await front.wait_end() == 0


@pytest.mark.parametrize("start", [partial(start_front_process, "info"), start_front_task], ids=["process", "task"])
async def test_an_address_that_cannot_be_had_is_told(start: Callable[[], Awaitable[FrontHandle]]) -> None:
    front = await start()
    front.set_up(set_up("unix:/nowhere/at/all"), STATE, services())
    with pytest.raises(FrontFailed, match="cannot be had"):
        await front.ready
    await front.close()


async def test_one_that_dies_before_it_serves_is_a_start_that_failed() -> None:
    front = await start_front_process("info")
    front.runner.kill()
    with pytest.raises(FrontFailed, match="ended before it served"):
        await front.ready
    assert await front.wait_end() == -signal.SIGKILL


async def test_one_that_hangs_is_killed_and_one_that_answers_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_process, "_PING_S", 0.01)
    for limit in ("_MOST_SILENT", "_MOST_SILENT_LOADING"):  # however long a busy machine takes to load it
        monkeypatch.setattr(front_process, limit, 1 << 30)
    front, answered = await start_front_process("info"), asyncio.Event()
    take = front.lane._take

    def noting(kind: Kind, number: int, body: Any) -> None:
        take(kind, number, body)
        if kind is Kind.PONG and front.ready.done():
            assert front._num_silent == 0
            answered.set()

    front.lane._take = noting
    front.set_up(set_up("127.0.0.1:0"), STATE, services())
    await front.ready
    async with asyncio.timeout(20):
        await answered.wait()
    assert front.runner.pid is not None
    os.kill(front.runner.pid, signal.SIGSTOP)
    monkeypatch.setattr(front_process, "_MOST_SILENT", 3)
    async with asyncio.timeout(20):
        assert await front.wait_end() == -signal.SIGKILL


async def test_one_that_hangs_before_it_serves_is_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_process, "_PING_S", 0.01)
    monkeypatch.setattr(front_process, "_MOST_SILENT_LOADING", 3)
    front = await start_front_process("info")
    assert front.runner.pid is not None
    os.kill(front.runner.pid, signal.SIGSTOP)
    front.set_up(set_up("127.0.0.1:0"), STATE, services())
    async with asyncio.timeout(20):
        with pytest.raises(FrontFailed, match="ended before it served"):
            await front.ready
    assert await front.wait_end() == -signal.SIGKILL
