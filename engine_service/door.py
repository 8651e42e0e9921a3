"""The one way in: every call of EngineService passes here, as bytes, and every refusal becomes its Status here.

Owns message size limits, parsing, and what an exception turns into. Handlers take a message and give a message, or
messages, and raise Refusal; anything else they raise is a bug, logged here and answered without details.
"""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from engine_service.refusals import InvalidField, NotImplementedYet, Refusal
from engine_service.status import INTERNAL, abort
from engine_service.unimplemented import UNIMPLEMENTED_METHODS
from kvkeeper.engine.v1 import engine_service_pb2 as pb

log = structlog.get_logger()

SERVICE = pb.DESCRIPTOR.services_by_name["EngineService"]
MAX_MESSAGE_BYTES = 256 << 10
MAX_PROMPT_MESSAGE_BYTES = 4 << 20
_WITH_PROMPT = {"Generate", "Tokenize", "Detokenize"}

Context = grpc.aio.ServicerContext


class Door(grpc.GenericRpcHandler):
    """Handlers by method name: `service` has a method for each in snake case."""

    def __init__(self, service: Any) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        for method in SERVICE.methods:
            if method.name in UNIMPLEMENTED_METHODS:
                handler = grpc.unary_unary_rpc_method_handler(_not_implemented(method.name))
            elif method.server_streaming:
                function = getattr(service, _snake_case(method.name))
                handler = grpc.unary_stream_rpc_method_handler(_server_stream(method, function))
            else:
                handler = grpc.unary_unary_rpc_method_handler(_unary(method, getattr(service, _snake_case(method.name))))
            self._handlers[f"/{SERVICE.full_name}/{method.name}"] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def _parse(method: Any, raw: bytes) -> Message:
    limit = MAX_PROMPT_MESSAGE_BYTES if method.name in _WITH_PROMPT else MAX_MESSAGE_BYTES
    if len(raw) > limit:
        raise InvalidField("the message is too large", field="request", limit=limit)
    try:
        return getattr(pb, method.input_type.name).FromString(raw)
    except DecodeError:
        raise InvalidField(f"the bytes are not a {method.input_type.name}", field="request") from None


def _unary(method: Any, function: Any) -> Any:
    async def unary(raw: bytes, context: Context) -> bytes:
        async def call() -> bytes:
            return (await function(_parse(method, raw))).SerializeToString()

        return await _guarded(method.name, context, call())

    return unary


def _server_stream(method: Any, function: Any) -> Any:
    async def server_stream(raw: bytes, context: Context) -> None:
        async def call() -> None:
            responses: AsyncIterator[Message] = function(_parse(method, raw))
            try:
                async for response in responses:
                    await context.write(response.SerializeToString())
            finally:
                await responses.aclose()  # type: ignore[attr-defined]  # a client that went away cancels this task

        await _guarded(method.name, context, call())

    return server_stream


async def _guarded(method: str, context: Context, call: Awaitable[Any]) -> Any:
    """The call's result; what it raises ends the RPC with its Status."""
    try:
        return await call
    except Refusal as refusal:
        await abort(context, refusal)
    except (grpc.RpcError, grpc.aio.UsageError):
        raise
    except Exception:
        log.exception("broken_invariant", method=method)
        await abort(context, INTERNAL)


def _not_implemented(name: str) -> Any:
    async def refuse(raw: bytes, context: Context) -> None:
        await abort(context, NotImplementedYet(f"{name} is not part of this build", feature=UNIMPLEMENTED_METHODS[name]))

    return refuse


def _snake_case(name: str) -> str:
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")
