"""Policies: in which order waiting sequences start.

A policy ranks each waiting sequence: the rank is the moment, in seconds of the engine's clock, at which the sequence counts as
having arrived, and the smallest rank starts first. All sequences age alike, so ranks do not change with time: the queue is
sorted when a sequence joins it, never by a step. No sequence starves: those that arrive after its rank stand behind it.

Ordering is what a queue asks: one policy for good, or Adaptive's choice, which follows the load that is measured. Pure.
"""

from math import floor
from typing import Protocol

from ..values.request import Sequence

POLICY_NAMES = ("fcfs", "sjf", "priority", "adaptive")

# What clients call low, normal, high and critical lies 100, 100 and 900 apart: 100 is one level. A tenth of a level a second
# lets low overtake what comes 10 s later and is normal; with levels of 1 that would take 1000 s, which no time-out lets live.
PRIORITY_LEVEL = 100
LEVELS_PER_SECOND = 0.1

_JOB_SECONDS_PER_TOKEN = 0.002
MOST_JOB_SECONDS = 5.0


class Policy(Protocol):
    """One order."""

    @property
    def name(self) -> str:
        """The protocol's."""

    def rank(self, sequence: Sequence) -> float:
        """Seconds; the smallest starts first. Changes only with what the sequence has: tokens, and whether it had its turn."""

    @property
    def has_levels(self) -> bool:
        """Whether sequences differ in level."""

    def level(self, sequence: Sequence, waited: float) -> int:
        """With fair shares: only among those of the highest level does the tenant's share decide. waited: seconds."""


class FirstComeFirstServed:
    """Orders sequences by arrival."""

    name, has_levels = "fcfs", False

    def rank(self, sequence: Sequence) -> float:
        return sequence.request.arrived_at

    def level(self, sequence: Sequence, waited: float) -> int:
        return 0


class ShortestJobFirst:
    """Orders sequences by the tokens to compute, as if nothing were cached.

    Each token of a job makes it count as arriving a little later. A job counts as later by MOST_JOB_SECONDS at most; jobs
    that arrive after that never overtake it. A sequence that had its turn, and was refused a start or gave its blocks back,
    counts from its arrival, so that no later one overtakes it.
    """

    name, has_levels = "sjf", False

    def rank(self, sequence: Sequence) -> float:
        request = sequence.request
        if sequence.had_turn:
            return request.arrived_at
        num_tokens = len(sequence.token_ids) + request.max_new_tokens - sequence.num_output
        return request.arrived_at + min(num_tokens * _JOB_SECONDS_PER_TOKEN, MOST_JOB_SECONDS)

    def level(self, sequence: Sequence, waited: float) -> int:
        return 0


class PriorityWithAging:
    """Orders sequences by priority, which grows by LEVELS_PER_SECOND while a sequence waits."""

    name, has_levels = "priority", True

    def rank(self, sequence: Sequence) -> float:
        return sequence.request.arrived_at - sequence.request.priority / PRIORITY_LEVEL / LEVELS_PER_SECOND

    def level(self, sequence: Sequence, waited: float) -> int:
        return floor(sequence.request.priority / PRIORITY_LEVEL + LEVELS_PER_SECOND * waited)


FCFS, SJF, PRIORITY = FirstComeFirstServed(), ShortestJobFirst(), PriorityWithAging()
POLICIES: dict[str, Policy] = {policy.name: policy for policy in (FCFS, SJF, PRIORITY)}


class Ordering:
    """The policy that is in force. This one keeps it."""

    def __init__(self, policy: Policy = FCFS) -> None:
        self.policy = policy
        self.num_switches = 0

    def measure(self, now: float, queue_age: float, backlog: float) -> bool:
        """What the load is now; whether that changes the policy.

        queue_age: seconds for which the earliest arrival has been waiting; backlog: steps that the waiting's tokens fill.
        """
        return False


class Adaptive(Ordering):
    """Calm, in order of arrival; with a backlog, the shortest first; once a sequence has waited long, by priority and age.

    A threshold down lies well below the one up, and a choice stands for SHORTEST_STAY, so that a load at an edge does not sort
    the queue with every step.
    """

    BACKLOG_UP, BACKLOG_DOWN = 2.0, 0.25  # steps
    AGE_UP, AGE_DOWN = 20.0, 10.0  # seconds
    SHORTEST_STAY = 1.0  # seconds

    def __init__(self) -> None:
        super().__init__()
        self._switched_at = -self.SHORTEST_STAY

    def measure(self, now: float, queue_age: float, backlog: float) -> bool:
        chosen = self._choose(queue_age, backlog)
        if chosen is self.policy or now - self._switched_at < self.SHORTEST_STAY:
            return False
        self.policy, self._switched_at = chosen, now
        self.num_switches += 1
        return True

    def _choose(self, queue_age: float, backlog: float) -> Policy:
        if queue_age >= (self.AGE_DOWN if self.policy is PRIORITY else self.AGE_UP):
            return PRIORITY
        return FCFS if backlog <= (self.BACKLOG_UP if self.policy is FCFS else self.BACKLOG_DOWN) else SJF


def make_ordering(name: str) -> Ordering:
    """Make an ordering by its name in POLICY_NAMES."""
    return Adaptive() if name == "adaptive" else Ordering(POLICIES[name])
