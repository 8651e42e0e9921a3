"""The one place that turns a failure into a KvkeeperError.

A failure is a google.rpc.Status with an ErrorInfo (reason, metadata to continue with) and, when waiting helps, a
RetryInfo. A failure of gRPC itself has a status code and an empty reason. The modules that read the details are imported with
the first failure: a command without failures does not wait for them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from google.rpc import status_pb2

# gRPC's own text; only where the service refused to receive does it begin with the word SERVER.
_TOO_LARGE = re.compile(r"(SERVER: )?Received message larger than max \((\d+) vs\. (\d+)\)")


class KvkeeperError(Exception):
    """A call that failed.

    reason is a name of the protocol's ErrorReason without its prefix, a refusal of the attach socket, or empty. metadata holds
    what is needed to go on (expected_step_id, limit, ...), retry_after the seconds after which a repeat may succeed, None where
    the service does not say.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str = "",
        message: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}{f' {reason}' if reason else ''}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after

    @property
    def unavailable(self) -> bool:
        """Whether the same call may succeed later: the only kind of failure that is ever repeated."""
        return self.code is grpc.StatusCode.UNAVAILABLE

    @property
    def service_down(self) -> bool:
        """Whether no service answered at all, as opposed to a service that said it cannot serve now."""
        return self.unavailable and not self.reason


def to_error(error: grpc.RpcError, *, is_ours: bool = False) -> KvkeeperError:
    """The KvkeeperError that a failed call stands for. is_ours: this side ended the call."""
    code, message = error.code(), error.details() or ""
    details = _details_of_call(error)
    if details.reason:
        return KvkeeperError(code, details.reason, message, details.metadata, details.retry_after)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(message)):
        what, taker = ("request", "the service") if sizes[1] else ("answer", "this client")
        message = f"the {what} has {int(sizes[2]):,} bytes, and {taker} takes at most {int(sizes[3]):,} at once"
        metadata = {"requested": sizes[2], "limit": sizes[3]}
        if sizes[1]:  # gRPC refused it before the service could, which says so of one that is not much too large
            return KvkeeperError(code, "INVALID_FIELD", message, {"field": "request", **metadata})
        return KvkeeperError(code, "", message, metadata)
    if code is grpc.StatusCode.INTERNAL or (code is grpc.StatusCode.CANCELLED and not is_ours):
        # Our services give a reason with each INTERNAL, and never end a call as CANCELLED. These come from gRPC itself: the
        # connection was cut in the middle of the call, or the server stopped at the moment of the call.
        code = grpc.StatusCode.UNAVAILABLE
    return KvkeeperError(code, "", message, details.metadata, details.retry_after)


@dataclass(slots=True)
class _Details:
    """The details of a status, as far as this client knows them."""

    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after: float | None = None


def parse_error(raw: bytes) -> KvkeeperError:
    """The KvkeeperError that the bytes of a google.rpc.Status stand for."""
    from google.protobuf.message import DecodeError
    from google.rpc import status_pb2

    try:
        status = status_pb2.Status.FromString(raw)
    except DecodeError:
        return KvkeeperError(grpc.StatusCode.INTERNAL, message="the service answered nonsense")
    codes = {code.value[0]: code for code in grpc.StatusCode}
    details = _parse_details(status)
    return KvkeeperError(
        codes.get(status.code, grpc.StatusCode.UNKNOWN), details.reason, status.message, details.metadata, details.retry_after
    )


def _details_of_call(error: grpc.RpcError) -> _Details:
    """The details of the call's status. A status that contradicts its own code has none."""
    from grpc_status import rpc_status

    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # both kinds of RpcError are calls
    except ValueError:
        return _Details()
    return _parse_details(status) if status else _Details()


def _parse_details(status: "status_pb2.Status") -> _Details:
    from google.rpc import error_details_pb2

    details = _Details()
    for packed in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            details.reason, details.metadata = info.reason, dict(info.metadata)
        elif packed.Unpack(retry):
            details.retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return details
