"""The meaning of a failed call to the cache service for the engine: wait, open another session, or drop one request."""

import grpc

from kvkeeper.client.errors import KvkeeperError

_AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
# The last two come from the attach socket: a session whose lease ended before this process attached has no token any more.
_SESSION_ENDED = {"UNKNOWN_SESSION", "STALE_EPOCH", "STREAM_REPLACED", "DRAINING", "UNKNOWN_TOKEN", "TOO_SLOW", "RANK_LOST"}


def rank_lost(why: str) -> KvkeeperError:
    """The session cannot go on, because a rank is lost."""
    return KvkeeperError(grpc.StatusCode.ABORTED, "RANK_LOST", why)


def host_exhausted(why: str) -> KvkeeperError:
    """There is no session yet, because the host gives this process no thread for it now."""
    return KvkeeperError(grpc.StatusCode.UNAVAILABLE, "HOST_EXHAUSTED", why)


def has_lost_rank(error: KvkeeperError) -> bool:
    """See rank_lost."""
    return error.reason == "RANK_LOST"


def is_away(error: KvkeeperError) -> bool:
    """The cache service does not answer, or cannot serve now."""
    return error.code in _AWAY


def has_ended_session(error: KvkeeperError) -> bool:
    """The session is over, but not because of the message: the same requests can go on in another session."""
    return is_away(error) or error.reason in _SESSION_ENDED


def is_invalid(error: KvkeeperError) -> bool:
    """The message itself was refused: the same message would be refused again. One with a salt is, by an old service."""
    return error.code is grpc.StatusCode.INVALID_ARGUMENT or error.reason == "PROTOCOL_VERSION_UNSUPPORTED"


def is_out_of_sequences(error: KvkeeperError) -> bool:
    """The pool has no slot for another sequence now."""
    return error.reason == "OUT_OF_SEQUENCES"


def refuses_groups(error: KvkeeperError) -> bool:
    """The service serves no groups of layers, or none of this kind, or not beside what it is configured with."""
    return error.metadata.get("feature") in ("layer_groups", "layer_group_kind") or error.metadata.get("field") == "spec.layout"


def is_unknown_sequence(error: KvkeeperError) -> bool:
    """The session has no such sequence."""
    return error.reason == "UNKNOWN_SEQUENCE"
