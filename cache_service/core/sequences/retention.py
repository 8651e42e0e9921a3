"""Retention sink + window: which tokens of a sequence stay readable, and giving the other blocks back.

Follows StreamingLLM (Xiao et al., arXiv 2309.17453). With L committed tokens, those below the sink and the last window of
them are readable, to the token. A block with no such token is dropped: its table entry becomes a hole, the null block, and
everything behind keeps its place, so that positions and the next append stay where they were. The holes of a sequence are one
run of table entries, from the first block wholly behind the sink up to SequenceTable.hole_ends. What is dropped stays dropped,
so retention is never widened, and no sequence is cut to a length whose window would reach into its holes.
"""

from typing import NamedTuple

import numpy as np

from ..blocks.block_pool import BlockPool
from ..values.counters import Counters
from ..values.errors import InvalidField
from ..values.sequence_args import Retention
from ..values.types import Int64Array, SequenceState
from .publisher import Publisher
from .sequence_table import SequenceTable
from .session_state import SessionState, TableUpdates


class DroppedSpan(NamedTuple):
    """What retention has dropped of one sequence: K and V of tokens [first, end). Without it num_window is 0."""

    num_window: int
    first: int
    end: int

    def after_commit(self, num_committed: int, block_size: int) -> "DroppedSpan":
        """The blocks that are dropped once so many tokens are committed."""
        end = (num_committed - self.num_window) // block_size * block_size
        return self._replace(end=end) if self.num_window and end > max(self.first, self.end) else self

    def cut(self, num_tokens: int) -> "DroppedSpan":
        """The same for a sequence of its first num_tokens, a length that check_cut lets pass."""
        return self._replace(end=0) if num_tokens <= self.first else self

    def check_fits(self, field: str, num_tokens: int, sequences: SequenceTable) -> None:
        """Raises InvalidField for a length that no pool of this size can hold at once, holes taken off."""
        num_holes = max(self.end - self.first, 0) // sequences.block_size
        limit = (sequences.most_held_blocks + num_holes) * sequences.block_size
        if num_tokens > limit:
            raise InvalidField(f"{field}: the pool cannot hold {num_tokens} tokens at once", field=field, limit=limit)

    def check_cut(self, field: str, num_tokens: int) -> None:
        """Raises InvalidField where a sequence of num_tokens would read dropped tokens; its limit is the next length."""
        if self.end > self.first < num_tokens < self.end + self.num_window:
            limit = self.end + self.num_window
            raise InvalidField(
                f"tokens {self.first} to {self.end - 1} are dropped, so keep up to {self.first} or {limit} and more",
                field=field,
                limit=limit,
            )


def dropped_span(sequences: SequenceTable, slot: int) -> DroppedSpan:
    size = sequences.block_size
    first = -(-int(sequences.num_sink[slot]) // size) * size
    return DroppedSpan(int(sequences.num_window[slot]), first, int(sequences.hole_ends[slot]) * size)


class RetentionDrops:
    """Gives back the blocks that fall outside the sink and window of one pool's sequences."""

    def __init__(self, sequences: SequenceTable, publisher: Publisher, pool: BlockPool, counters: Counters) -> None:
        self._sequences = sequences
        self._publisher = publisher
        self._pool = pool
        self._counters = counters

    def drop_outside(self, owner: SessionState, slots: Int64Array, *, told_now: bool) -> None:
        """Drops the blocks wholly outside sink and window, as the committed lengths have it now.

        told_now: the reply that tells is not written yet; else the session hears of it in its next one. The blocks wait for
        the steps that were told of them. What may be shared of them is published first.
        """
        seqs, size = self._sequences, self._sequences.block_size
        slots = slots[(seqs.num_window[slots] > 0) & (seqs.states[slots] == SequenceState.RUNNING)]
        firsts, ends = -(-seqs.num_sink[slots] // size), (seqs.num_committed[slots] - seqs.num_window[slots]) // size
        due = np.flatnonzero(ends > np.maximum(firsts, seqs.hole_ends[slots]))
        if not len(due):
            return
        self._publisher.publish(told_now=owner if told_now else None)
        dropped, holes = [], []
        for slot, first, end in zip(slots[due].tolist(), firsts[due].tolist(), ends[due].tolist(), strict=True):
            start = max(first, int(seqs.hole_ends[slot]))
            places = start + np.flatnonzero(seqs.tables[slot, start:end])[::-1]  # deepest first
            dropped.append(seqs.tables[slot, places])
            holes.append((np.full(len(places), slot), places))
            seqs.open_hole(slot, places, end)
            self._publisher.publish_at_most(slot, first)
        blocks = np.concatenate(dropped)
        rows, table_idx = (np.concatenate(parts) for parts in zip(*holes, strict=True))
        owner.updates.append(TableUpdates(rows, seqs.ids[rows], table_idx, np.zeros(len(blocks), np.int32)))
        owner.drop_blocks(self._pool, blocks, until=owner.step_id - told_now)
        self._counters.num_retention_dropped_blocks += len(blocks)


def check_readable(retention: Retention | None, num_committed: int, first_token_idx: int, num_tokens: int) -> None:
    """Raises InvalidField for a token between sink and window. The range is one of committed tokens."""
    if retention is None or not num_tokens:
        return
    sink, window_start = retention.num_sink_tokens, num_committed - retention.num_window_tokens
    if window_start <= sink or first_token_idx >= window_start or first_token_idx + num_tokens <= sink:
        return
    readable = f"tokens below {sink} and from {window_start} on are readable"
    if first_token_idx < sink:
        raise InvalidField(readable, field="num_tokens", limit=sink - first_token_idx)
    raise InvalidField(readable, field="first_token_idx", limit=window_start)
