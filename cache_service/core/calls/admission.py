"""CheckAdmission: whether a prompt could start whole now, later or never. Holds and changes nothing."""

import numpy as np

from ..pool_state import PoolState
from ..sequences.spans import refuse_retention
from ..tables.prefix_lookup import PrefixLookup
from ..values.sequence_args import Retention
from ..values.types import NO_INT32, Int32Array, SessionId
from ..values.views import Admission


class AdmissionCalls:
    """Checks for one pool whether a prompt could be started, now or ever."""

    def __init__(self, state: PoolState, lookup: PrefixLookup) -> None:
        self._state = state
        self._lookup = lookup

    def check(
        self,
        scope: str,
        token_ids: Int32Array | None,
        num_prompt_tokens: int,
        num_new_tokens: int,
        retention: Retention | None = None,
        session: SessionId | None = None,
    ) -> Admission:
        """num_prompt_tokens counts where token_ids are not given. With retention it need not start whole: what it holds at once
        is enough. session: that would create it, whose caller has a share of the slots. Raises UnknownSession."""
        state, config = self._state, self._state.config
        has_slot = state.sequences.num_free_slots > 0 if session is None else state.slot_limit(state.session(session)) is None
        block_size, hits = config.block_size, np.empty(0, np.int32)
        if token_ids is not None:
            num_prompt_tokens = len(token_ids)
            nodes = self._lookup.match_prompt(scope, token_ids)[: (num_prompt_tokens - 1) // block_size]
            nodes = self._lookup.usable(nodes)
            hits = state.index.block_of_node[nodes]
        num_required = -(-num_prompt_tokens // block_size)
        if retention is not None:
            refuse_retention(config.group_spans)
            hits = hits[: (retention.num_sink_tokens + retention.num_window_tokens) // block_size]
            num_required = min(num_required, max(retention.num_held_blocks(block_size), len(hits) + 1))
        if len(hits) * block_size < config.min_prefix_tokens:
            hits = hits[:0]
        num_hit_blocks = len(hits)
        if len(config.group_spans) > 1:
            blocks, hosts = state.index.held.hit_table(nodes[:num_hit_blocks] if num_hit_blocks else NO_INT32)
            hits = blocks[(blocks > 0) | (hosts > 0)]
            num_required = max(config.held_blocks(num_required), len(hits) + len(config.group_spans))
        num_required -= int(np.count_nonzero(hits))  # a block that is to be loaded takes room too
        num_room = state.blocks_left.beside(hits, state.num_spare())
        has_room = num_required <= num_room
        has_room = has_room or state.pin_preemption.could_pins_give_way(None, num_required - num_room, hits)
        limit = config.limit_with(retention)
        state.claims.forget_stale()
        if state.claims.would_be_later(priority=0):
            num_room, has_room = 0, False  # an earlier arrival waits, and none starts before it
        can_ever = num_prompt_tokens + num_new_tokens <= limit
        return Admission(
            can_now=can_ever and has_room and has_slot,
            can_ever=can_ever,
            num_hit_tokens=num_hit_blocks * block_size,
            num_required_blocks=num_required,
            num_available_blocks=max(0, num_room),
            limit_tokens=limit,
        )
