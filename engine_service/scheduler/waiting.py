"""The waiting sequences, in the order of the policy in force, and which of them the cache service knows.

A sequence is created in the cache service (CreateSequences) while it waits, so that its start is one item of a step. The slots
for that are bounded; running sequences and forks of running sequences have precedence.

Without fair shares there is one lane, sorted by the policy's rank. With them each tenant has its own. A sequence that had its
turn (it ran, or was refused a start) stands in a lane before them all, so that it keeps its place. Which lane is next is
decided when the order is read; within a lane the order changes only with what joins and leaves it. Pure.
"""

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterator
from operator import attrgetter

from ..values.request import Request, Sequence, SequenceState, move_to
from .policies import Ordering

NEW_TOKEN_WEIGHT = 2
_FEW = 64


class FairShare:
    """Served tokens, weighted, by tenant. Counts that no longer matter are forgotten."""

    def __init__(self, tenant_of: Callable[[Request], str] = attrgetter("tenant")) -> None:
        self.tenant_of = tenant_of
        self._served: dict[str, float] = {}
        self._since: dict[str, float] = {}  # tenants with waiting sequences: when they last had a start, or came
        self._num_waiting: dict[str, int] = {}
        self._floor = 0.0  # what the last to start had been served; stands for the waiting ones while there are none

    def served(self, tenant: str) -> float:
        return self._served[tenant]

    def waited(self, tenant: str, now: float) -> float:
        """Seconds since the last start of a tenant that has waiting sequences."""
        return now - self._since[tenant]

    def join(self, tenant: str, now: float) -> None:
        """One more sequence of the tenant waits."""
        if tenant not in self._num_waiting:
            floor = min((self._served[other] for other in self._num_waiting), default=self._floor)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self._since[tenant] = now
            self._num_waiting[tenant] = 0
            self._forget(floor)
        self._num_waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One sequence fewer of the tenant waits."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant], self._since[tenant]

    def start(self, tenant: str, num_tokens: int, now: float) -> None:
        """A waiting sequence of the tenant starts, with so many tokens to compute."""
        self._floor = self._served.get(tenant, self._floor)
        self._served[tenant] = self._floor + num_tokens
        if tenant in self._since:
            self._since[tenant] = now

    def charge(self, tenant: str, num_new: int) -> None:
        """The tenant got so many new tokens."""
        self._served[tenant] = self._served.get(tenant, self._floor) + NEW_TOKEN_WEIGHT * num_new

    def _forget(self, floor: float) -> None:
        """Tenants without waiting sequences that would come back with the floor anyway."""
        if len(self._served) > 2 * len(self._num_waiting) + _FEW:
            kept = {name: count for name, count in self._served.items() if name in self._num_waiting or count > floor}
            self._served = kept


_place = attrgetter("place")
_FRONT = -1.0  # less than any tenant was served

_Head = tuple[int, float, tuple[float, int, int], int, str | None]


