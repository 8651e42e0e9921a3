"""Waiting sequences in the order in which they are served.

Without fair shares there is one lane, sorted by the policy's rank. With them each tenant has its own. A sequence that had its
turn (it ran, or was refused a start) stands in a lane before them all, so that it keeps its place. Which lane is next is
decided when the order is read; within a lane the order changes only with what joins and leaves it. Pure.
"""

import bisect
import heapq
from collections.abc import Container, Iterator
from operator import attrgetter

from ...values.request import Sequence
from .fair_share import FairShare
from .policies import Ordering

_place = attrgetter("place")
_FRONT = -1.0  # less than any tenant was served

_Head = tuple[int, float, tuple[float, int, int], int, str | None]


class TenantLanes:
    """Waiting sequences in lanes, one per tenant with fair shares. shares: None where tenants do not matter."""

    def __init__(self, ordering: Ordering, shares: FairShare | None) -> None:
        self._ordering = ordering
        self._shares = shares
        self._lanes: dict[str | None, list[Sequence]] = {}  # none is empty; None: the one before the tenants'

    def add(self, sequence: Sequence) -> None:
        """Insert the sequence at its place. Its rank must not change until it is removed."""
        sequence.place = (self._ordering.policy.rank(sequence), sequence.request.arrival, sequence.index)
        bisect.insort(self._lanes.setdefault(self._lane_of(sequence), []), sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        name = self._lane_of(sequence)
        lane = self._lanes[name]
        at = bisect.bisect_left(lane, sequence.place, key=_place)
        assert lane[at] is sequence
        del lane[at]
        if not lane:
            del self._lanes[name]

    def clear(self) -> None:
        self._lanes.clear()

    def sort(self) -> None:
        """Another policy is in force."""
        sequences = [sequence for lane in self._lanes.values() for sequence in lane]
        self._lanes.clear()
        for sequence in sequences:
            self.add(sequence)

    def in_order(self, now: float, passed_over: Container[str] = ()) -> Iterator[Sequence]:
        """The sequences in order, each as if those before it had started: their tokens count for the shares of the rest.

        passed_over: lanes to leave out from now on.
        """
        policy, shares = self._ordering.policy, self._shares
        if shares is None or not policy.has_levels:
            yield from self._lanes.get(None, ())
        if shares is None:
            return
        heads = []
        for tenant, lane in self._lanes.items():
            if tenant is not None:
                heads.append(self._head(tenant, lane, 0, shares.waited(tenant, now), shares.served(tenant)))
            elif policy.has_levels:
                heads.append(self._head(None, lane, 0, now - lane[0].request.arrived_at, _FRONT))
        heapq.heapify(heads)
        while heads:
            _, served, _, at, tenant = heads[0]
            if tenant in passed_over:
                heapq.heappop(heads)
                continue
            lane = self._lanes[tenant]
            yield lane[at]
            if at + 1 == len(lane):
                heapq.heappop(heads)
            elif tenant is None:
                waited = now - lane[at + 1].request.arrived_at
                heapq.heapreplace(heads, self._head(None, lane, at + 1, waited, _FRONT))
            else:
                heapq.heapreplace(heads, self._head(tenant, lane, at + 1, 0, served + len(lane[at].token_ids)))

    def _head(self, tenant: str | None, lane: list[Sequence], at: int, waited: float, served: float) -> _Head:
        """The key of a lane; the lane with the smallest key is next."""
        return -self._ordering.policy.level(lane[at], waited), served, lane[at].place, at, tenant

    def _lane_of(self, sequence: Sequence) -> str | None:
        return None if self._shares is None or sequence.had_turn else self._shares.tenant_of(sequence.request)
