"""Replies that are told before their step is applied.

Owns the reply to a step that was foretold, also one that releases and starts sequences, as the pool stands. Changes nothing,
and answers None wherever the step itself has to be asked: where blocks are short, a start may find what the step commits, or
anything else is to be told. The step is applied right after its answer, before any other call, and its reply is the same.
"""

from typing import NamedTuple

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..tables.prefix_lookup import PrefixLookup
from ..values.step_columns import StepReply
from ..values.types import NO_INT32, NO_INT64, Int32Array, SequenceState, SessionId, StartResult
from .free_room import fits_in_free, num_wanted
from .reply import int32_of


class OpenStep(NamedTuple):
    """A step that was foretold but for its tokens, and for what it releases and starts, which is lawful as columns.

    reserve_max [n]: what its reservations ask for. growing: those that need a block more, ascending, and growing_roots: the
    roots of their tenants.
    """

    step_id: int
    has_releases: bool
    start_ids: list[int]
    start_max_new: list[int]
    start_max_hit: list[int]
    reserve_max: Int32Array
    growing: list[int]
    growing_roots: list[int]


class ExpectedReplies:
    """Tells the replies of one pool's steps."""

    def __init__(self, state: PoolState, lookup: PrefixLookup) -> None:
        self._state = state
        self._sequences = state.sequences
        self._pool = state.pool
        self._lookup = lookup

    def reply(self, session: SessionId, step: OpenStep) -> StepReply | None:
        """The reply to a step if it comes now."""
        state, pool, seqs = self._state, self._pool, self._sequences
        owner = state.session(session)
        start_slots = self._start_slots(owner, step) if self._is_plain(owner, step) else None
        hits = self._hits(start_slots, step.start_max_hit) if start_slots is not None else None
        if start_slots is None or hits is None:
            return None
        lens = [
            min(len(hit) * seqs.block_size + max_new, int(seqs.num_tokens[slot]))
            for slot, hit, max_new in zip(start_slots, hits, step.start_max_new, strict=True)
        ]
        sizes = [seqs.num_blocks(length) - len(hit) for length, hit in zip(lens, hits, strict=True)]
        num_taken = sum(sizes) + len(step.growing)
        roots = [int(seqs.roots[slot]) for slot, size in zip(start_slots, sizes, strict=True) for _ in range(size)]
        blocks = state.allocator.peek([*roots, *step.growing_roots])
        num_revived = pool.num_revived(np.concatenate(hits)) if any(map(len, hits)) else 0
        level = state.gauge.level_at(pool.num_used + num_taken + num_revived)
        if blocks is None or level is not state.gauge.level:
            return None
        tables = []
        for hit, size in zip(hits, sizes, strict=True):
            tables += [hit, blocks[:size]]
            blocks = blocks[size:]
        return StepReply(
            fork_results=NO_INT32,
            start_results=int32_of([StartResult.STARTED] * len(hits)),
            start_hits=int32_of([len(hit) * seqs.block_size for hit in hits]),
            start_reserved=int32_of(lens),
            start_num_blocks=int32_of([len(hit) + size for hit, size in zip(hits, sizes, strict=True)]),
            start_block_ids=np.concatenate(tables) if tables else NO_INT32,
            reserve_reserved=step.reserve_max,
            new_block_item_idx=int32_of(step.growing),
            new_block_ids=blocks,
            update_ids=NO_INT64,
            update_table_idx=NO_INT32,
            update_block_ids=NO_INT32,
            copy_sources=NO_INT32,
            copy_destinations=NO_INT32,
            num_free=len(pool.free) - num_taken,
            num_evictable=pool.num_evictable - num_revived,
            num_fenced=pool.num_fenced,
            pressure=level,
            revision=state.revision + 1,
        )

    def _is_plain(self, owner: SessionState, step: OpenStep) -> bool:
        """Whether the reply tells nothing but grants and starts."""
        state = self._state
        if owner.updates or owner.fences or state.claims.claims or state.lower_tier is not None:
            return False
        return step.step_id == owner.step_id + 1 and not state.sequences.num_retaining

    def _start_slots(self, owner: SessionState, step: OpenStep) -> list[int] | None:
        """Of the starts; None where one is not lawful, or there may be no room for all that the step grants."""
        seqs, slots = self._sequences, [owner.ids.get(sequence_id) for sequence_id in step.start_ids]
        known = [slot for slot in slots if slot is not None and seqs.states[slot] == SequenceState.WAITING]
        if len(known) < len(slots) or len(set(known)) < len(known):
            return None
        if known and (min(step.start_max_new) < 1 or min(step.start_max_hit) < 0):
            return None
        if not known and not step.has_releases:
            return known
        if not (known or len(step.reserve_max)):  # it grants nothing
            return None
        num_blocks = num_wanted(self._state, known, num_new=len(step.growing))
        return known if fits_in_free(self._state, num_blocks, len(known) + len(step.reserve_max)) else None

    def _hits(self, slots: list[int], max_hits: list[int]) -> list[Int32Array] | None:
        """The blocks that each of these starts hits; None where it may be more, or logits, or worth waiting for."""
        state = self._state
        if not slots:
            return []
        if state.index.logits.by_node or len({self._lookup.first_block(slot) for slot in slots}) < len(slots):
            return None  # one may find what another one of this step computes
        rivals: dict[int, tuple[bytes, ...]] = {}
        matches = [self._lookup.sure_match(slot, max_hit, rivals) for slot, max_hit in zip(slots, max_hits, strict=True)]
        hits = [state.index.block_of_node[nodes] for nodes in matches if nodes is not None]
        return hits if len(hits) == len(slots) and not any(state.pool.fence_counts[hit].any() for hit in hits) else None
