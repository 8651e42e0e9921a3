"""Clearing the prefix cache, in slices that let steps pass.

Owns one clearing from its beginning to its end. Rules: nothing is published meanwhile, so that the end comes and nothing of
before is left; pins end at once; running sequences are published anew at the end, from their first block, because parts of them
may never be committed again and others wait for them.
"""

from typing import NamedTuple

from ..index.leaf_walk import LeafWalk
from ..pool_state import PoolState
from ..sequences.publisher import ALL_BLOCKS
from ..values.types import Int32Array, MatchEnd, SequenceState


class ClearResult(NamedTuple):
    """Counts of a clearing: blocks that became free, and entries of the index that were forgotten."""

    num_freed_blocks: int
    num_forgotten_blocks: int


class Clearing:
    """One clearing of one pool. It is to be ended, also where it was not finished."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._num_freed = self._num_forgotten = 0
        state.revision += 1
        state.pins.clear()
        state.publisher.pause()
        if state.below is not None:
            state.below.begin_clearing()
        self._walk = LeafWalk(state.index)

    def clear_some(self, max_blocks: int = ALL_BLOCKS) -> bool:
        """Forgets about so many cached blocks, those of partial nodes first. Whether any may be left."""
        state = self._state
        state.revision += 1
        partials = state.index.partials.clear(max_blocks)
        self._forget(partials)
        if len(partials) < max_blocks:
            nodes = self._walk.take_nodes(max_blocks - len(partials))
            self._forget(state.publisher.forget_nodes(nodes, MatchEnd.CLEARED))
        state.update_pressure()
        return not self._walk.is_over

    def _forget(self, blocks: Int32Array) -> None:
        self._num_freed += self._state.pool.unindex(blocks)
        self._num_forgotten += len(blocks)

    def end(self) -> ClearResult:
        """From now on everything that runs is published again."""
        state = self._state
        state.publisher.resume()
        if state.below is not None:
            state.below.end_clearing()
        for owner in state.sessions.values():
            slots = owner.ids.items()[1]
            state.publisher.note_commits(owner, slots[state.sequences.states[slots] == SequenceState.RUNNING])
        state.update_pressure()
        return ClearResult(self._num_freed, self._num_forgotten)
