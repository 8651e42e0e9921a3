"""The gRPC code of each reason with which the engine service refuses; the comments of the proto's ErrorReason say the same."""

import grpc
from google.protobuf import duration_pb2

from kvkeeper.common.service.status import Refusals

from ..values.errors import BrokenInvariant, EngineError, HostExhausted, InvalidField, NotImplementedYet

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
