"""Typed refusals of the core: a broken contract with its reason and the data to recover.

A shortage of blocks and a missed look-up are ordinary answers, not errors; a bug is an assertion. Texts hold no handles, paths
or other tenants' ids. `reason` is a name of the protocol's ErrorReason without its prefix.
"""

import re
from typing import ClassVar


class CacheError(Exception):
    """A call was refused and changed nothing. metadata has what the caller needs to go on, as strings.

    code: the name of the gRPC code, which the comments of the proto's ErrorReason name as well. reason: the class's own name
    unless it is given.
    """

    code: ClassVar[str]
    reason: ClassVar[str]

    def __init_subclass__(cls, *, code: str, reason: str = "") -> None:
        cls.code = code
        cls.reason = reason or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidField(CacheError, code="INVALID_ARGUMENT"):
    """A field is out of its range or contradicts another. Metadata: field, and limit where there is one."""


class UnknownSession(CacheError, code="NOT_FOUND"):
    """No live session has this id."""


class StaleEpoch(CacheError, code="FAILED_PRECONDITION"):
    """The epoch is not the session's. Metadata: current_epoch."""


class UnknownSequence(CacheError, code="NOT_FOUND"):
    """The session has no such sequence. Metadata: sequence_id."""


class DuplicateSequence(CacheError, code="ALREADY_EXISTS"):
    """The id is taken with other arguments. Metadata: sequence_id."""


class UnknownOffer(CacheError, code="NOT_FOUND"):
    """Nothing is offered with these bytes: never, not any more, or to another session."""


class StepNotCompleted(CacheError, code="FAILED_PRECONDITION"):
    """A step that works on the sequence is in flight. Metadata: sequence_id, completed_step_id."""


class WrongState(CacheError, code="FAILED_PRECONDITION"):
    """The sequence is not in a state for this. Metadata: sequence_id, state."""


class WrongMode(CacheError, code="FAILED_PRECONDITION"):
    """Steps and one-item calls do not mix in one session. Metadata: mode."""


class StepConflict(CacheError, code="ABORTED"):
    """The step id was used with other contents. Metadata: expected_step_id."""


class StepGap(CacheError, code="ABORTED"):
    """The step id is not the next one. Metadata: expected_step_id."""


class StreamReplaced(CacheError, code="ABORTED"):
    """Another stream of the session took over."""


class OutOfBlocks(CacheError, code="RESOURCE_EXHAUSTED"):
    """Not enough blocks for an all-or-nothing call. Metadata: requested, available."""


class OutOfSequences(CacheError, code="RESOURCE_EXHAUSTED"):
    """No sequence slot is left. Metadata: limit."""


class OutOfSessions(CacheError, code="RESOURCE_EXHAUSTED"):
    """No session slot is left. Metadata: limit."""


class OutOfHostBlocks(CacheError, code="RESOURCE_EXHAUSTED"):
    """Not enough room in the host tier. Metadata: requested, available."""


class UnknownPin(CacheError, code="NOT_FOUND"):
    """The session has no pin of this id."""


class OutOfPins(CacheError, code="RESOURCE_EXHAUSTED"):
    """No room for another pin. Metadata: limit."""


class WatchLagged(CacheError, code="ABORTED"):
    """The reader of a watch fell behind."""


class OutOfWatches(CacheError, code="RESOURCE_EXHAUSTED"):
    """Too many watches. Metadata: limit."""


class UnknownLogits(CacheError, code="NOT_FOUND"):
    """No logits are held for this sequence. Metadata: sequence_id."""


class UnknownBlock(CacheError, code="NOT_FOUND"):
    """The pool has no such block. Metadata: limit."""


class OutOfPools(CacheError, code="RESOURCE_EXHAUSTED"):
    """No memory for another pool. Metadata: flag."""


class ProtocolVersionUnsupported(CacheError, code="FAILED_PRECONDITION"):
    """A client of another time. Metadata: protocol_version, oldest_protocol_version, newest_protocol_version."""


class OpaquePages(CacheError, code="FAILED_PRECONDITION"):
    """The pool's blocks are pages in which this service cannot distinguish K from V."""


class NeverFits(CacheError, code="INVALID_ARGUMENT"):
    """Longer than a sequence of this pool can ever be. Metadata: requested, limit."""


class Draining(CacheError, code="UNAVAILABLE"):
    """The service is stopping."""


class PoolNotReady(CacheError, code="UNAVAILABLE"):
    """The pool's memory is not there yet."""


class NotImplementedYet(CacheError, code="UNIMPLEMENTED", reason="NOT_IMPLEMENTED"):
    """Part of the protocol, not of this build. Metadata: feature."""


class HostExhausted(CacheError, code="UNAVAILABLE"):
    """The host gives the service no more of what the call needs. Metadata: resource."""


class BrokenInvariant(CacheError, code="INTERNAL"):
    """The service found itself inconsistent."""


class TenantNotAllowed(CacheError, code="PERMISSION_DENIED"):
    """The caller acts for one tenant, and names another or all of them. Metadata: field, where one names it."""


def out_of_sequences(limit: int) -> OutOfSequences:
    """The refusal of a sequence for which a session has no slot."""
    return OutOfSequences(f"{limit} sequences are in use, the most that may be", limit=limit)
