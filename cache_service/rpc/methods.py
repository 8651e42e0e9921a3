"""The methods of CacheService on the server: how each is called, how large its messages may be.

Step and StreamSteps pass as bytes, both ways, because exactly once is a matter of bytes; WriteKv is a stream of messages.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common.service.intake import EOF
from kvkeeper.common.service.methods import (
    MAX_MESSAGE_BYTES,
    Context,
    Contract,
    MethodRouter,
    max_prompt_message_bytes,
    prompt_bytes,
    snake_case,
)

from .status import REFUSALS

CONTRACT = Contract(
    service=pb.DESCRIPTOR.services_by_name["CacheService"],
    with_prompt=frozenset(
        {
            *("CreateSequence", "CreateSequences", "StoreLogits", "WriteKv"),
            *("MatchPrefix", "CheckAdmission", "ExplainMatch", "PinPrefix", "HintPrefix"),
        }
    ),
    refusals=REFUSALS,
)
_LOOK_UPS = frozenset({"MatchPrefix", "ExplainMatch", "PinPrefix", "HintPrefix"})

_WRITE_KV = CONTRACT.service.methods_by_name["WriteKv"]
# In a step: 36 to commit and to reserve with one new token, and more to start, release or swap, and for guessed tokens.
_BYTES_PER_SEQUENCE = 128


def max_message_bytes(max_sequences: int) -> int:
    """The size limit of a message that carries neither a prompt nor K and V: a step may name each sequence of a pool."""
    return max(MAX_MESSAGE_BYTES, _BYTES_PER_SEQUENCE * max_sequences)


def prompt_limit(method: str, max_tokens: int) -> int:
    """The size limit of a message with a prompt, where a sequence has at most so many tokens.

    A look-up finds nothing behind them, so it is not even read where it has far more.
    """
    return max(MAX_MESSAGE_BYTES, prompt_bytes(max_tokens)) if method in _LOOK_UPS else max_prompt_message_bytes(max_tokens)


def register(groups: Sequence[object], most_bytes: int, max_tokens: Callable[[], int]) -> MethodRouter:
    """The methods of all groups, side by side. A group has a method for each RPC that it serves, in snake case.

    most_bytes: of a message without a prompt. max_tokens: of a sequence of any pool that there is now.
    """
    calls = SimpleNamespace(**get_handlers(groups))
    contract = replace(CONTRACT, max_message_bytes=most_bytes, prompt_limit=lambda method: prompt_limit(method, max_tokens()))
    return MethodRouter(
        contract,
        calls,
        {
            "Step": grpc.unary_unary_rpc_method_handler(_raw_unary(calls.step)),
            "StreamSteps": grpc.stream_stream_rpc_method_handler(_raw_stream(calls.stream_steps)),
            "WriteKv": grpc.stream_unary_rpc_method_handler(_write_kv(contract, calls.write_kv)),
        },
    )


def get_handlers(groups: Sequence[object]) -> dict[str, Callable[..., Any]]:
    """Handlers by the RPC's name in snake case: exactly one of each RPC."""
    handlers = {}
    for rpc in CONTRACT.service.methods:
        name = snake_case(rpc.name)
        found = [getattr(group, name) for group in groups if hasattr(group, name)]
        assert len(found) == 1, f"{rpc.name} has {len(found)} handlers"
        handlers[name] = found[0]
    return handlers


def _raw_unary(function: Callable[[bytes], Awaitable[bytes]]) -> Any:
    async def unary(raw: bytes, context: Context) -> bytes:
        return await CONTRACT.guard("Step", context, function(raw))

    return unary


def _raw_stream(function: Callable[..., Awaitable[None]]) -> Any:
    async def stream(_: object, context: Context) -> None:
        await CONTRACT.guard("StreamSteps", context, function(context.read, context.write))

    return stream


def _write_kv(contract: Contract, function: Callable[[AsyncIterator[Any]], Awaitable[Message]]) -> Any:
    async def requests(context: Context) -> AsyncIterator[Message]:
        while (raw := await context.read()) is not EOF:
            yield contract.parse(_WRITE_KV, raw)

    async def client_stream(_: object, context: Context) -> bytes:
        async def call() -> bytes:
            return (await function(requests(context))).SerializeToString()

        return await contract.guard("WriteKv", context, call())

    return client_stream
