"""What comes in through the door of the cache service: the methods of CacheService, and which carry prompts or KV.

Step and StreamSteps pass as bytes, both ways, because exactly once is a matter of bytes; WriteKv is a stream of messages.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.service.door import Context, Contract, Door

from ..unimplemented import UNIMPLEMENTED_METHODS
from .status import REFUSALS

CONTRACT = Contract(
    service=pb.DESCRIPTOR.services_by_name["CacheService"],
    with_prompt=frozenset(
        {"CreateSequence", "MatchPrefix", "CheckAdmission", "ExplainMatch", "PinPrefix", "StoreLogits", "WriteKv"}
    ),
    unimplemented=UNIMPLEMENTED_METHODS,
    refusals=REFUSALS,
)
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # what read answers when the client has ended its side

_WRITE_KV = CONTRACT.service.methods_by_name["WriteKv"]


def make_door(service: Any, steps: Any) -> Door:
    """`service` has a method for each of CacheService's in snake case, but for step and stream_steps, which `steps` has."""
    return Door(
        CONTRACT,
        service,
        {
            "Step": grpc.unary_unary_rpc_method_handler(_raw_unary(steps.step)),
            "StreamSteps": grpc.stream_stream_rpc_method_handler(_raw_stream(steps.stream_steps)),
            "WriteKv": grpc.stream_unary_rpc_method_handler(_write_kv(service.write_kv)),
        },
    )


def _raw_unary(function: Callable[[bytes], Awaitable[bytes]]) -> Any:
    async def unary(raw: bytes, context: Context) -> bytes:
        return await CONTRACT.guard("Step", context, function(raw))

    return unary


def _raw_stream(function: Callable[..., Awaitable[None]]) -> Any:
    async def stream(_: object, context: Context) -> None:
        await CONTRACT.guard("StreamSteps", context, function(context.read, context.write))

    return stream


def _write_kv(function: Callable[[AsyncIterator[Any]], Awaitable[Message]]) -> Any:
    async def requests(context: Context) -> AsyncIterator[Message]:
        while (raw := await context.read()) is not EOF:
            yield CONTRACT.parse(_WRITE_KV, raw)

    async def client_stream(_: object, context: Context) -> bytes:
        async def call() -> bytes:
            return (await function(requests(context))).SerializeToString()

        return await CONTRACT.guard("WriteKv", context, call())

    return client_stream
