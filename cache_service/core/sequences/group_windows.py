"""Groups of layers: what the windows of a sequence's groups leave behind, and giving those blocks back.

A pool may hold K and V of several groups of layers, each of which has a table of every sequence (SequenceTable). The first
group reads all tokens. In a group with a window or with chunks a token reads from the first one of its span on (ReadSpan). So
with L committed tokens nothing before the first one that position L reads is read again. A block wholly before it is dropped:
its entry becomes a hole, and all behind it keeps its place. Holes are a run from the first entry to
SequenceTable.group_hole_ends. What is dropped may stay cached, for hits that end there. No sequence is cut to a length whose
next token reads into its holes.

A group of states reads the entry of the token before, and what is before that is dropped but for its checkpoints, whose entries
stay. Any other entry of it may be a hole from the beginning (new_entries.py), and a cut to any length is lawful: state_cuts.py
says how much of the sequence it leaves committed.

Where the groups behind the first are a tail (PoolConfig.has_tail), they are finer copies of what the first group has. Then
their holes may begin nowhere and end anywhere: a hit takes what is there behind the last gap, and a sequence may be cut to any
length.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ..blocks.block_pool import BlockPool
from ..values.errors import InvalidField, NotImplementedYet
from ..values.kv_spec import WHOLE, ReadSpan, first_reads
from ..values.types import Int64Array, SequenceState
from .new_entries import NewEntries
from .publisher import Publisher
from .sequence_table import SequenceTable
from .session_state import SessionState, TableUpdates


class WindowHoles(NamedTuple):
    """What the windows of one sequence's groups have left behind: spans [groups] and table indices [groups]."""

    spans: tuple[ReadSpan, ...]
    ends: tuple[int, ...]
    is_tail: bool = False
    entries: NewEntries | None = None  # where groups have states

    def after_commit(self, num_committed: int, block_size: int) -> "WindowHoles":
        """The holes once so many tokens are committed."""
        if len(self.spans) == 1:
            return self
        ends = (max(end, span.first(num_committed) // block_size) for span, end in zip(self.spans, self.ends, strict=True))
        return self._replace(ends=tuple(ends))

    def check_cut(self, field: str, num_tokens: int, block_size: int) -> None:
        """Raises InvalidField where a sequence of num_tokens would read what is left behind; its limit is the least length."""
        if self.is_tail or self.entries is not None or not any(self.ends):
            return
        limit = max(span.least_position(end * block_size) for span, end in zip(self.spans, self.ends, strict=True) if end)
        if num_tokens < limit:
            text = f"the window of a group of layers has moved on, so keep {limit} tokens or more"
            raise InvalidField(text, field=field, limit=limit)

    def check_fits(self, field: str, num_tokens: int, sequences: SequenceTable) -> None:
        """Raises InvalidField for a length whose blocks of all groups no pool of this size can hold at once."""
        num_groups = len(self.spans)
        if num_groups == 1:
            return
        if self.entries is not None:
            num_blocks = self._most_entries(self.entries, sequences)
        else:
            num_blocks = (sequences.most_held_blocks + sum(self.ends)) // num_groups
        if sequences.num_blocks(num_tokens) > num_blocks:
            limit = num_blocks * sequences.block_size
            raise InvalidField(f"{field}: the pool cannot hold {num_tokens} tokens at once", field=field, limit=limit)

    def _most_entries(self, entries: NewEntries, sequences: SequenceTable) -> int:
        """Most entries of which all that is kept behind the holes fits the pool; of states those before may be there, too."""

        def num_blocks(num_entries: int) -> int:
            dense = (0, *entries.window_groups)
            num_held = sum(max(num_entries - self.ends[group], 0) for group in dense)
            for group in entries.state_groups:
                num_held += max(num_entries // entries.periods[group] - self.ends[group] // entries.periods[group], 0)
            return num_held

        return bisect_right(range(sequences.max_blocks + 1), sequences.most_held_blocks, key=num_blocks) - 1


def window_holes(sequences: SequenceTable, slot: int) -> WindowHoles:
    if sequences.num_groups == 1:
        return _NO_HOLES
    entries = sequences.new_entries if sequences.has_states else None
    return WindowHoles(sequences.group_spans, tuple(sequences.group_hole_ends[slot].tolist()), sequences.has_tail, entries)


def refuse_retention(group_spans: tuple[ReadSpan, ...]) -> None:
    """Raises NotImplementedYet in a pool of several groups of layers: a layer with a window of its own reads no sink."""
    if len(group_spans) > 1:
        raise NotImplementedYet("retention with several groups of layers, whose windows read no sink", feature="layer_groups")


class GroupWindows:
    """Gives back the blocks that the windows of one pool's groups have left behind."""

    def __init__(self, sequences: SequenceTable, publisher: Publisher, pool: BlockPool) -> None:
        self._sequences = sequences
        self._publisher = publisher
        self._pool = pool

    def drop_outside(self, owner: SessionState, slots: Int64Array) -> None:
        """Drops what is wholly before each window, as the committed lengths have it now; the reply, not written yet, tells.

        The blocks wait for the steps that were told of them. What may be shared of them is published first.
        """
        seqs, size = self._sequences, self._sequences.block_size
        slots = slots[seqs.states[slots] == SequenceState.RUNNING]
        ends = first_reads(seqs.group_spans, seqs.num_committed[slots]) // size
        rows, groups = (ends > seqs.group_hole_ends[slots]).nonzero()
        if not len(rows):
            return
        entries = seqs.new_entries
        if not entries.has_states or any(not entries.periods[group] for group in groups.tolist()):
            self._publisher.publish(told_now=owner)  # states that are dropped are never shared
        dropped, told_slots, told_places = [], [], []
        for row, group in zip(rows.tolist(), groups.tolist(), strict=True):
            slot, end = int(slots[row]), int(ends[row, group])
            first, start = group * seqs.max_blocks, int(seqs.group_hole_ends[slot, group])
            places = np.arange(first + start, first + end)[::-1]  # deepest first
            if entries.periods[group]:
                places = places[(seqs.tables[slot, places] > 0) & ~entries.are_checkpoints(group, places - first)]
            dropped.append(seqs.tables[slot, places])
            told_slots.append(np.full(len(places), slot))
            told_places.append(places)
            seqs.open_group_hole(slot, group, places, end)
        blocks, of = np.concatenate(dropped), np.concatenate(told_slots)
        holes = np.zeros(len(blocks), np.int32)
        owner.updates.append(TableUpdates(of, seqs.ids[of], np.concatenate(told_places).astype(np.int32), holes))
        owner.drop_blocks(self._pool, blocks, until=owner.step_id - 1)


_NO_HOLES = WindowHoles((WHOLE,), (0,))
