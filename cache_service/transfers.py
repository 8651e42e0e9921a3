"""Transfer orders in flight: who was told to move what, and who waits for it.

Owns the ids, which grow over the life of a pool, and the orders that are neither completed nor failed yet. Rules: an order
ends once, so a repeated report of its end changes nothing; a session reports its own orders only; a report is checked whole
before anything of it counts. Does not know what an order's end means for blocks and sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cache_service.errors import InvalidField
from cache_service.owner import Owner
from cache_service.types import Int32Array, Int64Array, SequenceState, TransferKind


@dataclass(slots=True, eq=False)
class Move:
    """A sequence on its way between the tiers.

    towards: SWAPPED, which ends with its last order, or LOADING, which is concluded in its session's next call. hit_len: of a
    start, else None.
    """

    slot: int
    owner: Owner
    towards: SequenceState
    hit_len: int | None = None
    num_pending: int = 0  # orders it still waits for
    failed_idx: int | None = None  # least table index whose order failed
    is_over: bool = False  # finished, or its sequence was released


@dataclass(slots=True, eq=False)
class Order:
    """Copies one whole block between the tiers. root: whose tokens; waiters: moves, and the table index that each is for."""

    id: int
    kind: TransferKind
    source: int
    destination: int
    owner: Owner
    root: int
    waiters: list[tuple[Move, int]] = field(default_factory=list)

    def add_waiter(self, move: Move, table_idx: int) -> None:
        self.waiters.append((move, table_idx))
        move.num_pending += 1


class Transfers:
    """See the module."""

    def __init__(self) -> None:
        self.num_issued = 0  # the last id
        self.num_failed = 0
        self.in_flight: dict[int, Order] = {}

    def issue(self, kind: TransferKind, source: int, destination: int, owner: Owner, root: int) -> Order:
        self.num_issued += 1
        order = self.in_flight[self.num_issued] = Order(self.num_issued, kind, source, destination, owner, root)
        return order

    def of(self, owner: Owner) -> list[Order]:
        """What the session has in flight, eldest first."""
        return [order for order in self.in_flight.values() if order.owner is owner]

    def ends(self, kind: TransferKind) -> tuple[Int32Array, Int32Array]:
        """Sources and destinations of the orders of one kind in flight; for audits."""
        orders = [order for order in self.in_flight.values() if order.kind is kind]
        return np.array([o.source for o in orders], np.int32), np.array([o.destination for o in orders], np.int32)

    def check_report(self, owner: Owner, completed: Int64Array, failed: Int64Array) -> None:
        """Raises InvalidField for an id that was never issued to this session, or an order both completed and failed."""
        for field_name, ids in (("completed_transfer_ids", completed), ("failed_transfer_ids", failed)):
            for order_id in ids.tolist():
                order = self.in_flight.get(order_id)
                if not 1 <= order_id <= self.num_issued or (order is not None and order.owner is not owner):
                    raise InvalidField("no such transfer order was issued to this session", field=field_name)
        if len(failed) and any(order_id in self.in_flight for order_id in np.intersect1d(completed, failed).tolist()):
            raise InvalidField("an order is completed or failed, not both", field="failed_transfer_ids")

    def take(self, ids: Iterable[int]) -> list[Order]:
        """The orders of these ids that are still in flight, which they are no more."""
        found = (self.in_flight.pop(order_id, None) for order_id in ids)
        return [order for order in found if order is not None]
