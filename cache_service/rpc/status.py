"""The gRPC code of each reason of the cache service's errors; the comments of the proto's ErrorReason say the same."""

import grpc
from google.protobuf import duration_pb2

from kvkeeper.common.service.status import Refusals

from ..core.values.errors import BrokenInvariant, CacheError, HostExhausted, InvalidField, NotImplementedYet

_RETRY_DELAY = duration_pb2.Duration(nanos=200_000_000)

_CODES = {
    "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
    "UNKNOWN_SESSION": grpc.StatusCode.NOT_FOUND,
    "STALE_EPOCH": grpc.StatusCode.FAILED_PRECONDITION,
    "UNKNOWN_SEQUENCE": grpc.StatusCode.NOT_FOUND,
    "DUPLICATE_SEQUENCE": grpc.StatusCode.ALREADY_EXISTS,
    "WRONG_STATE": grpc.StatusCode.FAILED_PRECONDITION,
    "WRONG_MODE": grpc.StatusCode.FAILED_PRECONDITION,
    "STEP_CONFLICT": grpc.StatusCode.ABORTED,
    "STEP_GAP": grpc.StatusCode.ABORTED,
    "STREAM_REPLACED": grpc.StatusCode.ABORTED,
    "OUT_OF_BLOCKS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "OUT_OF_SEQUENCES": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "OUT_OF_POOLS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NEVER_FITS": grpc.StatusCode.INVALID_ARGUMENT,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "POOL_NOT_READY": grpc.StatusCode.UNAVAILABLE,
    "NOT_IMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
    "BROKEN_INVARIANT": grpc.StatusCode.INTERNAL,
    "HOST_EXHAUSTED": grpc.StatusCode.UNAVAILABLE,
    "OUT_OF_SESSIONS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "OUT_OF_HOST_BLOCKS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "UNKNOWN_PIN": grpc.StatusCode.NOT_FOUND,
    "OUT_OF_PINS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "WATCH_LAGGED": grpc.StatusCode.ABORTED,
    "OUT_OF_WATCHES": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "UNKNOWN_LOGITS": grpc.StatusCode.NOT_FOUND,
    "UNKNOWN_BLOCK": grpc.StatusCode.NOT_FOUND,
    "UNKNOWN_OFFER": grpc.StatusCode.NOT_FOUND,
    "STEP_NOT_COMPLETED": grpc.StatusCode.FAILED_PRECONDITION,
    "PROTOCOL_VERSION_UNSUPPORTED": grpc.StatusCode.FAILED_PRECONDITION,
    "OPAQUE_PAGES": grpc.StatusCode.FAILED_PRECONDITION,
    "TENANT_NOT_ALLOWED": grpc.StatusCode.PERMISSION_DENIED,
}

REFUSALS = Refusals(
    base=CacheError,
    invalid_field=InvalidField,
    not_implemented=NotImplementedYet,
    broken_invariant=BrokenInvariant,
    host_exhausted=HostExhausted,
    codes=_CODES,
    retry_delays={reason: _RETRY_DELAY for reason, code in _CODES.items() if code is grpc.StatusCode.UNAVAILABLE},
)
