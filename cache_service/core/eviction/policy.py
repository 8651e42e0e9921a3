"""The interface between the pool and an eviction policy.

Rule for every policy: leaves before parents. Evicting a block makes all cached blocks below it unreachable, so a policy that
took a parent first would waste its children. Each policy's file says why its order has that property by construction; none
walks the tree. Policies rely on two facts: a sequence that names a block names its ancestors, and blocks become evictable
deepest first. Only under retention may a parent become evictable before its children; if it is evicted first, the index forgets
them with it.
"""

from dataclasses import dataclass, field
from typing import Protocol

from ..values.types import NO_INT32, NO_INT64, Int32Array, Int64Array
from .block_queue import Entries, Stamps


@dataclass(frozen=True, slots=True)
class Use:
    """The indexed blocks of a sequence that ends.

    blocks [n] from the root down, still held; tokens [n * block size] of these blocks; root: a number of its scope alone.
    beside [m]: indexed blocks of other groups of layers, and of a partial node, which share the past of the blocks at the
    places [m]. above [m]: the block that goes after each; the states of one place are a chain, as one of them is of no use
    without the others. States that the sequence has left behind may wait. All of it stays as it is.
    """

    blocks: Int32Array
    tokens: Int32Array
    root: int
    priority: int
    num_blocks: int  # of its whole table
    beside: Int32Array = field(default_factory=lambda: NO_INT32)
    places: Int64Array = field(default_factory=lambda: NO_INT64)
    above: Int32Array = field(default_factory=lambda: NO_INT32)


@dataclass(frozen=True, slots=True)
class Order:
    """The evictable blocks of a moment, as their policy has them; those that still wait are each in it once.

    stamps: of the policy, and clock: their clock at that moment. A block whose stamp is 1 to clock has waited since then.
    rows: where stale entries do not count.
    """

    stamps: Stamps
    rows: list[Entries]
    clock: int


class EvictionPolicy(Protocol):
    """Orders the evictable blocks. It is notified of each block that becomes evictable or ceases to be."""

    wants_uses: bool  # whether `use` does anything: its argument costs a look at the tokens

    def use(self, use: Use) -> None:
        """A sequence is about to release these blocks."""

    def add(self, blocks: Int32Array) -> None:
        """These blocks became evictable now, leaves before parents."""

    def hit(self, blocks: Int32Array, *, is_found: bool = True) -> None:
        """These evictable blocks are about to be held again. is_found: which saves computing them; else it was done twice."""

    def note_cut(self, blocks: Int32Array, num_lost: int) -> None:
        """A sequence starts in front of these cached blocks, from the root down, as the states that a hit reads are missing.

        The first num_lost would be found but for evictions.
        """

    def forget_blocks(self, blocks: Int32Array) -> None:
        """These blocks lost their index entry, but not by `take_victims`."""

    def take_victims(self, count: int) -> Int32Array:
        """The first count victims, which are no longer evictable. Needs count evictable blocks."""

    def prepare(self) -> None:
        """Does work that was put off. Called when no reply waits; it may take as long as a step may be late."""

    def order(self) -> "Order":
        """What it knows of the evictable blocks, for audits."""
