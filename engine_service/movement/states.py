"""The states of a request on its way from one engine to another, and the transitions between them: one table.

A request is RUNNING in the engine that computes for it, and in that one alone. Both uses go the same way: an engine takes
over (all requests leave), or an engine computes a prompt for another (the request leaves once it has its first tokens). The
engine that has a prompt computed by another holds the request meanwhile. Pure.
"""

from enum import Enum


class MoveState(Enum):
    """Where a request is on its way."""

    RUNNING = "running"  # it waits or computes here, as the scheduler says
    LEAVING = "leaving"  # it is to leave the steps, as soon as it may and no step is running
    HELD = "held"  # out of the steps: it computes nothing, and sequences that were running may keep their blocks
    OFFERED = "offered"  # the cache service knows all that was computed, and offers the kept blocks to the other engine
    ENDED = "ended"  # it ended here, or continues in the other engine


_S = MoveState

TRANSITIONS: dict[tuple[MoveState, MoveState], str] = {
    (_S.RUNNING, _S.LEAVING): "another engine takes over, or asked for the prompt alone",
    (_S.RUNNING, _S.HELD): "it is new, and another engine computes its prompt",
    (_S.LEAVING, _S.HELD): "no step is running, or there is no session",
    (_S.LEAVING, _S.RUNNING): "the hand-over was given up",
    (_S.HELD, _S.OFFERED): "its state is sent to the other engine",
    (_S.HELD, _S.RUNNING): "its prompt is computed, or the other engine failed",
    (_S.OFFERED, _S.RUNNING): "the other engine does not want it, or died",
    **{(state, _S.ENDED): "ended, or confirmed by the other engine" for state in (_S.LEAVING, _S.HELD, _S.OFFERED)},
}
