"""Pins: cached prefixes that are kept from eviction without a sequence, for a time.

Owns the session, blocks and deadline of each pin. Rules: a pin holds its blocks as a table does, from the root down without a
gap, so that no block above a held block is evicted before it; of the other groups of layers it holds what a hit of that length
reads; all pins together hold at most half the pool, and those of a tenant at most its quota; a pin ends at its deadline, with
its session, or where a sequence that runs alone could not go on beside it, so that a pin delays no sequence for ever. Ids and
time come from the caller. Does not know tokens or the index.
"""

from dataclasses import dataclass

import numpy as np

from ..values.types import Int32Array, SessionId
from .block_pool import BlockPool

MAX_PINS = 4096
MIN_PIN_TTL = 0.001  # seconds
MAX_PIN_TTL = 86_400.0
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix: blocks [n], the first num_entries from the root down. It lives while now < deadline.

    Behind them stand the blocks of the other groups of layers. tenant: whose they are.
    """

    owner: SessionId
    tenant: int
    blocks: Int32Array
    deadline: float
    num_entries: int


class Pins:
    """The pins of one pool, and the number of pins that hold each block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[str, Pin] = {}
        self._soonest = _NEVER  # no deadline is before this
        self.max_blocks = (pool.num_blocks - 1) // 2
        self.num_blocks = 0  # distinct blocks that pins hold
        self.counts = pool.pin_counts  # pins that hold each block

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, pin_id: str) -> Pin | None:
        return self._pins.get(pin_id)

    def live(self) -> list[Pin]:
        return list(self._pins.values())

    def room(self, tenant: int) -> int:
        """How many more blocks pins of this tenant may hold; a block that another pin holds takes no room."""
        return min(self.max_blocks - self.num_blocks, self._pool.limits.room_for_pins(tenant))

    def fitting(self, tenant: int, blocks: Int32Array) -> Int32Array:
        """The leading blocks of a tenant's prefix that pins have room for."""
        taken = np.cumsum(self.counts[blocks] == 0)
        return blocks[: int(np.searchsorted(taken, self.room(tenant), "right"))]

    def num_above(self, tenant: int, blocks: Int32Array) -> int:
        """How many of a tenant's distinct blocks pins have no room for; 0 or less where all fit."""
        return self.num_new(blocks) - self.room(tenant)

    def num_new(self, blocks: Int32Array) -> int:
        """How many of these distinct blocks no pin holds yet."""
        return int(np.count_nonzero(self.counts[blocks] == 0))

    def add(self, pin_id: str, pin: Pin) -> None:
        """Pins indexed blocks, all of which fit."""
        assert pin_id not in self._pins, "a pin id is drawn once"
        num_new = self.num_new(pin.blocks)
        self.num_blocks += num_new
        self._pool.limits.count_pinned(pin.tenant, num_new)
        self._pool.pin(pin.blocks)
        self._pins[pin_id] = pin
        self._soonest = min(self._soonest, pin.deadline)

    def end_pin(self, pin_id: str) -> None:
        pin = self._pins.pop(pin_id)
        num_freed = int(np.count_nonzero(self.counts[pin.blocks] == 1))
        self.num_blocks -= num_freed
        self._pool.limits.count_pinned(pin.tenant, -num_freed)
        self._pool.unpin(pin.blocks[::-1])  # no step reads through a pin, so nothing is fenced

    def end_pins(self, owner: SessionId) -> None:
        """Ends the pins of a session that is over."""
        self._end_pins([pin_id for pin_id, pin in self._pins.items() if pin.owner == owner])

    def clear(self) -> None:
        """Ends all pins, because the blocks that they keep are about to be forgotten."""
        self._end_pins(list(self._pins))

    def expire(self, now: float) -> int:
        """Ends the pins whose deadline has passed. Returns how many."""
        if now < self._soonest:
            return 0
        over = [pin_id for pin_id in self._by_deadline() if self._pins[pin_id].deadline <= now]
        self._end_pins(over)
        self._soonest = min((pin.deadline for pin in self._pins.values()), default=_NEVER)
        return len(over)

    def could_give_way(self, num_short: int, besides: Int32Array) -> bool:
        """Whether ending pins would make num_short blocks available, not counting `besides`."""
        pool = self._pool
        alone = (self.counts > 0) & (self.counts == pool.ref_counts) & ((pool.fence_counts | pool.busy_counts) == 0)
        alone[besides] = False
        return int(np.count_nonzero(alone)) >= num_short

    def give_way(self, num_short: int, besides: Int32Array) -> None:
        """Ends pins, the soonest deadline first, until num_short more blocks are available. Needs could_give_way."""
        pool = self._pool
        wanted = pool.num_available - pool.num_revived(besides) + num_short
        for pin_id in self._by_deadline():
            if pool.num_available - pool.num_revived(besides) >= wanted:
                break
            self.end_pin(pin_id)

    def _end_pins(self, pin_ids: list[str]) -> None:
        for pin_id in pin_ids:
            self.end_pin(pin_id)

    def _by_deadline(self) -> list[str]:
        return sorted(self._pins, key=lambda pin_id: self._pins[pin_id].deadline)
