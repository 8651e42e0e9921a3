"""Spans: what of a sequence is still read, giving the other blocks back, and which cuts that allows.

With L committed tokens, nothing before the first token that position L reads is read again (ReadSpan). A table entry wholly
before it is dropped: it becomes a hole, the null block, and everything behind keeps its place. The holes of a group's table are
one run, which ends at SequenceTable.hole_ends. What is dropped stays dropped, and may stay cached. No sequence is cut to a
length whose next token reads into its holes. Retention and groups of layers differ only in where their spans come from.

Retention (StreamingLLM, Xiao et al., arXiv 2309.17453) is a sequence's own: the tokens below its sink and the last window of
committed ones are readable, to the token, in a pool with one group of layers. So a window of w committed tokens is a span of
w + 1, the token that reads included, and the holes begin behind the sink. It is never widened.

A group of layers behind the first has the span of its layers, and a table of its own. A group of states reads the entry of the
token before, and what is before that is dropped but for its checkpoints, whose entries stay. Any other entry of it may be a
hole from the beginning (new_entries.py). A table entry of such a group holds the states behind the last token of its block that
is computed. So the states behind L tokens are there in two cases: L tokens are committed and no more is reserved, so that no
step has gone further; or L ends a block, all of it committed, whose entry is there in each group of states. A sequence with
states may be cut to any length; where its states are not there, less is left committed than was asked for, down to 0.

Groups behind the first that are a tail (PoolConfig.has_tail) are finer copies of what the first group has. Then their holes may
end anywhere: a hit takes what is there behind the last gap, and a sequence may be cut to any length.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ..blocks.block_pool import BlockPool
from ..values.counters import Counters
from ..values.errors import InvalidField, NotImplementedYet
from ..values.kv_spec import WHOLE, ReadSpan, first_reads
from ..values.sequence_args import Retention
from ..values.types import Int32Array, Int64Array, SequenceState
from .new_entries import NewEntries
from .publisher import Publisher
from .sequence_table import SequenceTable
from .session_state import SessionState, TableUpdates


class Holes(NamedTuple):
    """The holes of one sequence: of each group its span, and the table index behind its last hole, 0 without one.

    first: table index of the first hole of the first group, which is behind the sink. entries: where groups have states.
    """

    spans: tuple[ReadSpan, ...] = (WHOLE,)
    ends: tuple[int, ...] = (0,)
    first: int = 0
    is_tail: bool = False
    entries: NewEntries | None = None

    def after_commit(self, num_committed: int, block_size: int) -> "Holes":
        """The holes once so many tokens are committed."""
        reads = [span.first(num_committed) // block_size for span in self.spans]
        reads[0] = reads[0] if reads[0] > self.first else 0
        return self._replace(ends=tuple(map(max, reads, self.ends)))

    def after_cut(self, num_tokens: int, block_size: int) -> "Holes":
        """The holes of the first num_tokens, a length that check_cut lets pass."""
        return self._replace(ends=(0, *self.ends[1:])) if num_tokens <= self.first * block_size else self

    def check_cut(self, field: str, num_tokens: int, block_size: int) -> None:
        """Raises InvalidField where a sequence of num_tokens would read what is dropped; its limit is the next length."""
        if self.is_tail or self.entries is not None or not any(self.ends):
            return
        least = max(span.least_position(end * block_size) for span, end in zip(self.spans, self.ends, strict=True) if end)
        most = self.first * block_size
        if most < num_tokens < least:
            text = f"the window has moved on, so keep {least} tokens or more" + (f", or up to {most}" if most else "")
            raise InvalidField(text, field=field, limit=least)

    def check_fits(self, field: str, num_tokens: int, sequences: SequenceTable) -> None:
        """Raises InvalidField for a length that no pool of this size can hold at once, in all groups, holes taken off."""
        if self.entries is not None:
            num_entries = self._most_entries(self.entries, sequences)
        else:
            num_holes = sum(self.ends) - min(self.first, self.ends[0])
            num_entries = (sequences.most_held_blocks + num_holes) // len(self.spans)
        if sequences.num_blocks(num_tokens) > num_entries:
            limit = num_entries * sequences.block_size
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


_NO_HOLES = Holes()


def find_holes(sequences: SequenceTable, slot: int) -> Holes:
    """The holes of the sequence in this slot."""
    window, spans = int(sequences.num_window[slot]), sequences.group_spans
    if not window and len(spans) == 1:
        return _NO_HOLES
    first = sequences.num_blocks(int(sequences.num_sink[slot]))
    entries = sequences.new_entries if sequences.has_states else None
    spans = (ReadSpan(window + 1), *spans[1:]) if window else spans
    return Holes(spans, tuple(sequences.tables.hole_ends[slot].tolist()), first, sequences.has_tail, entries)


class SpanDrops:
    """Gives back the blocks that fall outside the spans of one pool's sequences."""

    def __init__(self, sequences: SequenceTable, publisher: Publisher, pool: BlockPool, counters: Counters) -> None:
        self._sequences = sequences
        self._publisher = publisher
        self._pool = pool
        self._counters = counters

    def drop_outside(self, owner: SessionState, slots: Int64Array, *, in_reply: bool = True) -> None:
        """Drops the blocks wholly outside the spans of these sequences, as the committed lengths have it now.

        in_reply: the session's reply that is not written yet reports it; else its next one does. The blocks wait for the steps
        that may still read them. What may be shared of them is published first.
        """
        seqs, publisher = self._sequences, self._publisher
        slots = slots[seqs.states[slots] == SequenceState.RUNNING]
        starts, ends = self._due(slots)
        rows, groups = (ends > starts).nonzero()
        if not len(rows):
            return
        entries = seqs.new_entries
        if not entries.has_states or any(not entries.periods[group] for group in groups.tolist()):
            publisher.publish(reported_now=owner if in_reply else None)  # states that are dropped are never shared
        dropped, changed, changed_places = [], [], []
        for row, group in zip(rows.tolist(), groups.tolist(), strict=True):
            slot, first = int(slots[row]), group * seqs.max_blocks
            start, end = int(starts[row, group]), int(ends[row, group])
            places = np.arange(first + start, first + end)[::-1]  # deepest first
            places = places[seqs.tables.rows[slot, places] > 0]
            if entries.periods[group]:
                places = places[~entries.are_checkpoints(group, places - first)]
            dropped.append(seqs.tables.rows[slot, places])
            changed.append(np.full(len(places), slot))
            changed_places.append(places)
            seqs.tables.open_hole(slot, group, places, end)
            if not group:
                publisher.publish_at_most(slot, seqs.num_blocks(int(seqs.num_sink[slot])))
                self._counters.num_retention_dropped_blocks += len(places)
        blocks, of = np.concatenate(dropped), np.concatenate(changed)
        holes = np.zeros(len(blocks), np.int32)
        owner.updates.append(TableUpdates(of, seqs.ids[of], np.concatenate(changed_places).astype(np.int32), holes))
        owner.drop_blocks(self._pool, blocks, until=owner.step_id - in_reply)

    def _due(self, slots: Int64Array) -> tuple[Int32Array, Int32Array]:
        """[n, groups] the entries from a start up to an end that each table drops; none where an end is not above its start."""
        seqs, size = self._sequences, self._sequences.block_size
        starts, committed = seqs.tables.hole_ends[slots], seqs.num_committed[slots]
        ends = first_reads(seqs.group_spans, committed) // size
        if seqs.num_retaining:
            windows = seqs.num_window[slots]
            ends[:, 0] = np.where(windows > 0, committed - windows, 0) // size
            starts[:, 0] = np.maximum(starts[:, 0], -(-seqs.num_sink[slots] // size))
        return starts, ends


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


def refuse_retention(group_spans: tuple[ReadSpan, ...]) -> None:
    """Raises NotImplementedYet in a pool of several groups of layers: a layer with a window of its own reads no sink."""
    if len(group_spans) > 1:
        raise NotImplementedYet("retention with several groups of layers, whose windows read no sink", feature="layer_groups")


# Cuts of sequences whose layers have states


def fork_length(seqs: SequenceTable, parent: int, num_tokens: int) -> int:
    """The committed length of a child that has the parent's first num_tokens."""
    if not seqs.has_states:
        return num_tokens
    committed = int(seqs.num_committed[parent])
    if num_tokens == committed == seqs.num_reserved[parent]:
        return num_tokens
    return _last_states(seqs, parent, min(num_tokens, committed))


def truncated_length(seqs: SequenceTable, slot: int, num_tokens: int) -> int:
    """The most committed and reserved tokens of a sequence that is cut to num_tokens."""
    if not seqs.has_states or num_tokens >= seqs.num_reserved[slot]:
        return num_tokens
    return _last_states(seqs, slot, min(num_tokens, int(seqs.num_committed[slot])))


def can_leave(seqs: SequenceTable, slot: int) -> bool:
    """Whether a running sequence may leave the device: its states are not ahead of what is committed."""
    return not seqs.has_states or bool(seqs.num_reserved[slot] == seqs.num_committed[slot])


def _last_states(seqs: SequenceTable, slot: int, most: int) -> int:
    """The largest length of whole blocks, up to `most` committed tokens, whose states are in the table; 0 without one."""
    num_blocks, entries = most // seqs.block_size, seqs.new_entries
    are_there = np.ones(num_blocks, np.bool_)
    for group in entries.state_groups:
        are_there &= seqs.tables.get(slot, group)[:num_blocks] > 0
    for group in entries.window_groups:
        end = int(seqs.tables.hole_ends[slot, group])
        if end:
            least = seqs.group_spans[group].least_position(end * seqs.block_size)
            are_there[: seqs.num_blocks(least) - 1] = False  # entry i ends i + 1 blocks
    found = are_there.nonzero()[0]
    return (int(found[-1]) + 1) * seqs.block_size if len(found) else 0
