"""What the pool and an eviction policy say to each other.

Rule for every policy: leaves before parents. Evicting a block makes all that is cached below it unreachable, so a policy
that took a parent first would waste its children. Each file says why its order has that property by construction; none walks
the tree. What they build on: a sequence that names a block names its ancestors, and blocks become evictable deepest first.
Retention alone lets a parent go before its children; if it is evicted first, the index forgets them with it.
"""

from dataclasses import dataclass
from typing import Protocol

from ..values.types import Int32Array


@dataclass(frozen=True, slots=True)
class Use:
    """A sequence that ends, as far as the index knows its blocks.

    blocks [n] from the root down, still held; tokens [n * block size], theirs; root of the tenant's tree.
    """

    blocks: Int32Array
    tokens: Int32Array
    root: int
    priority: int
    num_blocks: int  # of its whole table


class EvictionPolicy(Protocol):
    """Orders the evictable blocks. Told of every block that becomes evictable, and of every one that is no longer."""

    wants_uses: bool  # whether `use` does anything: finding out what to tell it costs a look at the tokens

    def use(self, use: Use) -> None:
        """A sequence is about to let these blocks go."""

    def add(self, blocks: Int32Array) -> None:
        """These became evictable now, leaves before parents."""

    def hit(self, blocks: Int32Array) -> None:
        """These evictable blocks are about to be held again."""

    def forget_blocks(self, blocks: Int32Array) -> None:
        """These lost their index entry, but not by `take`."""

    def take_victims(self, count: int) -> Int32Array:
        """The first count victims (the pool has at least so many), which are evictable no more."""

    def prepare(self) -> None:
        """Nobody waits for an answer now: what was put off may be done, as much as a step may be late."""

    def waiting(self) -> Int32Array:
        """All evictable blocks, in the order of eviction as far as that is fixed; for audits."""
