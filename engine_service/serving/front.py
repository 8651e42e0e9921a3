"""Front: puts a front together, and takes it apart when its engine says so, or is gone.

It serves streams of tokens itself, and forwards all other calls to its engine, as bytes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2

from kvkeeper.common.service.endpoint import Admission, Endpoint, HealthServicer
from kvkeeper.common.service.listen import AddressInUse
from kvkeeper.common.service.methods import Context, Contract, MethodRouter
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.turns import CallPlace, Turns
from kvkeeper.common.trust.guard import Guard
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..outputs.model_text import ModelText
from ..outputs.tokenizer import Tokenizer
from ..rpc.methods import CONTRACT, FRONTS_OWN, make_intake, make_router
from ..rpc.stream_pace import StreamPace
from ..values.errors import EngineError
from .engine_link import EngineLink, TraceNote
from .frames import FrontConfig, FrontState, Kind
from .front_requests import FrontRequests
from .streams import Streams

# The engine sends in rounds; a round is written as it comes, unless the writes of the one before took longer.
_SHORTEST_PACE_S = 1e-4
_REPORT_REFUSED_S = 0.1


class PingedHealth(HealthServicer):
    """Health that is reported only while the engine's loop replies."""

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
    async def turn(self, client: str) -> AsyncIterator[CallPlace]:
        """Raises TooManyWaiting."""
        async with self._turns.turn(client) as place:
            await self._link.wait_room()
            yield place


class Front:
    """One front, in a process of its own or in the engine's. lane: to be joined to the engine's before run."""

    def __init__(self, on_lost: Callable[[], None] = lambda: None) -> None:
        """on_lost: called when the engine is gone."""
        self._link = EngineLink(self._note_state, self._note_stop)
        self.lane = self._link.lane
        self.text: ModelText | None = None  # the engine's, where that is in this process
        self._on_lost = on_lost
        self._streams: Streams
        self._endpoint: Endpoint | None = None
        self._gateway: FrontGateway | None = None
        self._state = FrontState(is_serving=False, is_leaving=False, max_len=0)
        self._has_state = asyncio.Event()
        self._stop: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the engine says stop, or is gone."""
        lost = asyncio.create_task(self._link.lost.wait())
        tasks: list[asyncio.Task[None]] = []
        try:
            await asyncio.wait((lost, self._link.set_up), return_when=asyncio.FIRST_COMPLETED)
            if not self._link.set_up.done():
                return
            try:
                guard = await self._start()
            except (AddressInUse, StartError) as error:
                self.lane.send(Kind.FAILED, body=str(error))
                return
            self.lane.send(Kind.READY)
            tasks += [asyncio.create_task(self._apply_states()), asyncio.create_task(self._report_refused(guard))]
            await asyncio.wait((lost, self._stop), return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.done():
                self._on_lost()
        finally:
            for task in (lost, *tasks):
                task.cancel()
            if self._endpoint is not None:
                await self._endpoint.stop(self._stop.result() if self._stop.done() else None)
            self.lane.close()

    async def _start(self) -> Guard:
        set_up = self._link.set_up.result()
        config = FrontConfig.of_json(set_up.config)
        guard = Guard(config)
        self._link.max_unanswered = config.receive_memory
        intake = make_intake(config, config.message_bytes)
        intake.taken = LinkTurns(intake.turns, self._link)
        text = self.text or ModelText(Tokenizer.from_state(set_up.tokenizer) if set_up.tokenizer is not None else None)
        requests = FrontRequests(self._link, text)
        self._endpoint = await Endpoint.open(
            config.listen,
            config.message_bytes,
            admission=Admission(config.connections, config.connection_calls, (TraceNote(), intake)),
            guard=guard,
            health=PingedHealth(self._link),
            is_shared=True,
        )
        pace = StreamPace(min(config.stream_interval_ms / 1000, _SHORTEST_PACE_S))
        self._streams = streams = Streams(requests.admit, pace, config.many_calls, config.message_bytes, _hide_bug)
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

    async def _report_refused(self, guard: Guard) -> None:
        """Report to the engine how many calls were not let in, for its metrics."""
        reported: dict[str, int] = {}
        while True:
            await asyncio.sleep(_REPORT_REFUSED_S)
            if guard.refused.counts != reported:
                reported = dict(guard.refused.counts)
                self.lane.send(Kind.REFUSED, body=reported)


def _hide_bug() -> EngineError:
    error = CONTRACT.hide_bug("GenerateMany")
    assert isinstance(error, EngineError)
    return error


_TOKENIZE_PATH = f"/{CONTRACT.service.full_name}/Tokenize"


class FrontGateway:
    """The stream of tokens of a gateway's protocol. max_len: most tokens of a sequence, as the engine reported last."""

    def __init__(self, streams: Streams, link: EngineLink) -> None:
        self._streams, self._link = streams, link
        self.max_len = 0

    def generate(self, request: Any) -> AsyncIterator[Any]:
        from ..rpc.gateway.generating import generate

        return generate(request, self.max_len, self._streams.generate, self._tokenize)

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        return pb.TokenizeResponse.FromString(await self._link.call(_TOKENIZE_PATH, request.SerializeToString()))


def own_router(streams: Streams, link: EngineLink, message_bytes: int) -> MethodRouter:
    """All methods of the engine's own service. message_bytes: of a message with a prompt."""
    contract = replace(CONTRACT.with_prompt_bytes(message_bytes), has_spans=False)  # the engine's end has them
    return make_router(streams, contract, _forwarded(contract, link))


def gateway_router(gateway: FrontGateway, link: EngineLink, message_bytes: int) -> MethodRouter:
    """All methods of the gateway's protocol."""
    from ..rpc.gateway.methods import CONTRACT as GATEWAY_CONTRACT

    contract = replace(GATEWAY_CONTRACT.with_prompt_bytes(message_bytes), has_spans=False)
    return MethodRouter(contract, gateway, _forwarded(contract, link))


def _forwarded(contract: Contract, link: EngineLink) -> dict[str, grpc.RpcMethodHandler]:
    """Handlers of all methods but a front's own."""
    kept = {*FRONTS_OWN, *contract.unimplemented}
    methods = [each for each in contract.service.methods if each.name not in kept]
    return {method.name: _forward(contract, link, method) for method in methods}


def _forward(contract: Contract, link: EngineLink, method: MethodDescriptor) -> grpc.RpcMethodHandler:
    path = f"/{contract.service.full_name}/{method.name}"
    if method.server_streaming:

        async def stream(raw: bytes, context: Context) -> None:
            async def copy() -> None:
                async for answer in link.stream(path, raw):
                    await context.write(answer)

            await contract.guard(method.name, context, copy())

        return grpc.unary_stream_rpc_method_handler(stream)

    async def unary(raw: bytes, context: Context) -> Any:
        return await contract.guard(method.name, context, link.call(path, raw))

    return grpc.unary_unary_rpc_method_handler(unary)
