"""Whether another sequence is computing, right now, the prefix that a waiting sequence is about to compute too.

Looked up when a start asks for it: the running sequences whose next block is the one wanted are found by one comparison of
columns, which all starts of a step share, and a pool in which no start asks pays nothing. Rules: a sequence counts only while
it is still to publish the block: a step under way computes it, or it is committed and waits for a copy. One that idles on what
it was granted once does not count. A start has to wait only a bounded number of times without progress, so that it never
depends on other sequences for good.
"""

from collections.abc import Mapping

import numpy as np

from ..pool_state import PoolState
from ..sequences.sequence_table import SequenceTable
from ..sequences.session_state import SessionState
from ..values.types import Int32Array, Int64Array
from .prefix_lookup import PrefixLookup

MOST_WAITS = 64  # replies in a row, between which the cached prefix has not grown
_STEPS_TO_COMMIT = 2  # with the second step after it, all that a step computed has completed and may be committed


class NextBlocks:
    """The blocks at one place that running sequences have and do not publish yet.

    later: slots of those that started since, by root and block, whether they have it to share or not.
    """

    def __init__(self, seqs: SequenceTable, start: int, slots: Int64Array, lens: Int64Array) -> None:
        """start: tokens before the block. slots [n], lens [n]: sequences that have it, and tokens they may share."""
        self._slots, self._lens, self._roots = slots, lens, seqs.roots[slots]
        self._blocks = seqs.tokens.rows(slots)[slots, start : start + seqs.block_size]
        self._firsts = self._blocks[:, 0].copy()
        self._first_tokens = frozenset(self._firsts.tolist())
        self.later: dict[tuple[int, bytes], list[int]] = {}

    def find(self, root: int, block: Int32Array) -> list[tuple[int, int]]:
        """(slot, tokens whose blocks may be shared) of each sequence with this block."""
        if int(block[0]) not in self._first_tokens:  # most prompts begin as none of those that run
            return []
        at = ((self._firsts == block[0]) & (self._roots == root)).nonzero()[0]
        at = at[(self._blocks[at] == block).all(1)]
        return list(zip(self._slots[at].tolist(), self._lens[at].tolist(), strict=True))


class InflightPrefixes:
    """The prefixes of one pool that running sequences are about to publish."""

    def __init__(self, state: PoolState, lookup: PrefixLookup) -> None:
        self._sequences = state.sequences
        self._publisher = state.publisher
        self._lookup = lookup
        self._next_blocks: dict[int, NextBlocks] = {}  # by the tokens before them, while the starts of a step go on

    def begin_starts(self) -> None:
        """A step is about to start sequences: whatever ran before has changed."""
        self._next_blocks.clear()

    def note_started(self, slot: int) -> None:
        """A sequence runs since the last one was looked up, of the same step."""
        seqs, size = self._sequences, self._sequences.block_size
        root, tokens = int(seqs.roots[slot]), seqs.tokens.rows(slot)[slot]
        for start, blocks in self._next_blocks.items():
            blocks.later.setdefault((root, tokens[start : start + size].tobytes()), []).append(slot)

    def length_to_come(self, slot: int, max_hit: int, owners: Mapping[int, SessionState]) -> int:
        """Tokens, whole blocks, that the waiting sequence could hit once a running one has committed what it was granted.

        0 where that is no more than it could hit now, with max_hit as the most that it takes, or where it has waited long
        enough. owners: by number, those whose sessions live; others will commit no more.
        """
        seqs, size = self._sequences, self._sequences.block_size
        start = len(self._lookup.match_sequence(slot, max_hit)) * size
        end = min(min(max_hit, int(seqs.num_tokens[slot]) - 1) // size, int(seqs.share_limits[slot])) * size
        if end <= start or not self._lookup.is_on:
            return 0
        num_waits = 0 if start > seqs.waited_len[slot] else int(seqs.num_waits[slot])  # 0: what it waited for has come
        if num_waits >= MOST_WAITS:
            return 0
        longest, unit = 0, size * seqs.new_entries.common_period
        if start not in self._next_blocks:
            self._next_blocks[start] = NextBlocks(seqs, start, *self._behind(start, seqs.running_slots()))
        root, next_block = int(seqs.roots[slot]), seqs.tokens.known(slot)[start : start + size]
        rivals = self._next_blocks[start].find(root, next_block)
        if (later := self._next_blocks[start].later.get((root, next_block.tobytes()))) is not None:
            rivals += NextBlocks(seqs, start, *self._behind(start, np.array(later))).find(root, next_block)
        for rival, length in rivals:
            owner = owners.get(int(seqs.owners[rival]))
            if owner is None or not self._will_publish(owner, rival, length):
                continue
            known = min(length, end)
            differ = np.flatnonzero(seqs.tokens.rows(rival)[rival, :known] != seqs.tokens.known(slot)[:known])
            num_common = (int(differ[0]) if len(differ) else known) // unit * unit
            longest = max(longest, num_common)
        if longest <= start or longest < self._lookup.min_tokens:
            return 0
        seqs.note_wait(slot, start, num_waits + 1)
        return longest

    def _behind(self, start: int, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Those of these running sequences with a whole block at `start` that is not published, and tokens that may be shared.

        What a sequence has published is in the match already, so most running sequences are left out by one comparison.
        """
        seqs, size = self._sequences, self._sequences.block_size
        num_hit = seqs.num_published[slots] * size
        if seqs.has_states:  # what is published behind the last checkpoint is no hit yet
            unit = size * seqs.new_entries.common_period
            num_hit = num_hit // unit * unit
        slots = slots[num_hit <= max(start, self._lookup.min_tokens)]
        lens = np.minimum(seqs.num_tokens[slots], seqs.num_reserved[slots])
        lens = np.minimum(lens, seqs.share_limits[slots].astype(np.int64) * size)
        is_long = lens >= start + size
        return slots[is_long], lens[is_long]

    def _will_publish(self, owner: SessionState, rival: int, length: int) -> bool:
        """Whether so many tokens of the running sequence are to be expected in the index.

        One-item calls do not say which work is under way: tokens granted with them may be committed any time.
        """
        seqs = self._sequences
        if seqs.num_committed[rival] >= length:
            return self._publisher.is_noted(rival)
        return owner.is_one_item or owner.step_id - int(seqs.last_reserve_step[rival]) < _STEPS_TO_COMMIT
