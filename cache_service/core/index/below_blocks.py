"""Which blocks the tiers below the host tier have, by the names that clients see: for events, and for counts of a match.

Owns what each tier has, as far as that is known here, and which block leads to which. A tier says what it gained and lost, and
owns its own places. Rules: a block is found by its name alone, so that a tier's blocks outlive the nodes of the index and the
tenants that are known to this run; what a tier has may be behind a block that no tier has. With several groups of layers the
blocks of the first stand for all. A change costs the same whatever is stored; the index's change log records it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ..values.kv_spec import BLOCK_NAME_BYTES
from ..values.types import Tier
from .prefix_index import PrefixIndex


class BelowBlock(NamedTuple):
    """A block below the host tier. tier: the nearest that has it. parent: a name. tokens: LE32."""

    tier: Tier
    parent: bytes
    tokens: bytes


class TierBlocks:
    """What one tier has."""

    def __init__(self, tier: Tier, index: PrefixIndex) -> None:
        self.tier = tier
        self._index = index
        self._blocks: dict[bytes, bytes] = {}  # by name: the parent's name and the tokens, in one object
        self._children: dict[bytes, bytes | dict[bytes, None]] = {}  # by the parent's name; of most there is one

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def find(self, name: bytes) -> BelowBlock | None:
        block = self._blocks.get(name)
        return None if block is None else BelowBlock(self.tier, block[:BLOCK_NAME_BYTES], block[BLOCK_NAME_BYTES:])

    def children(self, parent: bytes) -> Iterable[bytes]:
        """The names of the blocks behind a block of this name, or behind a tenant's root."""
        found = self._children.get(parent, ())
        return (found,) if isinstance(found, bytes) else found

    def gain(self, name: bytes, parent: bytes, tokens: bytes) -> None:
        """The tier has this block, perhaps since long. A block with an empty name is not reported."""
        if not name or name in self._blocks:
            return
        self._blocks[name] = parent + tokens
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = name
        elif isinstance(siblings, bytes):
            self._children[parent] = {siblings: None, name: None}
        else:
            siblings[name] = None
        if self._index.change_log is not None:
            self._index.change_log.below_changed(name)

    def lose(self, name: bytes) -> None:
        """The tier has it no more, if it had it."""
        block = self._blocks.pop(name, None)
        if block is None:
            return
        parent = block[:BLOCK_NAME_BYTES]
        siblings = self._children[parent]
        if isinstance(siblings, dict) and len(siblings) > 1:
            del siblings[name]
        else:
            del self._children[parent]
        if self._index.change_log is not None:
            self._index.change_log.below_changed(name)

    def clear(self) -> None:
        """The tier has nothing any more. One change, whatever it had."""
        self._blocks, self._children = {}, {}
        if self._index.change_log is not None:
            self._index.change_log.below_cleared()


class BelowBlocks:
    """What all tiers below the host tier of one pool have, the nearest tier first."""

    def __init__(self) -> None:
        self.tiers: list[TierBlocks] = []

    def find(self, name: bytes) -> BelowBlock | None:
        for tier in self.tiers:
            block = tier.find(name)
            if block is not None:
                return block
        return None

    def find_tier(self, name: bytes) -> Tier | None:
        """The nearest that has it."""
        return next((tier.tier for tier in self.tiers if name in tier), None)

    def children(self, parent: bytes) -> Iterable[bytes]:
        """See TierBlocks.children; what two tiers have comes twice."""
        return (name for tier in self.tiers for name in tier.children(parent))
