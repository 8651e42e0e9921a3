"""SequenceLifecycle: the items of a step that change running sequences: commit, fork, truncate, release.

Owns the changes and their rules: sharing by forks, fences on what is dropped (R6), all or nothing per item (R7). Every method
takes valid items and cannot fail. Committed blocks come to be shared by publisher.py. Does not know how items arrive or what
valid is.
"""

import numpy as np

from ..eviction import Use
from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..sequences.spans import fork_length, truncated_length
from ..tiers.sequence_swap import SequenceSwapper
from ..values.types import NO_INT32, NO_INT64, Int32Array, Int64Array, ReuseHint, SequenceState

_RUNNING = int(SequenceState.RUNNING)  # a member's look-up in its class costs more than the comparison


class SequenceLifecycle:
    """Changes the sequences of one pool."""

    def __init__(self, state: PoolState, swapper: SequenceSwapper | None) -> None:
        self._block_size = state.config.block_size
        self._clock = state.clock
        self._sequences = state.sequences
        self._pool = state.pool
        self._publisher = state.publisher
        self._spans = state.spans
        self._claims = state.claims
        self._counters = state.counters
        self._swapper = swapper
        self._reach, self._is_shared = state.reach, state.config.prefix_caching
        self._index, self._roots = state.index, state.index.roots
        self._ending_slot = -1  # the policy was notified of the end of its sequence, and a part of it was given back

    def commit(
        self,
        owner: SessionState,
        slots: Int64Array,
        lens: Int32Array,
        num_new: Int32Array,
        tokens: Int32Array,
        *,
        one_each: bool,
    ) -> None:
        """Appends num_new[i] of the concatenated tokens to each sequence and commits it up to lens[i]; not published yet.

        one_each: every num_new is 1.
        """
        seqs = self._sequences
        if len(tokens):
            seqs.append_tokens(slots, num_new, tokens, one_each=one_each)
        seqs.commit(slots, lens)
        self._publisher.note_commits(owner, slots)
        if seqs.may_have_holes:
            self._spans.drop_outside(owner, slots)

    def fork(self, parent: int, child_id: int, owner: SessionState, num_tokens: int) -> int:
        """Makes a child on the parent's first blocks and returns its slot; needs a free one.

        Where layers have states, less may be committed of it than num_tokens.
        """
        seqs = self._sequences
        num_kept = fork_length(seqs, parent, num_tokens)
        child = seqs.add_fork(parent, child_id, num_tokens, num_kept, self._clock.now)
        self._pool.acquire(seqs.tables.held(child))
        num_full = num_kept // self._block_size
        self._publisher.set_published(child, min(num_full, int(seqs.num_published[parent])), like=parent)
        owner.ids.add(child_id, child)
        self._counters.num_forks += 1
        return child

    def truncate(self, owner: SessionState, slot: int, num_tokens: int) -> None:
        """Cuts a sequence to its first num_tokens and gives up the blocks behind them.

        Where layers have states, less may be left committed and reserved.
        """
        seqs = self._sequences
        num_left = truncated_length(seqs, slot, num_tokens)
        num_kept = seqs.num_blocks(num_left)
        dropped = seqs.tables.leaves_first(slot, num_kept).copy()
        seqs.truncate(slot, num_tokens, num_left)
        num_full = int(seqs.num_committed[slot]) // self._block_size
        if num_full < seqs.num_published[slot]:
            self._publisher.set_published(slot, num_full, like=slot)
        if len(dropped):
            owner.drop_blocks(self._pool, dropped, until=owner.step_id - 1)

    def release(self, owner: SessionState, slots: list[int], *, keeps_partial: bool = False) -> None:
        """Gives back all blocks of these sequences and forgets them.

        keeps_partial: their last blocks stay cached, if their session wants it and they hold what the committed tokens made.
        """
        seqs = self._sequences
        running = [slot for slot in slots if seqs.states[slot] == _RUNNING]
        if keeps_partial and owner.takes_partial and self._is_shared and not self._publisher.is_paused:
            for slot in running:
                self._keep_partial(owner, slot)
        self._report_uses(running)
        if self._is_shared:
            self._note_ends(running)
        # Deepest first, so that leaves are evicted before their parents.
        tables = [seqs.tables.leaves_first(slot) for slot in running]
        if tables:
            owner.drop_blocks(self._pool, np.concatenate(tables), until=owner.step_id - 1)
        if self._swapper is not None:
            for slot in slots:
                self._swapper.release_sequence(owner, slot)
        self._publisher.forget_slots(slots)
        for slot in slots:
            if self._claims.claims:
                self._claims.forget_claim(slot)
            owner.ids.remove(int(seqs.ids[slot]))
            owner.logits.pop(int(seqs.ids[slot]), None)
            seqs.remove(slot)

    def _keep_partial(self, owner: SessionState, slot: int) -> None:
        """Names what a sequence that is about to end has behind its last whole block; behind a block's edge its states.

        Only where no step has gone further than what is committed, so that a state is the one behind these tokens; where none
        in flight was granted slots of it, which a cut may have taken away; and where nothing else holds or names its blocks.
        Then a step writes them no more (R5).
        """
        seqs, pool, index = self._sequences, self._pool, self._index
        length, num_full = int(seqs.num_committed[slot]), int(seqs.num_published[slot])
        num_part = length - num_full * self._block_size
        is_all = length == seqs.num_reserved[slot] and 0 <= num_part < self._block_size and not seqs.num_window[slot]
        is_written = seqs.last_reserve_step[slot] > owner.completed_step_id
        if not length or not is_all or is_written or seqs.reuse_hints[slot] == ReuseHint.NONE:
            return
        groups = range(seqs.num_groups) if num_part else seqs.new_entries.state_groups
        blocks = np.array([seqs.tables.get(slot, group)[-1] for group in groups], np.int32)
        is_free = (pool.ref_counts[blocks] == 1) & ~pool.indexed[blocks] & ~pool.is_filling[blocks]
        is_free &= (pool.fence_counts[blocks] | pool.busy_counts[blocks]) == 0
        node = int(seqs.last_nodes[slot])
        if num_part:
            if is_free.all():
                tokens = seqs.tokens.rows(slot)[slot, length - num_part : length]
                gone = index.partials.add(node, tokens, blocks, int(seqs.tenants[slot]))
                if gone is not None:
                    pool.unindex(gone)
                    pool.mark_indexed(blocks)
            return
        for group, block in zip(np.array(groups)[is_free].tolist(), blocks[is_free].tolist(), strict=True):
            if not index.held.group_blocks[group - 1][node]:
                pool.mark_indexed(index.add_group_blocks(group, np.array([node], np.int32), np.array([block], np.int32)))

    def _note_ends(self, slots: list[int]) -> None:
        """What these running sequences have made, and share."""
        seqs, size = self._sequences, self._block_size
        for slot in slots:
            num_shared = min(int(seqs.num_committed[slot]) // size, int(seqs.share_limits[slot])) * size
            num_prompt = int(seqs.num_prompt[slot])
            if num_shared >= num_prompt:
                self._reach.note_end(self._seed(slot), num_prompt, seqs.tokens.rows(slot)[slot, :num_shared].copy())

    def release_end(self, owner: SessionState, slot: int, num_kept: int) -> None:
        """Gives back the blocks of a running sequence behind the first num_kept; its release is to follow."""
        self._report_uses([slot])
        self._ending_slot = slot
        self.truncate(owner, slot, num_kept * self._block_size)

    def _report_uses(self, slots: list[int]) -> None:
        """Notifies the eviction order of the end of each running sequence, once, before any of them gives up a block."""
        pool, seqs = self._pool, self._sequences
        if pool.policy.wants_uses:
            for slot in slots:
                if slot != self._ending_slot:
                    pool.policy.use(self._use(slot))
        if pool.reuse is not None:
            for slot in slots:
                if slot != self._ending_slot:
                    path = seqs.tables.rows[slot, : int(seqs.num_published[slot])]
                    hint, seconds = int(seqs.reuse_hints[slot]), float(seqs.retain_seconds[slot])
                    pool.reuse.end_sequence(int(seqs.tenants[slot]), path, hint, seconds)
        if self._ending_slot in slots:
            self._ending_slot = -1

    def _seed(self, slot: int) -> int:
        return int(self._roots.seeds[-self._sequences.roots[slot]])

    def _use(self, slot: int) -> Use:
        seqs = self._sequences
        num_published = int(seqs.num_published[slot])
        beside, places, above = self._find_beside(slot, num_published)
        return Use(
            blocks=seqs.tables.rows[slot, :num_published].copy(),
            tokens=seqs.tokens.rows(slot)[slot, : num_published * self._block_size].copy(),
            root=self._seed(slot),
            priority=int(seqs.priorities[slot]),
            num_blocks=len(seqs.tables.get(slot)),
            beside=beside,
            places=places,
            above=above,
        )

    def _find_beside(self, slot: int, num_published: int) -> tuple[Int32Array, Int64Array, Int32Array]:
        """[m] indexed blocks beside a sequence's path, [m] the places on the path that they are at, [m] the block above each.

        Of groups of states also those that it has left behind, as it read or made them.
        """
        seqs, indexed, size = self._sequences, self._pool.indexed, num_published
        last = seqs.tables.get(slot)[size : size + 1]
        if not size or (seqs.num_groups == 1 and not (len(last) and indexed[last[0]])):
            return NO_INT32, NO_INT64, NO_INT32
        path = seqs.tables.rows[slot, :size]
        nodes, above, found = self._index.node_of_block[path], path.copy(), list[tuple[Int32Array, Int64Array, Int32Array]]()
        for group, table in enumerate(seqs.tables.get_further(slot), 1):
            has_states = group in seqs.new_entries.state_groups
            row = self._index.held.group_blocks[group - 1][nodes] if has_states else table[:size] * indexed[table[:size]]
            places = row.nonzero()[0]
            found.append((row[places], places, above[places]))
            if has_states:
                above[places] = row[places]
        end = path[-1:]
        for group in range(seqs.num_groups):
            last = seqs.tables.get(slot, group)[size:]
            last = last[indexed[last] & (last > 0)]
            found.append((last, np.full(len(last), size - 1), np.resize(end, len(last))))
            end = last[-1:] if len(last) else end
        blocks, places, behind = map(np.concatenate, zip(*found, strict=True))
        return blocks, places, behind
