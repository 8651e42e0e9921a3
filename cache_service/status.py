"""Typed refusals as what a client gets: google.rpc.Status with one ErrorInfo, and RetryInfo where waiting helps.

Owns the code of each reason; the proto's ErrorReason says the same in its comments.
"""

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY  # type: ignore[attr-defined]

from cache_service.errors import BrokenInvariant, CacheError

DOMAIN = "kvkeeper"
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
    "OUT_OF_SESSIONS": grpc.StatusCode.RESOURCE_EXHAUSTED,
}

# What a client gets for anything unexpected: the details are in the log only.
INTERNAL = BrokenInvariant("the service found itself inconsistent; its log says more")


def to_status(error: CacheError) -> status_pb2.Status:
    """The Status of a refusal."""
    code = _CODES[error.reason]
    status = status_pb2.Status(code=code.value[0], message=str(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if code is grpc.StatusCode.UNAVAILABLE:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=_RETRY_DELAY))
    return status


async def abort(context: grpc.aio.ServicerContext, error: CacheError) -> None:
    """Ends the call with the refusal's Status; raises grpc's own exception for that."""
    details = to_status(error).SerializeToString()
    await context.abort(_CODES[error.reason], str(error), ((GRPC_DETAILS_METADATA_KEY, details),))
