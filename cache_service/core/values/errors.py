"""Typed refusals of the core: a broken contract with its reason and the data to recover.

A shortage of blocks and a missed look-up are ordinary answers, not errors; a bug is an assertion. Texts hold no handles, paths
or other tenants' ids. `reason` is a name of the protocol's ErrorReason without its prefix.
"""


class CacheError(Exception):
    """A call was refused and changed nothing. metadata has what the caller needs to go on, as strings."""

    reason = "BROKEN_INVARIANT"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidField(CacheError):
    """A field is out of its range or contradicts another. Metadata: field, and limit where there is one."""

    reason = "INVALID_FIELD"


class UnknownSession(CacheError):
    """No live session has this id."""

    reason = "UNKNOWN_SESSION"


class StaleEpoch(CacheError):
    """The epoch is not the session's. Metadata: current_epoch."""

    reason = "STALE_EPOCH"


class UnknownSequence(CacheError):
    """The session has no such sequence. Metadata: sequence_id."""

    reason = "UNKNOWN_SEQUENCE"


class DuplicateSequence(CacheError):
    """The id is taken with other arguments. Metadata: sequence_id."""

    reason = "DUPLICATE_SEQUENCE"


class UnknownOffer(CacheError):
    """Nothing is offered with these bytes: never, not any more, or to another session."""

    reason = "UNKNOWN_OFFER"


class StepNotCompleted(CacheError):
    """A step that works on the sequence is in flight. Metadata: sequence_id, completed_step_id."""

    reason = "STEP_NOT_COMPLETED"


class WrongState(CacheError):
    """The sequence is not in a state for this. Metadata: sequence_id, state."""

    reason = "WRONG_STATE"


class WrongMode(CacheError):
    """Steps and one-item calls do not mix in one session. Metadata: mode."""

    reason = "WRONG_MODE"


class StepConflict(CacheError):
    """The step id was used with other contents. Metadata: expected_step_id."""

    reason = "STEP_CONFLICT"


class StepGap(CacheError):
    """The step id is not the next one. Metadata: expected_step_id."""

    reason = "STEP_GAP"


class StreamReplaced(CacheError):
    """Another stream of the session took over."""

    reason = "STREAM_REPLACED"


class OutOfBlocks(CacheError):
    """Not enough blocks for an all-or-nothing call. Metadata: requested, available."""

    reason = "OUT_OF_BLOCKS"


class OutOfSequences(CacheError):
    """No sequence slot is left. Metadata: limit."""

    reason = "OUT_OF_SEQUENCES"


class OutOfSessions(CacheError):
    """No session slot is left. Metadata: limit."""

    reason = "OUT_OF_SESSIONS"


class OutOfHostBlocks(CacheError):
    """Not enough room in the host tier. Metadata: requested, available."""

    reason = "OUT_OF_HOST_BLOCKS"


class UnknownPin(CacheError):
    """The session has no pin of this id."""

    reason = "UNKNOWN_PIN"


class OutOfPins(CacheError):
    """No room for another pin. Metadata: limit."""

    reason = "OUT_OF_PINS"


class WatchLagged(CacheError):
    """The reader of a watch fell behind."""

    reason = "WATCH_LAGGED"


class OutOfWatches(CacheError):
    """Too many watches. Metadata: limit."""

    reason = "OUT_OF_WATCHES"


class UnknownLogits(CacheError):
    """No logits are held for this sequence. Metadata: sequence_id."""

    reason = "UNKNOWN_LOGITS"


class UnknownBlock(CacheError):
    """The pool has no such block. Metadata: limit."""

    reason = "UNKNOWN_BLOCK"


class OutOfPools(CacheError):
    """No memory for another pool. Metadata: flag."""

    reason = "OUT_OF_POOLS"


class ProtocolVersionUnsupported(CacheError):
    """A client of another time. Metadata: protocol_version, oldest_protocol_version, newest_protocol_version."""

    reason = "PROTOCOL_VERSION_UNSUPPORTED"


class OpaquePages(CacheError):
    """The pool's blocks are pages in which this service cannot distinguish K from V."""

    reason = "OPAQUE_PAGES"


class NeverFits(CacheError):
    """Longer than a sequence of this pool can ever be. Metadata: requested, limit."""

    reason = "NEVER_FITS"


class Draining(CacheError):
    """The service is stopping."""

    reason = "DRAINING"


class PoolNotReady(CacheError):
    """The pool's memory is not there yet."""

    reason = "POOL_NOT_READY"


class NotImplementedYet(CacheError):
    """Part of the protocol, not of this build. Metadata: feature."""

    reason = "NOT_IMPLEMENTED"


class HostExhausted(CacheError):
    """The host gives the service no more of what the call needs. Metadata: resource."""

    reason = "HOST_EXHAUSTED"


class BrokenInvariant(CacheError):
    """The service found itself inconsistent."""

    reason = "BROKEN_INVARIANT"


class TenantNotAllowed(CacheError):
    """The caller acts for one tenant, and names another or all of them. Metadata: field, where one names it."""

    reason = "TENANT_NOT_ALLOWED"


def out_of_sequences(limit: int) -> OutOfSequences:
    """The refusal of a sequence for which a session has no slot."""
    return OutOfSequences(f"{limit} sequences are in use, the most that may be", limit=limit)
