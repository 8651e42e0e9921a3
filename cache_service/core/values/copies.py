"""Block copies, transfers and orders of the tiers below the host: what the core asks others to run."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from .types import NO_INT32, Int32Array

NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class Copies:
    """Transfers, then block copies, to be run in order, before any write that the same call allows."""

    sources: Int32Array
    destinations: Int32Array
    transfer_kinds: Int32Array = field(default_factory=lambda: NO_INT32)
    transfer_sources: Int32Array = field(default_factory=lambda: NO_INT32)
    transfer_destinations: Int32Array = field(default_factory=lambda: NO_INT32)

    def __len__(self) -> int:
        """Blocks to be copied."""
        return len(self.sources) + len(self.transfer_kinds)


class TierResult(IntEnum):
    """How one order ended."""

    DONE = 1
    DAMAGED = 2  # the place does not hold what the order names: nothing was read that counts
    FAILED = 3  # the tier refused, or gave or took less than a block
    CANCELLED = 4  # it was not begun
    MISSING = 5  # a shared store has no such block any more


class TierOrder(NamedTuple):
    """Moves one whole block between a tier asked by name and a block of the host tier.

    slot: of a slab; 0 in a shared store. name, parent: of the content and of what leads to it, NAME_BYTES each. tokens: of the
    block, LE32. number: grows with each store. era: counts how often the tier was cleared. group: of layers, and entry: of the
    prompt's table, where there are several. block_name and parent_block_name: of stores, as clients see them; empty for blocks
    of another group than the first.
    """

    slot: int
    host: int
    name: bytes
    parent: bytes
    tokens: bytes
    number: int
    era: int
    group: int = 0
    entry: int = 0
    block_name: bytes = b""
    parent_block_name: bytes = b""


class Content(NamedTuple):
    """What a shared store was heard to have. The names of blocks and the tokens are empty where it is not reported."""

    name: bytes
    block_name: bytes = b""
    parent_block_name: bytes = b""
    tokens: bytes = b""


class StoredBlock(NamedTuple):
    """What an earlier run has left in a slot. block_name, parent_block_name and tokens as in the order that stored it."""

    slot: int
    name: bytes
    number: int
    block_name: bytes = b""
    parent_block_name: bytes = b""
    tokens: bytes = b""
