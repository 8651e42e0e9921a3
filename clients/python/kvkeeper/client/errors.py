"""The one place that turns a gRPC failure into a KvkeeperError.

A failure is a google.rpc.Status with an ErrorInfo (reason, metadata to go on with) and, when waiting helps, a
RetryInfo. What comes from the transport itself has a status code and an empty reason.
"""

from collections.abc import Mapping

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class KvkeeperError(Exception):
    """A call that failed. reason is a name of the protocol's ErrorReason without its prefix, or empty.

    metadata holds what is needed to go on (expected_step_id, limit, ...), retry_after the seconds after which a repeat
    may succeed, None where the service does not say.
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
        """Whether nobody answered at all, as opposed to a service that said it cannot serve now."""
        return self.unavailable and not self.reason


def error_of(error: grpc.RpcError, *, is_ours: bool = False) -> KvkeeperError:
    """The KvkeeperError that a failed call stands for. is_ours: this side ended the call."""
    code, message = error.code(), error.details() or ""
    reason, metadata, retry_after = "", {}, None
    for detail in _details(error):
        if isinstance(detail, error_details_pb2.ErrorInfo):
            reason, metadata = detail.reason, dict(detail.metadata)
        elif isinstance(detail, error_details_pb2.RetryInfo):
            retry_after = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
    if not reason and (code is grpc.StatusCode.INTERNAL or (code is grpc.StatusCode.CANCELLED and not is_ours)):
        # Our services give a reason with each INTERNAL, and never end a call as CANCELLED. These are the transport's: of a
        # connection that was cut in mid-call, and of a call that met a server in the moment in which it stopped.
        code = grpc.StatusCode.UNAVAILABLE
    return KvkeeperError(code, reason, message, metadata, retry_after)


def _details(error: grpc.RpcError) -> list[Message]:
    """The details that this client knows; a status that contradicts its own code carries none that count."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # both kinds of RpcError are calls
    except ValueError:
        return []
    known: list[Message] = []
    for packed in status.details if status else ():
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                detail = kind()
                packed.Unpack(detail)
                known.append(detail)
    return known