class WaitingSequences:
    """The queue, the ids of sequences, and the count of those that the cache service knows."""

    def __init__(self, ordering: Ordering | None = None, shares: FairShare | None = None) -> None:
        """ordering: by arrival by default. shares: None where tenants do not matter."""
        self.ordering = ordering or Ordering()
        self.shares = shares
        self.now = 0.0  # seconds of the callers' clock; as of the last arrival or step
        self.sequences: dict[Sequence, float] = {}  # NEW, CREATING, WAITING and SWAPPED ones, and since when, in that order
        self.num_of: Counter[str] = Counter()  # of them, those of each client
        self.num_tokens = 0  # of these sequences, that are to be computed
        self.releases: list[int] = []  # ids of ended or preempted ones that the next step gives back
        self.num_known = 0  # sequences that the cache service knows, or that are being reported to it
        self._found_no_slot = False  # for the last one that was reported to it
        self._new = TenantLanes(self.ordering, shares)
        self._waiting = TenantLanes(self.ordering, shares)
        self._next_id = 1

    def put(self, sequence: Sequence, *, is_new: bool = False) -> None:
        """Queue the sequence at its place. One that is not new had its turn, and later ones do not overtake it."""
        if sequence.state is not SequenceState.NEW:
            move_to(sequence, SequenceState.NEW)
        sequence.sequence_id, sequence.had_turn = None, not is_new
        self._join(sequence, len(sequence.token_ids))
        self._new.add(sequence)

    def put_swapped(self, sequence: Sequence) -> None:
        """Queue a swapped-out sequence; the cache service still knows its id."""
        move_to(sequence, SequenceState.SWAPPED)
        sequence.had_turn = True
        self._join(sequence, 0)
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence starts or ends; its state is still that of a waiting one."""
        del self.sequences[sequence]
        self.num_of[sequence.request.client] -= 1
        if not self.num_of[sequence.request.client]:
            del self.num_of[sequence.request.client]
        self.num_tokens -= 0 if sequence.state is SequenceState.SWAPPED else len(sequence.token_ids)
        if self.shares is not None:
            self.shares.leave(self.shares.tenant_of(sequence.request))
        if sequence.state is SequenceState.NEW:
            self._new.remove(sequence)
        elif sequence.state is not SequenceState.CREATING:
            self._waiting.remove(sequence)

    def _join(self, sequence: Sequence, num_tokens: int) -> None:
        self.sequences[sequence] = self.now
        self.num_of[sequence.request.client] += 1
        self.num_tokens += num_tokens
        if self.shares is not None:
            self.shares.join(self.shares.tenant_of(sequence.request), self.now)

    def in_order(self, passed_over: Container[str] = ()) -> Iterator[Sequence]:
        """The sequences that may start, each as if those before it had started, and none of a tenant once it is passed over."""
        return self._waiting.in_order(self.now, passed_over)

    def start_refused(self, sequence: Sequence) -> None:
        """There was no room for the sequence's start: it keeps its place."""
        if not sequence.had_turn:
            self._waiting.remove(sequence)
            sequence.had_turn = True
            self._waiting.add(sequence)

    def measure(self, step_budget: int) -> None:
        """Let the ordering look at the load; a step computes so many of their tokens."""
        earliest = next(iter(self.sequences.values()), self.now)
        if self.ordering.measure(self.now, self.now - earliest, self.num_tokens / step_budget):
            self._new.sort()
            self._waiting.sort()

    def draw_id(self) -> int:
        """A sequence id that was never used."""
        sequence_id, self._next_id = self._next_id, self._next_id + 1
        return sequence_id

    def next_to_create(self, max_known: int, among: Container[Request] | None = None) -> Sequence | None:
        """The first sequence to create in the cache service, now CREATING under a fresh id; None: none for now."""
        if self.num_known and self.num_known >= max_known:
            return None
        new = self._new.in_order(self.now)
        sequence = next((other for other in new if among is None or other.request in among), None)
        if sequence is not None:
            self._new.remove(sequence)
            move_to(sequence, SequenceState.CREATING)
            sequence.sequence_id = self.draw_id()
            self.num_known += 1
        return sequence

    def is_creating(self, max_known: int) -> bool:
        """Whether a sequence is being created in the cache service, or can be: not while it has no slot."""
        states = {sequence.state for sequence in self.sequences}
        has_slot = not self._found_no_slot and (not self.num_known or self.num_known < max_known)
        return SequenceState.CREATING in states or (SequenceState.NEW in states and has_slot)

    def created(self, sequence: Sequence) -> None:
        """The cache service knows the sequence, which may have ended meanwhile."""
        self._found_no_slot = False
        if sequence.state is SequenceState.CREATING:
            move_to(sequence, SequenceState.WAITING)
            self._waiting.add(sequence)
        else:
            assert sequence.sequence_id is not None
            self.releases.append(sequence.sequence_id)

    def create_refused(self, sequence: Sequence, *, try_again: bool) -> None:
        """The sequence was not created: there is nothing to release. Without try_again the caller ends its request."""
        self.num_known -= 1
        self._found_no_slot = try_again
        sequence.sequence_id = None
        if try_again and sequence.state is SequenceState.CREATING:
            move_to(sequence, SequenceState.NEW)
            self._new.add(sequence)

    def forget_session(self) -> None:
        """The cache service knows no sequence any more."""
        self._new.clear()
        self._waiting.clear()
        self.num_tokens = sum(len(sequence.token_ids) for sequence in self.sequences)
        for sequence in self.sequences:
            if sequence.state is not SequenceState.NEW:
                move_to(sequence, SequenceState.NEW)
            sequence.sequence_id, sequence.num_computed = None, 0
            self._new.add(sequence)
        self.releases.clear()
        self.num_known = 0
        self._found_no_slot = False


class TenantLanes:
    """Waiting sequences in lanes, one per tenant with fair shares. shares: None where tenants do not matter."""

    def __init__(self, ordering: Ordering, shares: FairShare | None) -> None:
        self._ordering = ordering
        self._shares = shares
        self._lanes: dict[str | None, list[Sequence]] = {}  # none is empty; None: the one before the tenants'

    def add(self, sequence: Sequence) -> None:
        """Insert the sequence at its place. Its rank must not change until it is removed."""
        sequence.place = (self._ordering.policy.rank(sequence), sequence.request.arrival, sequence.index)
        bisect.insort(self._lanes.setdefault(self._find_lane(sequence), []), sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        name = self._find_lane(sequence)
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

    def _find_lane(self, sequence: Sequence) -> str | None:
        return None if self._shares is None or sequence.had_turn else self._shares.tenant_of(sequence.request)
