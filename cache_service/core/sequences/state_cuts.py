"""Cuts of sequences whose layers have states: where the states behind a length still are.

A table entry of a group of states holds those behind the last token of its block that is computed. So the states behind L
tokens are there in two cases: L tokens are committed and no more is reserved, so that no step has gone further; or L ends a
block, all of it committed, whose entry is there in each group of states. A cut to any other length keeps less committed than it
was asked for, down to 0. Where windows of other groups have moved on, the length must be one that reads nothing which they left
behind. Changes nothing.
"""

import numpy as np

from .sequence_table import SequenceTable


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
        are_there &= seqs.group_table(slot, group)[:num_blocks] > 0
    for group in entries.window_groups:
        end = int(seqs.group_hole_ends[slot, group])
        if end:
            least = seqs.group_spans[group].least_position(end * seqs.block_size)
            are_there[: seqs.num_blocks(least) - 1] = False  # entry i ends i + 1 blocks
    found = are_there.nonzero()[0]
    return (int(found[-1]) + 1) * seqs.block_size if len(found) else 0
