"""What a front answers itself, streams of tokens, and how it forwards all other calls to its engine, as bytes."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from kvkeeper.common.service.methods import Context, Contract, MethodRouter
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..methods import CONTRACT, router_of
from ..streams.many import Read, Write
from ..streams.serving import Streams
from .engine_link import EngineLink

_TOKENIZE_PATH = f"/{CONTRACT.service.full_name}/Tokenize"


class FrontService:
    """The methods of the engine's service that are streams of tokens, in snake case."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        return self._streams.generate(request)

    async def generate_many(self, read: Read, write: Write) -> None:
        await self._streams.generate_many(read, write)


class FrontGateway:
    """The same of a gateway's protocol. max_len: most tokens of a sequence, as the engine told last."""

    def __init__(self, streams: Streams, link: EngineLink) -> None:
        self._calls = _OwnCalls(streams, link)
        self.max_len = 0

    def generate(self, request: Any) -> AsyncIterator[Any]:
        from ..gateway.generating import generate

        return generate(request, self.max_len, self._calls)


class _OwnCalls:
    """What a gateway's Generate needs of the engine's own service."""

    def __init__(self, streams: Streams, link: EngineLink) -> None:
        self.generate = streams.generate
        self._link = link

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        return pb.TokenizeResponse.FromString(await self._link.call(_TOKENIZE_PATH, request.SerializeToString()))


def own_router(streams: Streams, link: EngineLink, message_bytes: int) -> MethodRouter:
    """All methods of the engine's own service. message_bytes: of a message with a prompt."""
    forwarded = _forwarded(CONTRACT, link, {"Generate", "GenerateMany"})
    return router_of(FrontService(streams), CONTRACT.with_prompts_of(message_bytes), forwarded)


def gateway_router(gateway: FrontGateway, link: EngineLink, message_bytes: int) -> MethodRouter:
    """All methods of the gateway's protocol."""
    from ..gateway.methods import CONTRACT as GATEWAY_CONTRACT

    contract = GATEWAY_CONTRACT.with_prompts_of(message_bytes)
    return MethodRouter(contract, gateway, _forwarded(contract, link, {"Generate"}))


def _forwarded(contract: Contract, link: EngineLink, own: set[str]) -> dict[str, grpc.RpcMethodHandler]:
    """Handlers of all methods but the own ones."""
    methods = [each for each in contract.service.methods if each.name not in own and each.name not in contract.unimplemented]
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
