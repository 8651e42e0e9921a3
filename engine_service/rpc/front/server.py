"""Puts a front together, and takes it apart when its engine says so, or is gone."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc_health.v1 import health_pb2

from kvkeeper.common.service.endpoint import Admission, Endpoint, HealthServicer
from kvkeeper.common.service.listen import AddressInUse
from kvkeeper.common.service.log import configure
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.turns import TakesPlace, Turns
from kvkeeper.common.trust.guard import Guard

from ...outputs.model_text import ModelText
from ...outputs.tokenizer import Tokenizer
from ...values.errors import EngineError
from ..fronts.frames import Kind
from ..fronts.told import FrontState
from ..methods import CONTRACT, intake_of
from ..streams.serving import Streams
from ..streams.stream_pace import StreamPace
from .config import FrontConfig
from .engine_link import EngineLink, TraceNote, open_link
from .requests import FrontRequests
from .service import FrontGateway, gateway_router, own_router

# The engine sends in rounds; a round is written as it comes, unless the writes of the one before took longer.
_SHORTEST_PACE_S = 1e-4
_TELL_REFUSED_S = 0.1
_STOP_S = 5.0  # for what is still to be written, once the front is asked to end


class PingedHealth(HealthServicer):
    """Health that is told only while the engine's loop answers."""

    def __init__(self, link: EngineLink) -> None:
        super().__init__()
        self._link = link

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        await self._link.ping()
        return await super().Check(request, context)


class LinkTurns:
    """Turns of messages that come from clients, while the engine has room for them. The engine has turns of its own behind."""

    def __init__(self, turns: Turns, link: EngineLink) -> None:
        self._turns, self._link = turns, link

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[TakesPlace]:
        """Raises TooManyWaiting."""
        async with self._turns.turn(client) as place:
            await self._link.wait_room()
            yield place


class _AtOnce:
    """Turns of requests that come by a call of many: their turn is the engine's to grant."""

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[TakesPlace]:
        yield self

    def leave(self) -> None:
        """There is no place."""


class Front:
    """One front, in its process."""

    def __init__(self) -> None:
        self._link: EngineLink
        self._endpoint: Endpoint | None = None
        self._gateway: FrontGateway | None = None
        self._state = FrontState(is_serving=False, is_leaving=False, max_len=0)
        self._has_state = asyncio.Event()
        self._stop: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def run(self, end: socket.socket) -> None:
        """Serve until the engine says stop, or is gone. end: of the lane."""
        self._link = await open_link(end, self._note_state, self._note_stop)
        lost = asyncio.create_task(self._link.lost.wait())
        tasks: list[asyncio.Task[None]] = []
        try:
            await asyncio.wait((lost, self._link.set_up), return_when=asyncio.FIRST_COMPLETED)
            if not self._link.set_up.done():
                return
            try:
                guard = await self._start()
            except (AddressInUse, StartError) as error:
                self._link.lane.send(Kind.FAILED, body=str(error).encode())
                return
            self._link.lane.send(Kind.READY)
            tasks += [asyncio.create_task(self._apply_states()), asyncio.create_task(self._tell_refused(guard))]
            await asyncio.wait((lost, self._stop), return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.done():
                os._exit(0)  # at once: the address is the next engine's
            if self._endpoint is not None:
                await self._endpoint.stop(self._stop.result())
        finally:
            for task in (lost, *tasks):
                task.cancel()
            self._link.lane.close()

    async def _start(self) -> Guard:
        set_up = self._link.set_up.result()
        config = FrontConfig.of_json(set_up.config)
        configure(config.log_level, "front")
        guard = Guard(config)
        self._link.max_unanswered = config.receive_memory
        intake = intake_of(config, config.message_bytes)
        intake.taken = LinkTurns(intake.turns, self._link)
        requests = FrontRequests(self._link)
        self._endpoint = await Endpoint.open(
            config.listen,
            config.message_bytes,
            admission=Admission(config.connections, config.connection_calls, (TraceNote(), intake)),
            guard=guard,
            health=PingedHealth(self._link),
            is_shared=True,
        )
        if set_up.tokenizer is not None:
            requests.text = ModelText(Tokenizer.from_state(set_up.tokenizer))
        pace = StreamPace(min(config.stream_interval_ms / 1000, _SHORTEST_PACE_S))
        streams = Streams(requests.admit, _AtOnce(), pace, config.many_calls, config.message_bytes, _hide_bug)
        routers = [own_router(streams, self._link, config.message_bytes)]
        if config.has_gateway:
            self._gateway = FrontGateway(streams, self._link)
            routers.append(gateway_router(self._gateway, self._link, config.message_bytes))
        await self._endpoint.start(*routers, has_reflection=config.reflection)
        return guard

    def _note_state(self, state: FrontState) -> None:
        self._state = state
        self._has_state.set()

    def _note_stop(self, seconds: float) -> None:
        if not self._stop.done():
            self._stop.set_result(seconds)

    async def _apply_states(self) -> None:
        assert self._endpoint is not None
        while True:
            await self._has_state.wait()
            self._has_state.clear()
            if self._gateway is not None:
                self._gateway.max_len = self._state.max_len
            if self._state.is_leaving:
                await self._endpoint.drain()
            else:
                await self._endpoint.set_serving(self._state.is_serving)

    async def _tell_refused(self, guard: Guard) -> None:
        """Tell the engine how many calls were not let in, for its metrics."""
        told: dict[str, int] = {}
        while True:
            await asyncio.sleep(_TELL_REFUSED_S)
            if guard.refused.counts != told:
                told = dict(guard.refused.counts)
                self._link.lane.send(Kind.REFUSED, body=json.dumps(told).encode())


def _hide_bug() -> EngineError:
    error = CONTRACT.hide_bug("GenerateMany")
    assert isinstance(error, EngineError)
    return error
