"""Typed refusals of the engine service: a reason of the protocol's ErrorReason and the data to continue with.

Texts hold no handles, paths or prompts.
"""

import re


class EngineError(Exception):
    """A call, or a request under way, that is refused. metadata is what the caller needs, as strings.

    reason: the protocol's, which is the name of the class in its spelling, unless the class has one of its own.
    """

    reason = "BROKEN_INVARIANT"

    def __init_subclass__(cls) -> None:
        if "reason" not in cls.__dict__:
            cls.reason = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidField(EngineError):
    """A field is out of its range or contradicts another. Metadata: field; limit and flag, where there is one."""


class NeverFits(EngineError):
    """Prompt and new tokens are more than a sequence can have. Metadata: requested, limit."""


class WrongTokenId(EngineError):
    """A token id outside the vocabulary. Metadata: token_id, vocab_size."""


class DuplicateRequest(EngineError):
    """A live request has this id."""


class TooComplex(EngineError):
    """A text, chat or constraint takes more than one request may. Metadata: field, exceeded; limit, flag where one is set."""


class TooMuchHeld(EngineError):
    """What is held for requests would be more bytes than the service may hold for them. Metadata: requested, limit."""


class UnknownRequest(EngineError):
    """No live request has this id."""


class QueueFull(EngineError):
    """Too many requests wait. Metadata: limit."""


class CacheServiceDown(EngineError):
    """The cache service does not answer."""


class TimedOut(EngineError):
    """The request's timeout ended before its first token. Metadata: timeout_ms."""


class Stalled(EngineError):
    """The request made no progress while it ran, and had no token yet. Metadata: flag."""


class RequestFailed(EngineError):
    """This request failed; others go on."""


class NotRead(EngineError):
    """The client does not read what comes for it. Metadata: limit."""


class NotReceived(EngineError):
    """The call's message did not come in time. Metadata: limit, flag."""


class Draining(EngineError):
    """The service is stopping."""


class DeviceLost(EngineError):
    """The engine can compute nothing more, because a device is lost to one of its processes. It ends, and is started again."""

    def __init__(self, fault: str) -> None:
        """fault: what happened and what helps, for the log."""
        super().__init__("the engine has lost its device and ends")
        self.fault = fault


class RequestMoved(EngineError):
    """The request goes on in another engine. Metadata: address, request_id."""


class ForeignEngine(EngineError):
    """The engine that asks computes something else. Metadata: field."""


class WrongRole(EngineError):
    """An engine of this role does not answer this call. Metadata: role."""


class HandOverUnderWay(EngineError):
    """The requests are being handed over to another engine."""


class NotImplementedYet(EngineError):
    """Part of the protocol, not of this build. Metadata: feature."""

    reason = "NOT_IMPLEMENTED"


class HostExhausted(EngineError):
    """The host gives the service no more of what the call needs. Metadata: resource."""


class BrokenInvariant(EngineError):
    """The service found itself inconsistent."""


class WrongCredential(EngineError):
    """The credential of a call that brings many requests is no longer that of its caller."""


class TenantNotAllowed(EngineError):
    """The caller acts for one tenant, and names another or all of them. Metadata: field, where one names it."""
