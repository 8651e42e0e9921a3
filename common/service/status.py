"""Refusals as a client gets them: google.rpc.Status with one ErrorInfo, and RetryInfo where waiting helps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "kvkeeper"


def make_status(code: grpc.StatusCode, reason: str, text: str, metadata: Mapping[str, str]) -> status_pb2.Status:
    """With one ErrorInfo."""
    status = status_pb2.Status(code=code.value[0], message=text)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    return status


@dataclass(frozen=True, slots=True)
class Refusals:
    """The errors of a service: their base class, those that methods.py raises itself, and the code of each reason.

    An error has `reason`, a name of the protocol's ErrorReason without its prefix, and `metadata`, strings that the client
    needs to recover. Each class is made from a message and metadata.
    """

    base: type[Any]
    invalid_field: Callable[..., Exception]
    not_implemented: Callable[..., Exception]
    broken_invariant: Callable[..., Exception]
    host_exhausted: Callable[..., Exception]
    codes: Mapping[str, grpc.StatusCode]  # by reason
    retry_delays: Mapping[str, duration_pb2.Duration]  # by reason: how long to wait before the same call may succeed

    def to_status(self, error: Any) -> status_pb2.Status:
        """The Status of a refusal."""
        status = make_status(self.codes[error.reason], error.reason, str(error), error.metadata)
        if delay := self.retry_delays.get(error.reason):
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return status

    async def abort(self, context: Any, error: Exception) -> None:
        """Ends the call with the refusal's Status; raises grpc's own exception for that."""
        await context.abort_with_status(rpc_status.to_status(self.to_status(error)))
