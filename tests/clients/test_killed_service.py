"""A cache service that is killed in the middle of a step: the client is told the same over a step lane as over gRPC."""

import asyncio
import fcntl
import itertools
import os
import socket
import struct
import termios
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, CacheClient, CallOptions, StepItems, StepResult
from tests.support.processes.fleet import DEADLINE_S, Fleet, fleet
from tests.support.worlds.cache_api import failure

ITEMS = StepItems()
ONCE = CallOptions(timeout_s=DEADLINE_S, retry_s=0)
UNTIL_IT_IS_BACK = CallOptions(timeout_s=DEADLINE_S, retry_s=DEADLINE_S, first_pause_s=0.01, longest_pause_s=0.05)


class Stepper:
    """A client of asyncio or for threads, and its session, with or without a lane."""

    def __init__(self, kind: str, carrier: str, spec: pb.KvSpec) -> None:
        self._is_async, self._has_lane, self._spec = kind == "asyncio", carrier == "lane", spec
        self._client: Any = None
        self.session: Any = None

    async def connect(self, address: str, options: CallOptions) -> None:
        self._client = (AsyncCacheClient if self._is_async else CacheClient)(address, options)
        await self.open()

    async def open(self) -> None:
        """A session with one step over its carrier."""
        self.session = await self._call(self._client.open_session, self._spec, pb.EXECUTOR_ENGINE)
        if self._has_lane:
            assert await self._call(self.session.attach_step_lane)
        assert (await self.step()).step_id == 1
        assert self.session.has_step_lane is self._has_lane

    async def step(self) -> StepResult:
        result: StepResult = await self._call(self.session.step, ITEMS)
        return result

    async def step_unread(self) -> "asyncio.Task[StepResult]":
        """A step that waits for the answer of a service that stands still; in its lane lies the request."""
        stepping = asyncio.create_task(self.step())
        if self._has_lane:
            await asyncio.to_thread(wait_until_sent, self._lane_socket)
        return stepping

    async def close(self) -> None:
        if self.session is not None:
            self.session.disconnect()
            await self._call(self._client.close)

    @property
    def _lane_socket(self) -> socket.socket:
        session = self.session if self._is_async else self.session._inner
        found: socket.socket = session._steps.lane._socket
        return found

    async def _call(self, method: Any, *args: Any) -> Any:
        if not self._is_async:
            return await asyncio.to_thread(method, *args)
        made: Awaitable[Any] = method(*args)
        return await made


def wait_until_sent(connection: socket.socket) -> None:
    """Until something is sent that the other end has not read."""
    deadline = time.monotonic() + DEADLINE_S
    while not struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.fixture
async def services() -> AsyncIterator[Fleet]:
    async with fleet(0) as started:
        yield started


@pytest.fixture(params=itertools.product(["asyncio", "threads"], ["lane", "grpc"]), ids=" over ".join)
async def stepper(request: pytest.FixtureRequest, spec: pb.KvSpec) -> AsyncIterator[Stepper]:
    made = Stepper(*request.param, spec)
    yield made
    await made.close()


async def killed_in_a_step(services: Fleet, stepper: Stepper) -> "asyncio.Task[StepResult]":
    """The step under way when the service was killed."""
    await services.cache.stop()
    stepping = await stepper.step_unread()
    assert not stepping.done()
    await services.cache.kill()
    return stepping


async def check_unavailable(step: Awaitable[StepResult]) -> None:
    caught = await failure(step)
    assert (caught.code, caught.reason) == (grpc.StatusCode.UNAVAILABLE, "")


async def test_a_killed_service_is_unavailable(services: Fleet, stepper: Stepper) -> None:
    await stepper.connect(services.cache_address, ONCE)
    stepping = await killed_in_a_step(services, stepper)
    await check_unavailable(stepping)
    await check_unavailable(stepper.step())
    assert (stepper.session.step_id, stepper.session.has_step_lane) == (1, False)


async def test_the_service_that_takes_its_place_refuses_the_session_and_serves_another(
    services: Fleet, stepper: Stepper
) -> None:
    await stepper.connect(services.cache_address, UNTIL_IT_IS_BACK)
    old_epoch = stepper.session.epoch
    stepping = await killed_in_a_step(services, stepper)
    await services.start_cache()
    caught = await failure(stepping)
    assert (caught.code, caught.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    assert stepper.session.step_id == 1
    stepper.session.disconnect()
    await stepper.open()
    assert stepper.session.epoch > old_epoch
