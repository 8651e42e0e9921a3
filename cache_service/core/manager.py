"""One pool: the facade of the pure core.

Adds to the steps (step/apply.py) the calls of its bases and the questions that change nothing. Who asks or calls publishes what
is pending first, where the answer is to see it. Knows no grpc, asyncio, torch or clock.
"""

from collections.abc import Iterator

import numpy as np

from .calls.evict import EvictionCalls
from .calls.garbage import VictimCalls
from .calls.prefix import PrefixCalls
from .calls.update import SequenceUpdates
from .inspection import invariants
from .inspection import tier_invariants as tier_audit
from .inspection.explain import Explanation, explain_match
from .inspection.stats import pool_stats
from .sequences.session_state import SessionState
from .step.one_item import OneItemCalls
from .step.validate import wrong_state
from .values.errors import UnknownBlock
from .values.sequence_args import Retention
from .values.types import BlockId, BlockState, Executor, Int32Array, SequenceId, SequenceState, SessionId
from .values.views import Admission, BlockView, PoolStats, Readable, SequenceView


class PoolManager(OneItemCalls, EvictionCalls, PrefixCalls, SequenceUpdates, VictimCalls):
    """See the module."""

    def view(self, session: SessionId, sequence_id: int) -> SequenceView:
        """One sequence with its block table. Raises UnknownSequence."""
        owner, slot = self._find(session, sequence_id)
        return self._view(owner, slot, self.tables.shown_table(slot).copy())

    def start_number(self, session: SessionId, sequence_id: int) -> int:
        """The sequence's place in the order of arrivals."""
        _, slot = self._find(session, sequence_id)
        return int(self.tables.sequences.start_numbers[slot])

    def readable(self, session: SessionId, sequence_id: int) -> Readable:
        """The same, to read K and V through the table. Raises WrongState where they are not on the device."""
        view = self.view(session, sequence_id)
        if view.state not in (SequenceState.WAITING, SequenceState.RUNNING):
            raise wrong_state(sequence_id, view.state)
        num_tokens, owner = view.num_committed_tokens, self._owner(session)
        if owner.executor is Executor.ENGINE and owner.copies:
            filling = np.flatnonzero(self.tables.pool.is_filling[view.block_table])
            num_tokens = min(num_tokens, int(filling[0]) * self.config.block_size) if len(filling) else num_tokens
        return Readable(view, num_tokens)

    def note_read(self, session: SessionId, sequence_id: int) -> None:
        """K and V of the sequence are read: an access like a step that names it."""
        _, slot = self._find(session, sequence_id)
        self.tables.sequences.note_access(np.array([slot]), self.now)

    def tokens(self, session: SessionId, sequence_id: int) -> Int32Array:
        """[num_tokens] token ids."""
        _, slot = self._find(session, sequence_id)
        return self.tables.sequences.tokens[slot, : self.tables.sequences.num_tokens[slot]].copy()

    def views(self, session: SessionId | None) -> Iterator[SequenceView]:
        """Sequences of one session or of all, by session and id, without tables. Raises UnknownSession."""
        owners = [self._owner(session)] if session else sorted(self._owners.values(), key=lambda owner: owner.session)
        for owner in owners:
            for slot in owner.ids.items()[1].tolist():
                yield self._view(owner, slot, np.empty(0, np.int32))

    def writable_slots(self, session: SessionId, sequence_id: int) -> tuple[int, int]:
        """[committed, reserved): the token indices whose K and V may be written. Raises WrongState."""
        _, slot = self._find(session, sequence_id)
        state = int(self.tables.sequences.states[slot])
        if state in (SequenceState.SWAPPED, SequenceState.LOADING):
            raise wrong_state(sequence_id, state)
        return int(self.tables.sequences.num_committed[slot]), int(self.tables.sequences.num_reserved[slot])

    def match_prefix(self, tenant: str, token_ids: Int32Array) -> Int32Array:
        """[matched] block ids of the longest cached prefix in any tier, whole blocks; 0 for one in the host tier only."""
        root = self.tables.index.find_root(tenant)
        nodes = self.tables.match_tokens(root, token_ids, len(token_ids) // self.config.block_size)
        return self.tables.index.block_of_node[nodes]

    def explain_match(self, tenant: str, token_ids: Int32Array) -> Explanation:
        """Why the longest cached prefix ends where it does. May take a millisecond."""
        return explain_match(self.tables, self.config, tenant, token_ids)

    def block_view(self, block: int) -> BlockView:
        """Raises UnknownBlock."""
        pool, index = self.tables.pool, self.tables.index
        if not 0 < block < pool.num_blocks:
            raise UnknownBlock(f"the pool has no block {block}", limit=pool.num_blocks - 1)
        return BlockView(
            state=pool.state(block),
            num_references=int(pool.ref_counts[block]),
            num_fences=int(pool.fence_counts[block]),
            num_transfers=int(pool.transfer_counts[block]),
            num_quarantines=int(pool.quarantine_counts[block]),
            indexed=bool(pool.indexed[block]),
            has_host_copy=bool(index.host_of_node[index.node_of_block[block]]),
        )

    def check_admission(
        self,
        tenant: str,
        token_ids: Int32Array | None,
        num_prompt_tokens: int,
        num_new_tokens: int,
        retention: Retention | None = None,
    ) -> Admission:
        """Whether a prompt could start whole now, later or never. num_prompt_tokens counts where token_ids are not given.

        With retention it need not start whole: what it holds at once is enough.
        """
        pool, block_size = self.tables.pool, self.config.block_size
        hits = np.empty(0, np.int32)
        if token_ids is not None:
            num_prompt_tokens = len(token_ids)
            hits = self.match_prefix(tenant, token_ids)[: (num_prompt_tokens - 1) // block_size]
        num_required = -(-num_prompt_tokens // block_size)
        if retention is not None:
            hits = hits[: (retention.num_sink_tokens + retention.num_window_tokens) // block_size]
            num_required = min(num_required, max(retention.num_held_blocks(block_size), len(hits) + 1))
        if len(hits) * block_size < self.config.min_prefix_tokens:
            hits = hits[:0]
        num_required -= int(np.count_nonzero(hits))  # what is to be loaded takes a block too
        num_room = pool.num_available - pool.num_revived(hits) - self._num_spare()
        has_room = num_required <= num_room or self.tables.could_pins_give_way(None, num_required - num_room, hits)
        limit = self.config.limit_with(retention)
        self.tables.claims.pass_time(self.now)
        if self.tables.claims.would_be_younger(priority=0):
            num_room, has_room = 0, False  # an elder one waits, and nobody starts before it
        can_ever = num_prompt_tokens + num_new_tokens <= limit
        return Admission(
            can_now=can_ever and has_room and self.tables.sequences.num_free_slots > 0,
            can_ever=can_ever,
            num_hit_tokens=len(hits) * block_size,
            num_required_blocks=num_required,
            num_available_blocks=max(0, num_room),
            limit_tokens=limit,
        )

    def stats(self) -> PoolStats:
        """Counts derived from the state, and sums over the pool's life."""
        return pool_stats(self.tables, self.gauge, self.revision, self.num_sessions)

    def check_invariants(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        owners = [*self._owners.values(), *self.reclaim.owners]
        wrong = invariants.violations(self.tables, owners, list(self._quarantines.values()))
        if self.tables.swapper is not None and not wrong:
            wrong = tier_audit.violations(self.tables, self.tables.swapper)
        return wrong

    def block_state(self, block: BlockId) -> BlockState:
        return self.tables.pool.state(block)

    def _view(self, owner: SessionState, slot: int, table: Int32Array) -> SequenceView:
        seqs = self.tables.sequences
        return SequenceView(
            sequence_id=SequenceId(int(seqs.ids[slot])),
            session_id=owner.session,
            state=SequenceState(int(seqs.states[slot])),
            num_tokens=int(seqs.num_tokens[slot]),
            num_committed_tokens=int(seqs.num_committed[slot]),
            num_reserved_tokens=int(seqs.num_reserved[slot]),
            max_tokens=int(seqs.max_tokens[slot]),
            priority=int(seqs.priorities[slot]),
            num_hit_tokens=int(seqs.num_hit[slot]),
            num_accesses=int(seqs.num_accesses[slot]),
            block_table=table,
            num_host_blocks=self.tables.swapper.host.num_blocks_of(slot) if self.tables.swapper is not None else 0,
            retention=seqs.retention(slot),
            start_number=int(seqs.start_numbers[slot]),
            idle_seconds=max(0.0, self.now - float(seqs.last_access[slot])),
        )
