"""The contract of the engine service: its methods, which of them carry prompts, its errors, and the turns of its calls."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.protobuf.message import Message

from kvkeeper.common.service.intake import EOF, Intake
from kvkeeper.common.service.methods import Context, Contract, MethodRouter
from kvkeeper.common.service.status import Refusals
from kvkeeper.common.service.turns import TurnLimits
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..values.errors import BrokenInvariant, EngineError, HostExhausted, InvalidField, NotImplementedYet, NotReceived, QueueFull

# The gRPC code of each reason with which the service refuses; the comments of the proto's ErrorReason say the same.
_CODES = {
    "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
    "NEVER_FITS": grpc.StatusCode.INVALID_ARGUMENT,
    "WRONG_TOKEN_ID": grpc.StatusCode.INVALID_ARGUMENT,
    "DUPLICATE_REQUEST": grpc.StatusCode.ALREADY_EXISTS,
    "UNKNOWN_REQUEST": grpc.StatusCode.NOT_FOUND,
    "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "CACHE_SERVICE_DOWN": grpc.StatusCode.UNAVAILABLE,
    "TIMED_OUT": grpc.StatusCode.DEADLINE_EXCEEDED,
    "STALLED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "REQUEST_FAILED": grpc.StatusCode.INTERNAL,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "DEVICE_LOST": grpc.StatusCode.UNAVAILABLE,
    "NOT_IMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
    "BROKEN_INVARIANT": grpc.StatusCode.INTERNAL,
    "HOST_EXHAUSTED": grpc.StatusCode.UNAVAILABLE,
    "NOT_READ": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "TOO_COMPLEX": grpc.StatusCode.INVALID_ARGUMENT,
    "TOO_MUCH_HELD": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NOT_RECEIVED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "REQUEST_MOVED": grpc.StatusCode.UNAVAILABLE,
    "FOREIGN_ENGINE": grpc.StatusCode.FAILED_PRECONDITION,
    "HAND_OVER_UNDER_WAY": grpc.StatusCode.UNAVAILABLE,
    "WRONG_ROLE": grpc.StatusCode.FAILED_PRECONDITION,
    "WRONG_CREDENTIAL": grpc.StatusCode.UNAUTHENTICATED,
    "TENANT_NOT_ALLOWED": grpc.StatusCode.PERMISSION_DENIED,
}

_RETRY_DELAYS = {
    "QUEUE_FULL": duration_pb2.Duration(seconds=1),
    "TOO_MUCH_HELD": duration_pb2.Duration(seconds=1),
    "CACHE_SERVICE_DOWN": duration_pb2.Duration(nanos=250_000_000),  # as often as an engine looks for it
    "DRAINING": duration_pb2.Duration(seconds=1),
    "DEVICE_LOST": duration_pb2.Duration(seconds=1),
    "HOST_EXHAUSTED": duration_pb2.Duration(seconds=1),
    "HAND_OVER_UNDER_WAY": duration_pb2.Duration(seconds=1),
}

REFUSALS = Refusals(
    base=EngineError,
    invalid_field=InvalidField,
    not_implemented=NotImplementedYet,
    broken_invariant=BrokenInvariant,
    host_exhausted=HostExhausted,
    codes=_CODES,
    retry_delays=_RETRY_DELAYS,
)


# In the protocol and not in this build: method -> feature of the NOT_IMPLEMENTED answer. A test holds the list.
UNIMPLEMENTED_METHODS: dict[str, str] = {}

CONTRACT = Contract(
    service=pb.DESCRIPTOR.services_by_name["EngineService"],
    with_prompt=frozenset({"Generate", "GenerateMany", "SubmitRequest", "Tokenize", "Detokenize", "Prefill"}),
    unimplemented=UNIMPLEMENTED_METHODS,
    refusals=REFUSALS,
)

FRONTS_OWN = frozenset({"Generate", "GenerateMany"})  # methods that fronts serve themselves, of all protocols

_GENERATE_MANY = CONTRACT.service.methods_by_name["GenerateMany"]


def make_router(service: Any, contract: Contract, given: Mapping[str, grpc.RpcMethodHandler]) -> MethodRouter:
    """The methods of the service, which has one for each RPC that is not given, in snake case. contract: with limits."""
    generate_many = grpc.stream_stream_rpc_method_handler(_many(contract, service.generate_many))
    return MethodRouter(contract, service, {"GenerateMany": generate_many, **given})


def _many(contract: Contract, function: Callable[..., Awaitable[None]]) -> Any:
    async def stream(_: object, context: Context) -> None:
        async def read() -> AsyncIterator[Message]:
            while (raw := await context.read()) is not EOF:
                yield contract.parse(_GENERATE_MANY, raw)

        async def write(response: Message) -> None:
            await context.write(response.SerializeToString())

        await contract.guard("GenerateMany", context, function(read(), write))

    return stream


class IntakeConfig(Protocol):
    """The part of a config that is about calls on their way in."""

    @property
    def receive_memory(self) -> int: ...
    @property
    def receive_seconds(self) -> float: ...
    @property
    def connection_calls(self) -> int: ...


def make_intake(config: IntakeConfig, message_bytes: int) -> Intake:
    """The turns of calls, and the bounds of messages on their way in, which have so many bytes at most."""
    limits = turn_limits(config, message_bytes)
    return Intake(limits, config.receive_seconds, REFUSALS, too_many_waiting, _late)


def turn_limits(config: IntakeConfig, message_bytes: int) -> TurnLimits:
    """Limits of calls whose messages have so many bytes at most."""
    return TurnLimits(max(config.receive_memory // message_bytes, 1), config.connection_calls)


def too_many_waiting(limit: int) -> QueueFull:
    """The refusal of a call beyond so many that wait for their turn."""
    return QueueFull(f"{limit} calls wait for their turn, the most that may", limit=limit, flag="--connection-calls")


def _late(seconds: float) -> NotReceived:
    text = f"the message did not come within {seconds:g} seconds of its turn"
    return NotReceived(text, limit=seconds, flag="--receive-seconds")
