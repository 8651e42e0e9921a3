"""The notes that a step's operations leave for its reply, as lists, because they are short.

Owns nothing but these values.
"""

from dataclasses import dataclass, field

from ..tiers.transfers import TransferOrder
from ..values.types import NO_INT32, NULL_BLOCK, Int32Array, ItemResult, StartResult


@dataclass(slots=True)
class StepLog:
    """What a step returns to its engine: results of its items, orders and copies to run, and replaced table entries.

    ready: slots of sequences that run now without having been started.
    """

    forks: list[ItemResult] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)  # children that there was no slot for
    swap_outs: list[ItemResult] = field(default_factory=list)
    swap_ins: list[ItemResult] = field(default_factory=list)
    starts: list[StartResult] = field(default_factory=list)
    copy_sources: list[int] = field(default_factory=list)
    copy_destinations: list[int] = field(default_factory=list)
    update_ids: list[int] = field(default_factory=list)
    update_table_idx: list[int] = field(default_factory=list)
    update_blocks: list[int] = field(default_factory=list)
    orders: list[TransferOrder] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    computing_lens: dict[int, int] = field(default_factory=dict)  # slots with the result COMPUTING, and the lengths to come
    forked_lens: list[int] = field(default_factory=list)  # committed tokens of each fork, and of what each truncate left
    truncated_lens: list[int] = field(default_factory=list)

    def update(self, sequence_id: int, table_idx: int, block: int) -> None:
        """The entry at this place of a sequence's tables was replaced."""
        self.update_ids.append(sequence_id)
        self.update_table_idx.append(table_idx)
        self.update_blocks.append(block)

    def copy(self, sources: list[int], destinations: list[int]) -> None:
        """Blocks are to be copied."""
        self.copy_sources.extend(sources)
        self.copy_destinations.extend(destinations)

    def clear(self, blocks: list[int]) -> None:
        """Blocks are to be cleared: the null block, which holds zeros, is copied over them."""
        self.copy([NULL_BLOCK] * len(blocks), blocks)


@dataclass(slots=True)
class Grants:
    """Answer to reservations: slots granted [n]; new blocks [m], the item each belongs to [m], and its group of layers [m],
    empty where there is one."""

    reserved: Int32Array
    item_idx: Int32Array
    blocks: Int32Array
    groups: Int32Array = field(default_factory=lambda: NO_INT32)
