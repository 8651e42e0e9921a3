"""Sequences before they start: a prompt is stored, checked against every limit, and waits without blocks."""

import numpy as np

from ..index.prefix_index import MAX_TENANTS
from ..pool_core import PoolState
from ..step.validate import check_id
from ..values.errors import DuplicateSequence, InvalidField, NeverFits, OutOfSequences
from ..values.sequence_args import SequenceArgs
from ..values.types import SequenceState, SessionId


class CreateCalls(PoolState):
    """See the module."""

    def create_sequence(self, session: SessionId, args: SequenceArgs) -> int:
        """Stores a prompt, to wait without blocks. Answers the tokens cached right now. Equal arguments again: no change."""
        owner, seqs = self._owner(session), self.tables.sequences
        sequence_id = check_id(args.sequence_id, "sequence_id")
        num_tokens, limit = len(args.token_ids), self.config.limit_with(args.retention)
        if num_tokens < 1 or int(args.token_ids.min()) < 0:
            raise InvalidField("a prompt is 1 token or more, ids 0 to 2^31 - 1", field="token_ids", limit=2**31 - 1)
        max_tokens = args.max_tokens or limit
        if max_tokens > limit or num_tokens > limit:
            requested = max(max_tokens, num_tokens)
            flag = "--max-tokens-per-sequence" if limit == self.config.max_tokens_per_sequence else "--pool-memory"
            raise NeverFits(f"{requested} tokens, at most {limit} fit, see {flag}", requested=requested, limit=limit)
        if max_tokens < num_tokens:
            raise InvalidField("max_tokens is less than the prompt", field="max_tokens", limit=num_tokens)
        if not 0 <= args.start_number <= self._start_numbers.last:
            limit = self._start_numbers.last
            raise InvalidField("not a place that was given out before", field="start_number", limit=limit)
        slot = owner.ids.get(sequence_id)
        if slot is not None:
            if not self._is_same(slot, args, max_tokens):
                raise DuplicateSequence(f"sequence {sequence_id} exists", sequence_id=sequence_id)
        else:
            if not seqs.num_free_slots:
                limit = self.config.max_sequences
                raise OutOfSequences(f"all {limit} sequences are in use", limit=limit)
            if not self.tables.index.has_room_for(args.tenant):
                raise InvalidField("too many tenants on this pool", field="tenant", limit=MAX_TENANTS)
            self.revision += 1
            slot = seqs.take_slot()
            seqs.ids[slot], seqs.owners[slot] = sequence_id, owner.number
            seqs.states[slot] = SequenceState.WAITING
            seqs.roots[slot] = self.tables.index.root(args.tenant)
            if self.config.tenant_quotas:
                self.tables.pool.limits.name_tenant(args.tenant, int(seqs.roots[slot]))
            seqs.tokens[slot, :num_tokens] = args.token_ids
            seqs.num_tokens[slot] = seqs.num_prompt[slot] = num_tokens
            seqs.max_tokens[slot], seqs.priorities[slot] = max_tokens, args.priority
            if args.retention is not None:
                seqs.retain(slot, args.retention.num_sink_tokens, args.retention.num_window_tokens)
            seqs.start_numbers[slot] = args.start_number or self._start_numbers.draw()
            seqs.last_access[slot] = self.now
            owner.ids.add(sequence_id, slot)
        root = self.tables.index.find_root(args.tenant)
        num_blocks = num_tokens // self.config.block_size
        return len(self.tables.match_tokens(root, args.token_ids, num_blocks)) * self.config.block_size

    def _is_same(self, slot: int, args: SequenceArgs, max_tokens: int) -> bool:
        seqs = self.tables.sequences
        return (
            seqs.parent_ids[slot] == 0
            and seqs.num_prompt[slot] == len(args.token_ids)
            and seqs.max_tokens[slot] == max_tokens
            and seqs.priorities[slot] == args.priority
            and seqs.retention(slot) == args.retention
            and args.start_number in (0, seqs.start_numbers[slot])
            and seqs.roots[slot] == self.tables.index.find_root(args.tenant)
            and np.array_equal(seqs.tokens[slot, : len(args.token_ids)], args.token_ids)
        )
