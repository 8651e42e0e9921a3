"""StepWait: why a step waited, or some of its sequences did, where it could have run."""

from enum import StrEnum


class StepWait(StrEnum):
    """A cause; the value is the metric's label. docs/operate/why-a-step-waits.md explains each.

    Most steps have none: they are asked for while the step before is computed, and are launched behind it.
    """

    # It was planned once the step before was computed.
    GUESSES = "guesses"
    LEAVING_REQUESTS = "leaving_requests"
    # It was planned meanwhile, and launched once the tokens of the step before were read.
    OVERLAP_OFF = "overlap_off"
    TRANSFERS = "transfers"
    CLAIMS = "claims"
    BLOCKS = "blocks"  # also where some sequences are left out for want of them
    BEAM_SEARCHES = "beam_searches"
    CONSTRAINTS = "constraints"
    # Its forward pass waits on the device.
    COPIES = "copies"
    # Some of its sequences wait for a later one.
    SHARES = "shares"
    TURNS = "turns"
    FORKS = "forks"
    # Its tokens are not used yet.
    LEASE = "lease"
    # It computes nothing, and the next one comes a little later.
    NOTHING_GRANTED = "nothing_granted"
