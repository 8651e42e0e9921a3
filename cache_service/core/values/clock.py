"""The time of one pool: seconds of a monotone clock, set from outside."""

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """PoolState.tick sets it; the parts that note times only read it."""

    now: float = 0.0
