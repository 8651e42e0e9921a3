"""Sequences before they start: a prompt is stored, checked against every limit, and waits without blocks."""

import numpy as np

from ..index.roots import MAX_TENANTS
from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..sequences.spans import refuse_retention
from ..step.validate import check_id
from ..tables.prefix_lookup import PrefixLookup
from ..values.errors import DuplicateSequence, InvalidField, NeverFits, out_of_sequences
from ..values.scopes import get_tenant
from ..values.sequence_args import SequenceArgs
from ..values.types import SessionId
from .reclaim import Reclaim


class CreateCalls:
    """Creates the sequences of one pool."""

    def __init__(self, state: PoolState, lookup: PrefixLookup, reclaim: Reclaim) -> None:
        self._state = state
        self._lookup = lookup
        self._reclaim = reclaim

    def create(self, session: SessionId, args: SequenceArgs) -> int:
        """Stores a prompt, to wait without blocks. Returns the tokens cached right now. Equal arguments again: no change."""
        state, owner = self._state, self._state.session(session)
        sequence_id = check_id(args.sequence_id, "sequence_id")
        num_tokens, limit = len(args.token_ids), state.config.limit_with(args.retention)
        if args.retention is not None:
            refuse_retention(state.config.group_spans)
        if num_tokens < 1 or int(args.token_ids.min()) < 0:
            raise InvalidField("a prompt is 1 token or more, ids 0 to 2^31 - 1", field="token_ids", limit=2**31 - 1)
        max_tokens = args.max_tokens or limit
        if max_tokens > limit or num_tokens > limit:
            requested = max(max_tokens, num_tokens)
            flag = "--max-tokens-per-sequence" if limit == state.config.max_tokens_per_sequence else "--pool-memory"
            raise NeverFits(f"{requested} tokens, at most {limit} fit, see {flag}", requested=requested, limit=limit)
        if max_tokens < num_tokens:
            raise InvalidField("max_tokens is less than the prompt", field="max_tokens", limit=num_tokens)
        if not 0 <= args.start_number <= state.start_numbers.last:
            limit = state.start_numbers.last
            raise InvalidField("not a place that was given out before", field="start_number", limit=limit)
        slot = owner.ids.get(sequence_id)
        if slot is None:
            self._add(owner, args, max_tokens)
        elif not self._is_same(slot, args, max_tokens):
            raise DuplicateSequence(f"sequence {sequence_id} exists", sequence_id=sequence_id)
        found = self._lookup.usable(self._lookup.match_prompt(args.scope, args.token_ids))
        return len(found) * state.config.block_size

    def _add(self, owner: SessionState, args: SequenceArgs, max_tokens: int) -> None:
        state, seqs, index = self._state, self._state.sequences, self._state.index
        if not seqs.num_free_slots and self._reclaim.is_left:
            self._reclaim.release_slot()
        if (limit := state.slot_limit(owner)) is not None:
            raise out_of_sequences(limit)
        if not index.roots.has_room_for(args.scope):
            raise InvalidField("too many tenants on this pool", field="tenant", limit=MAX_TENANTS)
        state.revision += 1
        root = index.root(args.scope)
        tenant = int(index.roots.tenant_of[-root])
        if state.config.tenant_quotas:
            state.pool.limits.name_tenant(get_tenant(args.scope), tenant)
        slot = seqs.add(
            args.sequence_id,
            owner.number,
            root,
            tenant,
            args.token_ids,
            max_tokens=max_tokens,
            priority=args.priority,
            start_number=args.start_number or state.start_numbers.draw(),
            now=state.now,
        )
        if args.reuse_hint:
            state.pool.heed_hints()
            seqs.update(slot, reuse_hint=args.reuse_hint, retain_seconds=args.retain_seconds)
        if args.retention is not None:
            seqs.retain(slot, args.retention.num_sink_tokens, args.retention.num_window_tokens)
        owner.ids.add(args.sequence_id, slot)
        if state.config.prefix_caching:
            state.reach.note_prompt(int(index.roots.seeds[-root]), args.token_ids)
        if state.below is not None:
            state.below.expect(slot)

    def _is_same(self, slot: int, args: SequenceArgs, max_tokens: int) -> bool:
        seqs = self._state.sequences
        return (
            seqs.parent_ids[slot] == 0
            and seqs.num_prompt[slot] == len(args.token_ids)
            and seqs.max_tokens[slot] == max_tokens
            and seqs.priorities[slot] == args.priority
            and seqs.retention(slot) == args.retention
            and seqs.reuse_hints[slot] == args.reuse_hint
            and seqs.retain_seconds[slot] == args.retain_seconds
            and args.start_number in (0, seqs.start_numbers[slot])
            and seqs.roots[slot] == self._state.index.find_root(args.scope)
            and np.array_equal(seqs.tokens.known(slot)[: len(args.token_ids)], args.token_ids)
        )
