"""What follows state that is committed, and fails: a log line, an event, a descriptor, a counter. The call keeps its result.

Where a call fails for something that it needs, it has left no trace.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.calls.sessions import SessionCalls
from kvkeeper.cache_service.core.index.events.event_feed import EventFeed
from kvkeeper.cache_service.core.pool_state import PoolState
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.cache_service.rpc import step_lane
from kvkeeper.cache_service.rpc.step_lane import StepLane
from kvkeeper.common.service import log
from kvkeeper.common.service.output import QueuedStream
from tests.api.test_watch_events import watching
from tests.support.processes.broken_outputs import full_disk
from tests.support.processes.child_processes import Processes
from tests.support.worlds.cache_api import DEADLINE, Api, ManualClock, Session, refusal, serving, spec_of

NUM_SESSIONS = 70  # more than there may be at once


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def on_a_full_disk(_: pytest.MonkeyPatch) -> None:
    log.configure("debug", "cache", QueuedStream(os.fdopen(full_disk(), "w")))  # type: ignore[arg-type]


def without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structlog.processors.JSONRenderer, "__call__", fail)
    log.configure("debug", "cache", QueuedStream(os.fdopen(full_disk(), "w")))  # type: ignore[arg-type]


@pytest.fixture(params=[on_a_full_disk, without_words])
def _broken_log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    request.param(monkeypatch)
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("_broken_log")
async def test_every_call_that_logs_has_its_result(processes: Processes) -> None:
    clock = ManualClock()
    async with serving(num_pools=1, clock=clock) as api:
        for number in range(NUM_SESSIONS):
            session = await api.open(client_name=f"s{number}")
            await session.call("CloseSession")
        replaced = await api.open(spec=spec_of(model_id="new"), ttl_ms=1000)
        assert (await api.stats()).num_replaced_pools == 1
        await processes.attach(replaced)
        clock.advance(2.0)  # the session expires
        stats = await api.until(lambda stats: not stats.sessions)
        assert (stats.num_opened_sessions, stats.num_reaped_sessions) == (NUM_SESSIONS + 1, 1)


async def test_a_session_whose_pool_has_a_fault_is_not_there(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.open()
    with monkeypatch.context() as patch:
        patch.setattr(PoolState, "tick", fail)
        assert (await refusal(api.open())).reason == "BROKEN_INVARIANT"
    assert len((await api.stats()).sessions) == 1
    table = api.server.session_manager.table
    assert len(table._sessions) == 1


async def test_a_watch_that_cannot_be_told_of_a_replaced_pool_refuses_no_session(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    await (await api.open(spec=spec_of(model_id="old"))).call("CloseSession")
    watched = await api.open(spec=spec_of(model_id="other"))
    async with watching(watched) as reader:
        await reader.snapshot()
        monkeypatch.setattr(EventFeed, "notify_all", fail)
        await api.open(spec=spec_of(model_id="new"))
        stats = await api.stats()
    assert (stats.num_replaced_pools, len(stats.sessions)) == (1, 2)
    assert [type(error) for error in told] == [OSError]


async def test_a_watch_that_cannot_begin_takes_no_place(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await api.open()
    with monkeypatch.context() as patch:
        patch.setattr(EventFeed, "open", fail)
        for _ in range(NUM_SESSIONS):
            call = api.stub.WatchEvents(pb.WatchEventsRequest(**session.ids), timeout=DEADLINE)
            assert (await refusal(call.read())).reason == "BROKEN_INVARIANT"
    async with watching(session) as reader:
        await reader.snapshot()


async def attach(session: Session, parts: str) -> dict[str, object]:
    """The line that describes the parts; empty where the connection was closed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, session.opened.attach_socket_path)
        await loop.sock_sendall(connection, f"{session.opened.attach_token} {parts}\n".encode())
        await asyncio.wait_for(loop.create_task(_readable(connection)), DEADLINE)
        line, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        found: dict[str, object] = json.loads(line) if line else {}
        return found


async def _readable(connection: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, ready.set)
    await ready.wait()
    loop.remove_reader(connection)


async def test_a_token_is_not_spent_where_its_memory_cannot_be_handed_over(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    session = await api.open()
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemoryArena, "descriptors", fail)
        assert await attach(session, "memory") == {}
    assert (await api.stats()).sessions[0].num_attached_processes == 0
    assert "num_bytes" in await attach(session, "memory")


def no_options(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_lane.socket.socket, "setsockopt", fail)


def no_watch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepLane, "__init__", fail)


@pytest.mark.parametrize("breaks", [no_options, no_watch])
async def test_a_lane_that_cannot_be_had_leaves_the_attach_alone(
    api: Api, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[pytest.MonkeyPatch], None]
) -> None:
    session = await api.open()
    with monkeypatch.context() as patch:
        breaks(patch)
        told = await attach(session, "memory step-lane")
    assert told["step_lane"] is False
    assert "num_bytes" in told


async def test_a_quarantine_that_cannot_end_now_ends_later(
    api: Api, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.open()
    await session.create(1, 10)
    await session.api.raw_step(session.start_bytes(1, 1))
    child = await processes.attach(session)
    await session.call("CloseSession")
    assert (await api.stats()).pools[0].num_quarantined_blocks > 0
    with monkeypatch.context() as patch:
        patch.setattr(SessionCalls, "end_quarantine", fail)
        assert (await refusal(session.call("CloseSession", drained=True))).reason == "BROKEN_INVARIANT"
    await session.call("CloseSession", drained=True)
    assert (await api.stats()).pools[0].num_quarantined_blocks == 0
    child.process.kill()
