"""What one session holds in one pool.

Owns the session's sequence ids, its fences (blocks it dropped while a step in flight may still touch them), the copies that it
has to make and that may not have run, the table updates that were not reported to it yet, and the logits its starts were
promised. Rule: fences are lifted, and copies count as run, in the order of their steps. Does not know leases, epochs or the
wire.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..blocks.block_pool import BlockPool
from ..values.types import Executor, Int32Array, Int64Array, SessionId
from .id_map import IdMap


class TableUpdates(NamedTuple):
    """Table entries that were replaced without the session knowing; columns of equal length."""

    slots: Int64Array
    sequence_ids: Int64Array
    table_idx: Int32Array
    blocks: Int32Array


class HeldLogits(NamedTuple):
    """Blocks promised to the start of a step; held until the step is completed."""

    step_id: int
    logits: bytes


@dataclass(slots=True)
class SessionState:
    """One session in one pool. step_id: the last step applied; completed_step_id: all device work up to it has finished."""

    number: int
    session: SessionId
    executor: Executor
    caller: str = ""  # that its sequences count for; empty where callers cannot be distinguished
    ids: IdMap = field(default_factory=IdMap)
    step_id: int = 0
    completed_step_id: int = 0
    may_still_write: bool = False  # it has ended, and its process may still write the blocks that it could write
    takes_partial: bool = False  # it leaves partly filled blocks, and starts on them
    is_one_item: bool = False  # it has made a one-item call: it is shown its tables with each answer
    fences: deque[tuple[int, Int32Array]] = field(default_factory=deque)
    copies: deque[tuple[int, Int32Array]] = field(default_factory=deque)  # step, and the blocks that its copies fill
    logits: dict[int, HeldLogits] = field(default_factory=dict)  # by sequence id, of starts that are full hits
    updates: list[TableUpdates] = field(default_factory=list)  # for the next reply, as far as they still hold

    def drop_blocks(self, pool: BlockPool, blocks: Int32Array, until: int) -> None:
        """Gives up one reference per entry; nothing of it is reused before step `until` has completed."""
        fenced = until > self.completed_step_id
        pool.drop_references(blocks, fenced=fenced)
        if fenced:
            at = len(self.fences)
            while at and self.fences[at - 1][0] > until:  # a release after copies of the same step
                at -= 1
            self.fences.insert(at, (until, blocks))

    def note_copies(self, pool: BlockPool, destinations: Int32Array) -> None:
        """The step being applied makes the session fill these blocks, which only its own sequences hold."""
        pool.is_filling[destinations] = True
        self.copies.append((self.step_id, destinations))

    def complete_steps(self, pool: BlockPool, step_id: int) -> None:
        """All device work up to step_id has finished; a lower id than before changes nothing."""
        self.completed_step_id = max(self.completed_step_id, step_id)
        while self.copies and self.copies[0][0] <= self.completed_step_id:
            pool.is_filling[self.copies.popleft()[1]] = False
        while self.fences and self.fences[0][0] <= self.completed_step_id:
            pool.lift_fences(self.fences.popleft()[1])
        if self.logits:
            self.logits = {i: held for i, held in self.logits.items() if held.step_id > self.completed_step_id}

    def fenced_blocks(self) -> Int32Array:
        """One entry per fence, for the session's end and for audits."""
        return np.concatenate([np.empty(0, np.int32), *(blocks for _, blocks in self.fences)])

    def filling_blocks(self) -> Int32Array:
        """What copies in flight fill, wherever it is held now; for the session's end and for audits."""
        return np.concatenate([np.empty(0, np.int32), *(blocks for _, blocks in self.copies)])

    def end_copies(self, pool: BlockPool) -> None:
        """The session ends: whether they run is not known, and no session is notified."""
        pool.is_filling[self.filling_blocks()] = False
        self.copies.clear()
