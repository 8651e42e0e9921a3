"""Replies that are told before their step is applied.

Owns the reply to a step that was foretold, also one that releases and starts sequences, as the pool stands. Changes nothing,
and answers None wherever the step itself has to be asked: where blocks are short, a start may find what the step commits, or
anything else is to be told. The step is applied right after its answer, before any other call, and its reply is the same.
"""

from typing import NamedTuple

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..values.step_columns import StepReply
from ..values.types import NO_INT32, NO_INT64, Int32Array, SessionId, StartResult
from .free_room import fits_in_free, num_wanted
from .reply import int32_of
from .waiting_starts import WaitingStart, WaitingStarts


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

    def __init__(self, state: PoolState, waiting: WaitingStarts) -> None:
        self._state = state
        self._sequences = state.sequences
        self._pool = state.pool
        self._waiting = waiting

    def reply(self, session: SessionId, step: OpenStep) -> StepReply | None:
        """The reply to a step if it comes now."""
        state, pool, seqs = self._state, self._pool, self._sequences
        owner = state.session(session)
        starts = self._starts(owner, step) if self._is_plain(owner, step) else None
        if starts is None:
            return None
        lens, roots, hits, sizes = list[int](), list[int](), list[Int32Array](), list[int]()
        num_revived = 0
        for start, max_new in zip(starts, step.start_max_new, strict=True):
            lens.append(min(len(start.hit) * seqs.block_size + max_new, start.num_tokens))
            sizes.append(seqs.num_blocks(lens[-1]) - len(start.hit))
            roots += [start.root] * sizes[-1]
            hits.append(start.hit)
            if len(start.hit):
                num_revived += pool.num_revived(start.hit)  # they begin differently, so no block is hit twice
        num_taken = len(roots) + len(step.growing)
        blocks = state.allocator.peek([*roots, *step.growing_roots])
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

    def _starts(self, owner: SessionState, step: OpenStep) -> list[WaitingStart] | None:
        """What starts; None where one is not lawful or not known, or there may be no room for all that the step grants."""
        if not step.start_ids and not step.has_releases:
            return []
        if not (step.start_ids or len(step.reserve_max)):  # it grants nothing
            return None
        if step.start_ids and min(step.start_max_new) < 1:
            return None
        starts = self._waiting.find(owner, step.start_ids, step.start_max_hit)
        if starts is None:
            return None
        num_blocks = num_wanted(self._state, [start.slot for start in starts], num_new=len(step.growing))
        return starts if fits_in_free(self._state, num_blocks, len(starts) + len(step.reserve_max)) else None
