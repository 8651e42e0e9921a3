"""Refusals as what a client gets: google.rpc.Status with one ErrorInfo, and RetryInfo where waiting helps.

Owns the code of each reason; the proto's ErrorReason says the same in its comments.
"""

from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine_service.refusals import BrokenInvariant, Refusal

DOMAIN = "kvkeeper"

_CODES = {
    "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
    "NEVER_FITS": grpc.StatusCode.INVALID_ARGUMENT,
    "WRONG_TOKEN_ID": grpc.StatusCode.INVALID_ARGUMENT,
    "DUPLICATE_REQUEST": grpc.StatusCode.ALREADY_EXISTS,
    "UNKNOWN_REQUEST": grpc.StatusCode.NOT_FOUND,
    "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "CACHE_SERVICE_DOWN": grpc.StatusCode.UNAVAILABLE,
    "TIMED_OUT": grpc.StatusCode.DEADLINE_EXCEEDED,
    "REQUEST_FAILED": grpc.StatusCode.INTERNAL,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "NOT_IMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
    "BROKEN_INVARIANT": grpc.StatusCode.INTERNAL,
}

# How long to wait before the same call may succeed.
_RETRY_DELAYS = {
    "QUEUE_FULL": duration_pb2.Duration(seconds=1),
    "CACHE_SERVICE_DOWN": duration_pb2.Duration(seconds=1),
    "DRAINING": duration_pb2.Duration(seconds=1),
}

# What a client gets for anything unexpected: the details are in the log only.
INTERNAL = BrokenInvariant("the service found itself inconsistent; its log says more")


def to_status(refusal: Refusal) -> status_pb2.Status:
    """The Status of a refusal."""
    status = status_pb2.Status(code=_CODES[refusal.reason].value[0], message=str(refusal))
    info = error_details_pb2.ErrorInfo(reason=refusal.reason, domain=DOMAIN, metadata=refusal.metadata)
    status.details.add().Pack(info)
    if delay := _RETRY_DELAYS.get(refusal.reason):
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


async def abort(context: Any, refusal: Refusal) -> None:
    """End the call with the refusal's Status; raises grpc's own exception for that."""
    await context.abort_with_status(rpc_status.to_status(to_status(refusal)))
