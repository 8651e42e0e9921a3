"""MethodRouter: routes each call of a service to its method, and turns each refusal into a Status.

Owns message size limits, parsing, and the Status of each exception. Every call arrives here as bytes, so that a wrong size or
form is refused with a documented reason before anything is built from the message. Methods take a message, return one or a
stream, and raise the service's refusals. A host that gives no more threads, processes, descriptors or memory is a refusal, too;
any other exception is a bug, which is logged here and reported to the caller without details.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvkeeper.common import tracing
from kvkeeper.common.service.status import Refusals
from kvkeeper.common.service.threads import find_shortage

log = structlog.get_logger()

MAX_MESSAGE_BYTES = 256 << 10
MAX_PROMPT_MESSAGE_BYTES = 4 << 20  # where no prompt may be so long that it needs more
_TOKEN_BYTES = 5  # of an id below 2^31 in a repeated field; packed into bytes, it has 4
_BESIDE_BYTES = 64 << 10  # that a message has for all but the prompt


def prompt_bytes(max_tokens: int) -> int:
    """The most bytes of a message with a prompt of so many tokens, whatever they are."""
    return _TOKEN_BYTES * max_tokens + _BESIDE_BYTES


def max_prompt_message_bytes(max_tokens: int) -> int:
    """The size limit of a message with one prompt or with several, where a prompt has at most so many tokens."""
    return max(MAX_PROMPT_MESSAGE_BYTES, prompt_bytes(max_tokens))


Context = grpc.aio.ServicerContext

# The caller, as far as gRPC knows it: one connection over TCP; over a Unix socket all callers are one.
peer: ContextVar[str] = ContextVar("peer", default="")


@dataclass(frozen=True, slots=True)
class Contract:
    """The methods of a service, the limits of their messages, and its refusals."""

    service: ServiceDescriptor
    with_prompt: frozenset[str]  # methods whose messages may be as large as prompts
    refusals: Refusals
    unimplemented: Mapping[str, str] = field(default_factory=dict)  # method -> feature of the NOT_IMPLEMENTED answer
    max_message_bytes: int = MAX_MESSAGE_BYTES  # of those without a prompt
    prompt_limit: Callable[[str], int] = lambda method: MAX_PROMPT_MESSAGE_BYTES  # of those with one, by method
    has_spans: bool = True  # of its calls; else what it forwards them to has them

    def with_prompt_bytes(self, num_bytes: int) -> "Contract":
        """The same with messages of so many bytes where they bring prompts."""
        return replace(self, prompt_limit=lambda method: num_bytes)

    def parse(self, method: MethodDescriptor, raw: bytes) -> Message:
        """The request of a method of the service. Raises its invalid_field."""
        limit = self.prompt_limit(method.name) if method.name in self.with_prompt else self.max_message_bytes
        if len(raw) > limit:
            text = f"the message has {len(raw):,} bytes, at most {limit:,} are taken"
            raise self.refusals.invalid_field(text, field="request", limit=limit)
        try:
            return GetMessageClass(method.input_type).FromString(raw)
        except DecodeError:
            text = f"the bytes are not a {method.input_type.name}"
            raise self.refusals.invalid_field(text, field="request") from None

    def hide_bug(self, method: str) -> Exception:
        """Logs the exception that is being handled, a bug or a shortage of the host; the refusal that its client gets."""
        if (short := find_shortage(sys.exception())) is not None:
            log.warning("host_exhausted", method=method, resource=short.resource, exc_info=True)
            return self.refusals.host_exhausted(short.text, resource=short.resource)
        log.exception("broken_invariant", method=method)
        return self.refusals.broken_invariant("the service found itself inconsistent; its log says more")

    async def guard(self, method: str, context: Context, call: Awaitable[Any]) -> Any:
        """The call's result. An exception ends the RPC with its Status."""
        peer.set(context.peer())
        metadata = context.invocation_metadata() if self.has_spans else ()
        with tracing.serving(f"{self.service.full_name}/{method}", metadata) as span:
            try:
                return await call
            except self.refusals.base as refusal:
                tracing.fail(span, refusal.reason)
                await self.refusals.abort(context, refusal)
            except (grpc.RpcError, grpc.aio.UsageError):
                raise
            except grpc.aio.InternalError:
                # The client went away while a message was on its way to it, which cancels the call.
                raise asyncio.CancelledError from None
            except Exception:
                failure: Any = self.hide_bug(method)
                tracing.fail(span, failure.reason)
                await self.refusals.abort(context, failure)


class MethodRouter(grpc.GenericRpcHandler):
    """The service's handlers by method name: those given, else the service's method of that name in snake case."""

    def __init__(self, contract: Contract, service: Any, given: Mapping[str, grpc.RpcMethodHandler] | None = None) -> None:
        self.service_name = contract.service.full_name
        handlers = dict(given or {})
        for method in contract.service.methods:
            if method.name in contract.unimplemented:
                handlers[method.name] = _not_implemented(contract, method)
            elif method.name not in handlers:
                handlers[method.name] = _handler(contract, method, getattr(service, snake_case(method.name)))
        self._handlers = {f"/{self.service_name}/{name}": handler for name, handler in handlers.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def _handler(contract: Contract, method: MethodDescriptor, function: Any) -> grpc.RpcMethodHandler:
    if method.server_streaming:

        async def server_stream(raw: bytes, context: Context) -> None:
            async def call() -> None:
                responses: AsyncIterator[Message] = function(contract.parse(method, raw))
                try:
                    async for response in responses:
                        await context.write(response.SerializeToString())
                finally:
                    await responses.aclose()  # type: ignore[attr-defined]  # a client that went away cancels this task

            await contract.guard(method.name, context, call())

        return grpc.unary_stream_rpc_method_handler(server_stream)

    async def unary(raw: bytes, context: Context) -> bytes:
        async def call() -> bytes:
            return (await function(contract.parse(method, raw))).SerializeToString()

        return await contract.guard(method.name, context, call())

    return grpc.unary_unary_rpc_method_handler(unary)


def _not_implemented(contract: Contract, method: MethodDescriptor) -> grpc.RpcMethodHandler:
    text, feature = f"{method.name} is not part of this build", contract.unimplemented[method.name]

    async def refuse(raw: bytes, context: Context) -> None:
        await contract.refusals.abort(context, contract.refusals.not_implemented(text, feature=feature))

    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    return make(refuse)


def snake_case(name: str) -> str:
    """The name of a method of a service in Python, from its name in the protocol."""
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")
