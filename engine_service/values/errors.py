"""Typed refusals of the engine service: a reason of the protocol's ErrorReason and the data to continue with.

Texts hold no handles, paths or prompts.
"""


class EngineError(Exception):
    """A call, or a request under way, that is refused. metadata is what the caller needs, as strings."""

    reason = "BROKEN_INVARIANT"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidField(EngineError):
    """A field is out of its range or contradicts another. Metadata: field; limit and flag, where there is one."""

    reason = "INVALID_FIELD"


class NeverFits(EngineError):
    """Prompt and new tokens are more than a sequence can have. Metadata: requested, limit."""

    reason = "NEVER_FITS"


class WrongTokenId(EngineError):
    """A token id outside the vocabulary. Metadata: token_id, vocab_size."""

    reason = "WRONG_TOKEN_ID"


class DuplicateRequest(EngineError):
    """A live request has this id."""

    reason = "DUPLICATE_REQUEST"


class TooComplex(EngineError):
    """A text, chat or constraint takes more than one request may. Metadata: field, exceeded; limit, flag where one is set."""

    reason = "TOO_COMPLEX"


class TooMuchHeld(EngineError):
    """What is held for requests would be more bytes than the service may hold for them. Metadata: requested, limit."""

    reason = "TOO_MUCH_HELD"


class UnknownRequest(EngineError):
    """No live request has this id."""

    reason = "UNKNOWN_REQUEST"


class QueueFull(EngineError):
    """Too many requests wait. Metadata: limit."""

    reason = "QUEUE_FULL"


class CacheServiceDown(EngineError):
    """The cache service does not answer."""

    reason = "CACHE_SERVICE_DOWN"


class TimedOut(EngineError):
    """The request's timeout ended before its first token. Metadata: timeout_ms."""

    reason = "TIMED_OUT"


class Stalled(EngineError):
    """The request made no progress while it ran, and had no token yet. Metadata: flag."""

    reason = "STALLED"


class RequestFailed(EngineError):
    """This request failed; others go on."""

    reason = "REQUEST_FAILED"


class NotRead(EngineError):
    """The client does not read what comes for it. Metadata: limit."""

    reason = "NOT_READ"


class NotReceived(EngineError):
    """The call's message did not come in time. Metadata: limit, flag."""

    reason = "NOT_RECEIVED"


class Draining(EngineError):
    """The service is stopping."""

    reason = "DRAINING"


class DeviceLost(EngineError):
    """The engine can compute nothing more, because a device is lost to one of its processes. It ends, and is started again."""

    reason = "DEVICE_LOST"

    def __init__(self, fault: str) -> None:
        """fault: what happened and what helps, for the log."""
        super().__init__("the engine has lost its device and ends")
        self.fault = fault


class RequestMoved(EngineError):
    """The request goes on in another engine. Metadata: address, request_id."""

    reason = "REQUEST_MOVED"


class ForeignEngine(EngineError):
    """The engine that asks computes something else. Metadata: field."""

    reason = "FOREIGN_ENGINE"


class WrongRole(EngineError):
    """An engine of this role does not answer this call. Metadata: role."""

    reason = "WRONG_ROLE"


class HandOverUnderWay(EngineError):
    """The requests are being handed over to another engine."""

    reason = "HAND_OVER_UNDER_WAY"


class NotImplementedYet(EngineError):
    """Part of the protocol, not of this build. Metadata: feature."""

    reason = "NOT_IMPLEMENTED"


class HostExhausted(EngineError):
    """The host gives the service no more of what the call needs. Metadata: resource."""

    reason = "HOST_EXHAUSTED"


class BrokenInvariant(EngineError):
    """The service found itself inconsistent."""

    reason = "BROKEN_INVARIANT"


class WrongCredential(EngineError):
    """The credential of a call that brings many requests is no longer that of its caller."""

    reason = "WRONG_CREDENTIAL"


class TenantNotAllowed(EngineError):
    """The caller acts for one tenant, and names another or all of them. Metadata: field, where one names it."""

    reason = "TENANT_NOT_ALLOWED"
