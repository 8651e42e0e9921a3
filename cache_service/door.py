"""The one way in: every call of CacheService passes here, as bytes, and every refusal becomes its Status here.

Owns message size limits, parsing, and what an exception turns into. Calls arrive as bytes because size and form are to be
refused with our reasons, before anything is built from them. Handlers take and give messages (Step and StreamSteps: bytes) and
raise CacheError; anything else they raise is a bug, logged here and answered without details.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from cache_service.errors import CacheError, InvalidField, NotImplementedYet
from cache_service.status import INTERNAL, abort
from cache_service.unimplemented import UNIMPLEMENTED_METHODS
from kvkeeper.cache.v1 import cache_service_pb2 as pb

log = structlog.get_logger()

SERVICE = pb.DESCRIPTOR.services_by_name["CacheService"]
MAX_MESSAGE_BYTES = 256 << 10
MAX_PROMPT_MESSAGE_BYTES = 4 << 20
_WITH_PROMPT = {"CreateSequence", "MatchPrefix", "CheckAdmission", "ExplainMatch", "PinPrefix", "StoreLogits", "WriteKv"}

Context = grpc.aio.ServicerContext
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # what read answers when the client has ended its side


class Door(grpc.GenericRpcHandler):
    """Handlers by method name: `service` has a method for each in snake case, `steps` has step and stream_steps."""

    def __init__(self, service: Any, steps: Any) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        for method in SERVICE.methods:
            if method.name in UNIMPLEMENTED_METHODS:
                handler = _not_implemented(method.name, method.server_streaming)
            elif method.name == "Step":
                handler = grpc.unary_unary_rpc_method_handler(_raw_unary(steps.step))
            elif method.name == "StreamSteps":
                handler = grpc.stream_stream_rpc_method_handler(_raw_stream(steps.stream_steps))
            else:
                handler = _handler(method, getattr(service, _snake_case(method.name)))
            self._handlers[f"/{SERVICE.full_name}/{method.name}"] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def parse(method: Any, raw: bytes) -> Message:
    """The request of a method of the descriptor. Raises InvalidField."""
    limit = MAX_PROMPT_MESSAGE_BYTES if method.name in _WITH_PROMPT else MAX_MESSAGE_BYTES
    if len(raw) > limit:
        raise InvalidField("the message is too large", field="request", limit=limit)
    try:
        return getattr(pb, method.input_type.name).FromString(raw)
    except DecodeError:
        raise InvalidField(f"the bytes are not a {method.input_type.name}", field="request") from None


async def _guarded(method: str, context: Context, call: Awaitable[Any]) -> Any:
    """The call's result; what it raises ends the RPC with its Status."""
    try:
        return await call
    except CacheError as error:
        await abort(context, error)
    except (grpc.RpcError, grpc.aio.UsageError):
        raise
    except Exception:
        log.exception("broken_invariant", method=method)
        await abort(context, INTERNAL)


def _handler(method: Any, function: Any) -> grpc.RpcMethodHandler:
    if method.client_streaming:

        async def requests(context: Context) -> AsyncIterator[Message]:
            while (raw := await context.read()) is not EOF:
                yield parse(method, raw)

        async def client_stream(_: object, context: Context) -> bytes:
            async def call() -> bytes:
                return (await function(requests(context))).SerializeToString()

            return await _guarded(method.name, context, call())

        return grpc.stream_unary_rpc_method_handler(client_stream)
    if method.server_streaming:

        async def server_stream(raw: bytes, context: Context) -> None:
            async def call() -> None:
                async for response in function(parse(method, raw)):
                    await context.write(response.SerializeToString())

            await _guarded(method.name, context, call())

        return grpc.unary_stream_rpc_method_handler(server_stream)

    async def unary(raw: bytes, context: Context) -> bytes:
        async def call() -> bytes:
            return (await function(parse(method, raw))).SerializeToString()

        return await _guarded(method.name, context, call())

    return grpc.unary_unary_rpc_method_handler(unary)


def _raw_unary(function: Callable[[bytes], Awaitable[bytes]]) -> Any:
    async def unary(raw: bytes, context: Context) -> bytes:
        return await _guarded("Step", context, function(raw))

    return unary


def _raw_stream(function: Callable[..., Awaitable[None]]) -> Any:
    async def stream(_: object, context: Context) -> None:
        await _guarded("StreamSteps", context, function(context.read, context.write))

    return stream


def _not_implemented(name: str, server_streaming: bool) -> grpc.RpcMethodHandler:
    feature = UNIMPLEMENTED_METHODS[name]

    async def refuse(raw: bytes, context: Context) -> None:
        await abort(context, NotImplementedYet(f"{name} is not part of this build", feature=feature))

    make = grpc.unary_stream_rpc_method_handler if server_streaming else grpc.unary_unary_rpc_method_handler
    return make(refuse)


def _snake_case(name: str) -> str:
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")
