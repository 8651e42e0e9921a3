"""Which part of an exhaustive proof runs today.

`make test` runs a slice of what is exhaustive. The day chooses it, so that the days together run the whole; `make test-whole`
runs all of it, and so does `make soak` first. KVKEEPER_TEST_DAY replays the slice of a day, which pytest prints at its end.
"""

import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from datetime import UTC, datetime
from typing import TypeVar

T = TypeVar("T")

IS_WHOLE = os.environ.get("KVKEEPER_TESTS") == "whole"
DAY = os.environ.get("KVKEEPER_TEST_DAY") or datetime.now(UTC).date().isoformat()

FIRST_SEED = 1 if IS_WHOLE else random.Random(DAY).randint(1, 1000)  # of a simulation that goes from seed to seed


def todays(cases: Sequence[T], num: int) -> list[T]:
    """So many of the cases, in their order, or all of them in a whole run."""
    if IS_WHOLE or num >= len(cases):
        return list(cases)
    return [cases[at] for at in sorted(random.Random(DAY).sample(range(len(cases)), num))]


def covering(cases: Iterable[T], values: Callable[[T], Set[Hashable]]) -> list[T]:
    """Cases, in their order, in which each value of any of them occurs, or all of them in a whole run."""
    cases = list(cases)
    if IS_WHOLE:
        return cases
    left = set().union(*map(values, cases))
    shuffled, chosen = random.Random(DAY).sample(range(len(cases)), len(cases)), []
    while left:
        most = max(shuffled, key=lambda at: len(left & values(cases[at])))
        left -= values(cases[most])
        chosen.append(most)
    return [cases[at] for at in sorted(chosen)]


def scaled(number: int, share: int = 5) -> int:
    """A number of examples, whole or divided by `share`."""
    return number if IS_WHOLE else max(number // share, 1)


def at_least(number: int) -> int:
    """How often what a run is about must have happened in it. A slice is small: of rare events, below 50, it may have none."""
    return number if IS_WHOLE else number // 50
