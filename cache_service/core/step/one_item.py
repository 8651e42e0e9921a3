"""The one-item calls: each is a step of one item, and its device work counts as complete at once."""

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..sequences.spans import can_leave, find_holes
from ..tables.prefix_lookup import PrefixLookup
from ..tables.reserve import Reservations
from ..tiers.sequence_swap import SequenceSwapper
from ..values.copies import Copies
from ..values.errors import DuplicateSequence, InvalidField, OutOfBlocks, OutOfHostBlocks, WrongState, out_of_sequences
from ..values.step_columns import StepBatch, StepReply
from ..values.types import NO_INT32, Int32Array, ItemResult, SequenceState, SessionId, StartResult
from .apply import StepApplier
from .reply import list_copies
from .validate import too_long

_FIELDS = {"commit_num_tokens": "num_tokens", "commit_token_ids": "token_ids", "fork_num_tokens": "num_tokens",
           "truncate_num_tokens": "num_tokens", "reserve_max_tokens": "num_tokens"}  # fmt: skip


class OneItemCalls:
    """The one-item calls of one pool."""

    def __init__(
        self,
        state: PoolState,
        steps: StepApplier,
        lookup: PrefixLookup,
        reservations: Reservations,
        swapper: SequenceSwapper | None,
    ) -> None:
        self._state = state
        self._sequences = state.sequences
        self._pool = state.pool
        self._blocks_left = state.blocks_left
        self._claims = state.claims
        self._steps = steps
        self._lookup = lookup
        self._reservations = reservations
        self._swapper = swapper

    def extend(self, session: SessionId, sequence_id: int, num_tokens: int, *, look_up: bool) -> Copies:
        """Reserves up to num_tokens, starting a waiting sequence first; all or nothing.

        Returns the copies to run before anything is written. Raises OutOfBlocks, which changes nothing.
        """
        owner, slot = self._state.find_sequence(session, sequence_id)
        seqs = self._sequences
        if num_tokens < 1:
            raise InvalidField("a reservation wants 1 token or more", field="num_tokens", limit=1)
        if num_tokens > seqs.max_tokens[slot]:
            raise too_long("num_tokens", int(seqs.max_tokens[slot]))
        find_holes(seqs, slot).check_fits("num_tokens", num_tokens, seqs)
        ids, lens = np.array([sequence_id]), np.array([num_tokens], np.int32)
        if seqs.states[slot] == SequenceState.WAITING:
            max_hit = lens if look_up else np.zeros(1, np.int32)
            reply = self._step_once(owner, start_ids=ids, start_max_new=lens, start_max_hit=max_hit, start_exact=lens)
            is_granted = reply.start_results[0] == StartResult.STARTED
        else:
            reply = self._step_once(owner, reserve_ids=ids, reserve_min=lens, reserve_max=lens)
            is_granted = reply.reserve_reserved[0] >= num_tokens
        if is_granted:
            return list_copies(reply)
        self._claims.forget_claim(slot)  # a call that is refused with an error leaves no trace
        requested, available = self._shortage(owner, slot, num_tokens, look_up=look_up)
        raise OutOfBlocks(f"{requested} blocks are wanted, {available} are available", requested=requested, available=available)

    def commit(
        self, session: SessionId, sequence_id: int, num_tokens: int, first_token_idx: int, token_ids: Int32Array
    ) -> None:
        """Appends token ids, which stand at first_token_idx, and commits. Tokens stored already are not stored twice."""
        owner, slot = self._state.find_sequence(session, sequence_id)
        seqs = self._sequences
        known = int(seqs.num_tokens[slot])
        repeated = token_ids[: max(known - first_token_idx, 0)]
        stored = seqs.tokens.known(slot)[first_token_idx : first_token_idx + len(repeated)]
        if not 0 <= first_token_idx <= known or not np.array_equal(repeated, stored):
            raise InvalidField(f"the tokens differ from the {known} already stored", field="first_token_idx", limit=known)
        new = token_ids[len(repeated) :]
        if len(new) == 0 and num_tokens <= seqs.num_committed[slot]:
            return
        self._step_once(
            owner,
            commit_ids=np.array([sequence_id]),
            commit_lens=np.array([num_tokens], np.int32),
            commit_num_new=np.array([len(new)], np.int32),
            commit_tokens=new,
        )

    def fork(self, session: SessionId, parent_id: int, child_id: int, num_tokens: int | None) -> None:
        """Shares the parent's first tokens, by default all committed ones. The same fork again changes nothing."""
        owner, parent = self._state.find_sequence(session, parent_id)
        seqs = self._sequences
        num_tokens = num_tokens or int(seqs.num_committed[parent])
        child = owner.ids.get(child_id)
        if child is not None:
            shared = seqs.tokens.known(parent)[:num_tokens]
            is_same = seqs.parent_ids[child] == parent_id and seqs.num_prompt[child] == num_tokens
            if is_same and np.array_equal(seqs.tokens.known(child)[:num_tokens], shared):
                return
            raise DuplicateSequence(f"sequence {child_id} exists", sequence_id=child_id)
        reply = self._step_once(
            owner,
            fork_parents=np.array([parent_id]),
            fork_children=np.array([child_id]),
            fork_lens=np.array([num_tokens], np.int32),
        )
        if reply.fork_results[0] == ItemResult.NO_ROOM:
            raise out_of_sequences(self._state.slot_limit(owner) or self._state.config.max_sequences)

    def truncate(self, session: SessionId, sequence_id: int, num_tokens: int) -> None:
        """Cuts to num_tokens, 1 or more, and gives back the blocks behind."""
        owner, _ = self._state.find_sequence(session, sequence_id)
        lens = np.array([num_tokens], np.int32)
        self._step_once(owner, truncate_ids=np.array([sequence_id]), truncate_lens=lens)

    def release(self, session: SessionId, sequence_id: int) -> int:
        """Gives a sequence's blocks back and forgets it. Returns how many of them nothing else holds."""
        owner, slot = self._state.find_sequence(session, sequence_id)
        seqs = self._sequences
        shown = seqs.tables.held(slot) if seqs.states[slot] != SequenceState.SWAPPED else NO_INT32
        num_alone = self._blocks_left.num_held_once(shown)
        self._step_once(owner, release_ids=np.array([sequence_id]))
        return num_alone

    def swap_out(self, session: SessionId, sequence_id: int) -> Copies:
        """Moves a sequence to the host tier; one that is there stays there. Raises OutOfHostBlocks, which changes nothing.

        Raises WrongState where layers have states, and more is reserved than committed.
        """
        owner, slot = self._state.find_sequence(session, sequence_id)
        seqs = self._sequences
        if not can_leave(seqs, slot):
            raise WrongState(
                f"sequence {sequence_id} has states that may be ahead of its committed tokens",
                sequence_id=sequence_id,
                state=SequenceState(int(seqs.states[slot])).name,
            )
        reply = self._step_once(owner, swap_out_ids=np.array([sequence_id]))
        if reply.swap_out_results[0] == ItemResult.NO_ROOM:
            swapper = self._swapper
            num_blocks = np.count_nonzero(self._sequences.tables.get_from(slot, 0))
            requested, available = swapper.shortage(owner, slot) if swapper is not None else (int(num_blocks), 0)
            raise OutOfHostBlocks(
                f"{requested} host blocks are wanted, {available} are available", requested=requested, available=available
            )
        return list_copies(reply)

    def swap_in(self, session: SessionId, sequence_id: int) -> Copies:
        """Moves a sequence back to the device; one that is there stays. Raises OutOfBlocks, which changes nothing."""
        owner, slot = self._state.find_sequence(session, sequence_id)
        reply = self._step_once(owner, swap_in_ids=np.array([sequence_id]))
        if reply.swap_in_results[0] == ItemResult.NO_ROOM:
            swapper = self._swapper
            assert swapper is not None, "a swapped sequence without a host tier"
            claims = self._claims
            claims.forget_claim(slot)  # a call that is refused with an error leaves no trace
            requested, room = swapper.shortage_in(owner, slot, self._state.num_spare() + claims.num_kept_from(slot))
            available = max(room, 0)
            raise OutOfBlocks(
                f"{requested} blocks are wanted, {available} are available", requested=requested, available=available
            )
        return list_copies(reply)

    def _shortage(self, owner: SessionState, slot: int, num_tokens: int, *, look_up: bool) -> tuple[int, int]:
        """(blocks that an extend takes beside its hit, copies included; blocks that it could have)."""
        seqs, pool = self._sequences, self._pool
        if seqs.states[slot] == SequenceState.RUNNING:
            num_needed = seqs.new_entries.num_blocks(len(seqs.tables.get(slot)), seqs.num_blocks(num_tokens))
            num_room = max(0, pool.num_available - self._claims.num_kept_from(slot))
            return num_needed + len(self._reservations.copies_due(owner, slot, num_tokens)), num_room
        nodes = self._lookup.match_sequence(slot, num_tokens if look_up else 0)
        index = self._state.index
        on_device = index.block_of_node[nodes] > 0
        nodes = index.held.usable(nodes if on_device.all() else nodes[: int(np.argmin(on_device))])
        hits = index.held.hit_table(nodes)[0]
        num_needed = seqs.new_entries.num_blocks(len(nodes), seqs.num_blocks(num_tokens))
        if self._claims.is_later(slot):
            return num_needed, 0
        return num_needed, max(0, self._blocks_left.beside(hits, self._state.num_spare()))

    def _step_once(self, owner: SessionState, **columns: np.ndarray) -> StepReply:
        owner.is_one_item = True
        step_id = owner.step_id + 1
        try:
            reply = self._steps.step(owner.session, StepBatch(step_id, step_id - 1, **columns))
        except InvalidField as error:  # names a column of the step, where the call has a field
            error.metadata["field"] = _FIELDS.get(error.metadata["field"], error.metadata["field"])
            raise
        self._state.publish()
        owner.updates.clear()  # the session is shown the table itself
        owner.complete_steps(self._pool, step_id)
        self._state.update_pressure()
        return reply
