"""Transfer orders in flight: which session has to move what, and which sequences wait for it.

Owns the ids, which grow over the life of a pool, and the orders that are neither completed nor failed yet. Rules: an order
ends once, so a repeated report of its end changes nothing; a session reports its own orders only; a report is checked whole
before anything of it counts. A long report is worked off in slices: what it names is in flight until its turn comes. Does not
know what an order's end means for blocks and sequences.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..sequences.session_state import SessionState
from ..values.errors import InvalidField
from ..values.types import Int32Array, Int64Array, SequenceState, TransferKind


@dataclass(slots=True, eq=False)
class Move:
    """A sequence on its way between the tiers.

    towards: SWAPPED, which ends with its last order, or LOADING, which is concluded in its session's next call. hit_len: of a
    start, else None.
    """

    slot: int
    owner: SessionState
    towards: SequenceState
    hit_len: int | None = None
    num_pending: int = 0  # orders it still waits for
    failed: list[int] = field(default_factory=list)  # places in the tables, one behind the other, whose orders failed
    is_over: bool = False  # finished, or its sequence was released


@dataclass(slots=True, eq=False)
class TransferOrder:
    """Copies one whole block between the tiers. tenant: whose tokens; waiters: moves, each with its place in the tables."""

    id: int
    kind: TransferKind
    source: int
    destination: int
    owner: SessionState
    tenant: int
    waiters: list[tuple[Move, int]] = field(default_factory=list)

    def add_waiter(self, move: Move, place: int) -> None:
        self.waiters.append((move, place))
        move.num_pending += 1


class Transfers:
    """The orders of one pool."""

    def __init__(self) -> None:
        self.num_issued = 0  # the last id
        self.num_failed = 0
        self.in_flight: dict[int, TransferOrder] = {}
        self._of: dict[
            int, dict[int, TransferOrder]
        ] = {}  # the same by the number of their session; no session without an order
        self._reported: deque[tuple[list[int], bool]] = deque()  # ids that have ended, and whether they were run

    def issue(self, kind: TransferKind, source: int, destination: int, owner: SessionState, tenant: int) -> TransferOrder:
        self.num_issued += 1
        order = self.in_flight[self.num_issued] = TransferOrder(self.num_issued, kind, source, destination, owner, tenant)
        self._of.setdefault(owner.number, {})[self.num_issued] = order
        return order

    def list_orders(self, owner: SessionState) -> list[TransferOrder]:
        """The transfers that the session has in flight, oldest first."""
        return list(self._of.get(owner.number, {}).values())

    def ends(self, kind: TransferKind) -> tuple[Int32Array, Int32Array]:
        """Sources and destinations of the orders of one kind in flight; for audits."""
        orders = [order for order in self.in_flight.values() if order.kind is kind]
        return np.array([o.source for o in orders], np.int32), np.array([o.destination for o in orders], np.int32)

    def check_report(self, owner: SessionState, completed: Int64Array, failed: Int64Array) -> None:
        """Raises InvalidField for an id that was never issued to this session, or an order both completed and failed."""
        own = self._of.get(owner.number, {}).keys()
        for field_name, ids in (("completed_transfer_ids", completed), ("failed_transfer_ids", failed)):
            is_unknown = len(ids) > 0 and not 1 <= int(ids.min()) <= int(ids.max()) <= self.num_issued
            # Set operations: thousands of ids take microseconds.
            if is_unknown or not self.in_flight.keys().isdisjoint(set(ids.tolist()) - own):
                raise InvalidField("no such transfer order was issued to this session", field=field_name)
        if len(failed) and not own.isdisjoint(np.intersect1d(completed, failed).tolist()):
            raise InvalidField("an order is completed or failed, not both", field="failed_transfer_ids")

    def add_report(self, completed: Int64Array, failed: Int64Array) -> None:
        """Orders have ended, as check_report allows; `take_reported_orders` hands them out."""
        for ids, ok in ((completed, True), (failed, False)):
            if len(ids):
                self._reported.append((ids.tolist(), ok))

    def take_reported_orders(self, max_orders: int) -> tuple[list[TransferOrder], bool] | None:
        """Takes at most so many orders of the oldest report out of flight. Returns them, and whether they were run."""
        if not self._reported:
            return None
        ids, ok = self._reported[0]
        first, left = ids[:max_orders], ids[max_orders:]
        if left:
            self._reported[0] = left, ok
        else:
            self._reported.popleft()
        return self.take_orders(first), ok

    @property
    def has_reported(self) -> bool:
        """Whether something has ended and is not handed out yet."""
        return bool(self._reported)

    def reported_ids(self) -> set[int]:
        """What has ended and is not handed out yet; for audits."""
        return {order_id for ids, _ in self._reported for order_id in ids}.intersection(self.in_flight)

    def are_by_owner(self) -> bool:
        """Whether the records by session equal the transfers in flight; for audits."""
        known = {order_id: order for orders in self._of.values() for order_id, order in orders.items()}
        return known == self.in_flight and all(self._of.values())

    def take_orders(self, ids: Iterable[int]) -> list[TransferOrder]:
        """The orders of these ids that are still in flight, which they are no more."""
        orders = [self.in_flight.pop(order_id) for order_id in ids if order_id in self.in_flight]
        for order in orders:
            of_owner = self._of[order.owner.number]
            del of_owner[order.id]
            if not of_owner:
                del self._of[order.owner.number]
        return orders
