"""What a row of the soak is: a promise, how much of it is to be shown, and one unit of work that shows a part of it.

Rules: `run(seed)` is replayed by its seed, raises where the promise is broken, and returns how much it did and how often the
fault fired that the promise is about. A unit without a fault that fired has shown nothing, so it counts for nothing. It is a
function of the seed and of its sizes, which tell a brief row from a long one; what awaits gets a loop of its own.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Counts:
    """What one unit did, in the row's own unit, and how often its fault fired. worst: of what the row measures, if it does."""

    done: int
    faults: int
    worst: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One promise. A number may have several rows, one per figure; `name` tells them apart."""

    number: int
    name: str
    promise: str
    unit: str  # what `target` counts
    fault: str  # what has to fire
    target: int
    function: Callable[..., Counts | Coroutine[Any, Any, Counts]]
    num_ci_seeds: int  # units that the tests run
    is_timed: bool = False  # it measures time, so nothing else runs beside it
    most_seconds: float = 120.0  # longer, and the unit hangs
    worst: str = ""  # what Counts.worst is, with its unit
    sizes: dict[str, Any] = field(default_factory=dict)  # of the function, beside the seed

    def run(self, seed: int) -> Counts:
        found = self.function(seed, **self.sizes)
        return found if isinstance(found, Counts) else asyncio.run(found)

    @property
    def key(self) -> str:
        return f"{self.number} {self.name}"
