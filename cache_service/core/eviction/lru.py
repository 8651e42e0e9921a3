"""Least recently used first: one queue.

Leaves before parents: a parent is held for as long as a child is, and becomes evictable with it or later.
"""

from ..values.types import Int32Array
from .block_queue import BlockQueue, Stamps, Sweeper
from .policy import Order, Use


class LruPolicy:
    """An EvictionPolicy that evicts the block first that became evictable first."""

    wants_uses = False

    def __init__(self, num_blocks: int) -> None:
        self._stamps = Stamps(num_blocks)
        self._queue = BlockQueue(self._stamps)
        self._sweeper = Sweeper()

    def use(self, use: Use) -> None:
        """Nothing: only the order of releases matters."""

    def add(self, blocks: Int32Array) -> None:
        self._queue.push(blocks, self._stamps.give(blocks))
        self._sweeper.pay(len(blocks), [self._queue])

    def hit(self, blocks: Int32Array, *, is_found: bool = True) -> None:
        self._stamps.end_waits(blocks)

    def note_cut(self, blocks: Int32Array, num_lost: int) -> None:
        """Nothing: no hit is counted."""

    def forget_blocks(self, blocks: Int32Array) -> None:
        self._stamps.end_waits(blocks)

    def take_victims(self, count: int) -> Int32Array:
        victims = self._queue.pop(count)
        assert len(victims) == count, "asked for more victims than are evictable"
        self._stamps.end_waits(victims)
        return victims

    def prepare(self) -> None:
        """Nothing was put off."""

    def order(self) -> Order:
        return Order(self._stamps, self._queue.rows(), self._stamps.clock)
