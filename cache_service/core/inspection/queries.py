"""Questions about one pool's sequences, blocks and cached prefixes. Changes nothing."""

from collections.abc import Iterator

import numpy as np

from ..pool_state import PoolState, unknown_sequence
from ..sequences.session_state import SessionState
from ..sequences.transitions import wrong_state
from ..tables.prefix_lookup import PrefixLookup
from ..tables.prompt_watch import PromptWatch
from ..tiers.sequence_swap import SequenceSwapper
from ..values.errors import UnknownBlock
from ..values.types import NO_INT32, Executor, Int32Array, Int64Array, ReuseHint, SequenceId, SequenceState, SessionId
from ..values.views import BlockView, GroupStats, PoolStats, Readable, SequenceView
from . import invariants, tier_invariants
from .explain import Explanation, explain_match
from .prefix_match import PrefixMatch, match_prefix
from .stats import group_stats, pool_stats


class Queries:
    """Asks one pool."""

    def __init__(self, state: PoolState, lookup: PrefixLookup, swapper: SequenceSwapper | None, prompts: PromptWatch) -> None:
        self._state = state
        self._sequences = state.sequences
        self._lookup = lookup
        self._swapper = swapper
        self._prompts = prompts

    # Sequences

    def view(self, session: SessionId, sequence_id: int, *, with_table: bool = True) -> SequenceView:
        """One sequence, with its block table or with an empty one. Raises UnknownSession, UnknownSequence."""
        owner, slot = self._state.find_sequence(session, sequence_id)
        is_shown = with_table and self._sequences.states[slot] != SequenceState.SWAPPED  # a swapped sequence has no table
        return self._view(owner, slot, self._sequences.tables.get(slot).copy() if is_shown else NO_INT32)

    def sequence_ids(self, session: SessionId) -> Int64Array:
        """[n] ids of the session's sequences, ascending; to be read before the session changes. Raises UnknownSession."""
        return self._state.session(session).ids.items()[0]

    def list_sequence_ids(self, session: SessionId, tenant: str) -> Int64Array:
        """[n] those of one tenant, ascending. Raises UnknownSession."""
        ids, slots = self._state.session(session).ids.items()
        return ids[self._sequences.tenants[slots] == self._state.index.roots.find_tenant(tenant)]

    def check_tenant(self, session: SessionId, sequence_id: int, tenant: str) -> None:
        """Raises UnknownSession, and UnknownSequence also for a sequence of another tenant."""
        _, slot = self._state.find_sequence(session, sequence_id)
        if self._sequences.tenants[slot] != self._state.index.roots.find_tenant(tenant):
            raise unknown_sequence(sequence_id)

    def num_sequences(self, session: SessionId | None) -> int:
        """The number of sequences of one session or of all. Raises UnknownSession."""
        owners = [self._state.session(session)] if session else self._state.sessions.values()
        return sum(len(owner.ids) for owner in owners)

    def start_number(self, session: SessionId, sequence_id: int) -> int:
        """The sequence's place in the order of arrivals."""
        _, slot = self._state.find_sequence(session, sequence_id)
        return int(self._sequences.start_numbers[slot])

    def tokens(self, session: SessionId, sequence_id: int) -> Int32Array:
        """[num_tokens] token ids."""
        _, slot = self._state.find_sequence(session, sequence_id)
        return self._sequences.tokens.known(slot).copy()

    def readable(self, session: SessionId, sequence_id: int) -> Readable:
        """One sequence, to read K and V through its table. Raises WrongState where they are not on the device."""
        view = self.view(session, sequence_id)
        if view.state not in (SequenceState.WAITING, SequenceState.RUNNING):
            raise wrong_state(sequence_id, view.state)
        num_tokens, owner = view.num_committed_tokens, self._state.session(session)
        if owner.executor is Executor.ENGINE and owner.copies:
            for table in (view.block_table, *view.group_tables):
                filling = np.flatnonzero(self._state.pool.is_filling[table])
                num_tokens = min(num_tokens, int(filling[0]) * self._sequences.block_size) if len(filling) else num_tokens
        return Readable(view, num_tokens)

    def writable_slots(self, session: SessionId, sequence_id: int) -> tuple[int, int]:
        """[committed, reserved): the token indices whose K and V may be written. Raises WrongState."""
        _, slot = self._state.find_sequence(session, sequence_id)
        state = int(self._sequences.states[slot])
        if state in (SequenceState.SWAPPED, SequenceState.LOADING):
            raise wrong_state(sequence_id, state)
        return int(self._sequences.num_committed[slot]), int(self._sequences.num_reserved[slot])

    # Cached prefixes and blocks

    def match_prefix(self, scope: str, token_ids: Int32Array) -> PrefixMatch:
        """The longest cached prefix in any tier."""
        return match_prefix(self._state, self._lookup, scope, token_ids)

    def explain_match(self, scope: str, token_ids: Int32Array) -> Explanation:
        """Why the longest cached prefix ends where it does. May take a millisecond."""
        return explain_match(self._state, self._lookup, scope, token_ids)

    def block_view(self, block: int) -> BlockView:
        """Raises UnknownBlock."""
        pool, index = self._state.pool, self._state.index
        if not 0 < block < pool.num_blocks:
            raise UnknownBlock(f"the pool has no block {block}", limit=pool.num_blocks - 1)
        return BlockView(
            state=pool.state(block),
            num_references=int(pool.ref_counts[block]),
            num_fences=int(pool.fence_counts[block]),
            num_transfers=int(pool.transfer_counts[block]),
            num_quarantines=int(pool.quarantine_counts[block]),
            indexed=bool(pool.indexed[block]),
            has_host_copy=bool(index.held.find_hosts(np.array([block], np.int32))[0]),
            reuse_hint=pool.reuse.get_hint(block) if pool.reuse is not None else ReuseHint.UNSPECIFIED,
        )

    # The whole pool

    def stats(self) -> PoolStats:
        """Counts derived from the state, and sums over the pool's life."""
        return pool_stats(self._state, self._swapper, self._prompts)

    def group_stats(self) -> list[GroupStats]:
        """The same of each group of layers; none where all layers are one."""
        return group_stats(self._state)

    def audit(self) -> Iterator[list[str]]:
        """The broken invariants, one sentence each, in slices between which the pool may change."""
        is_whole = True
        for wrong in invariants.audit(self._state):
            is_whole &= not wrong
            yield wrong
        if self._swapper is not None and is_whole:
            yield from tier_invariants.audit(self._state, self._swapper)

    def check_invariants(self) -> list[str]:
        """The whole audit in one go; empty when all invariants hold."""
        return [text for wrong in self.audit() for text in wrong]

    def _view(self, owner: SessionState, slot: int, table: Int32Array) -> SequenceView:
        seqs = self._sequences
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
            num_accesses=int(seqs.accesses.counts[slot]),
            block_table=table,
            num_host_blocks=self._swapper.host.count_blocks(slot) if self._swapper is not None else 0,
            retention=seqs.retention(slot),
            start_number=int(seqs.start_numbers[slot]),
            reuse_hint=ReuseHint(int(seqs.reuse_hints[slot])),
            group_tables=tuple(table.copy() for table in seqs.tables.get_further(slot)) if len(table) else (),
            idle_seconds=max(0.0, self._state.now - float(seqs.accesses.last[slot])),
        )
