"""The step that a session will most likely send next, worked out after the one before it was answered.

Owns what is likely: each sequence that a step granted slots commits them once that step has completed, with one new token, and
reserves one slot more with every step; one that has its most tokens reserves none. Which sequences are released and which start
is left open. Rules: a forecast is lawful by the checks of every step, and counts on its session's own sequences alone, which
nothing changes between two steps of the session; so steps of other sessions, and whatever else the pool does, leave it right.
Blocks are granted when the step comes, never before. What a forecast saves is finding, checking and measuring the sequences.
"""

from dataclasses import dataclass

import numpy as np

from ..sequences.sequence_table import SequenceTable
from ..sequences.session_state import Granted, SessionState
from ..values.distinct import has_repeats
from ..values.errors import CacheError
from ..values.step_columns import StepBatch
from ..values.types import Int32Array, Int64Array, SequenceState
from .validate import StepPlan, check_step

_ONE = np.int32(1)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step to come. batch: its columns, with zeros for tokens. plan: the slots of its items.

    held [n]: slots reserved so far by each reservation. growing [k]: the reservations that need a block more, at table index
    places [k], for tenants of roots [k].
    """

    batch: StepBatch
    plan: StepPlan
    held: Int32Array
    growing: Int64Array
    places: Int32Array
    roots: Int32Array

    def without(self, released: Int64Array) -> "Forecast | None":
        """The step if it releases these sequences, too; None where it cannot be told from here."""
        batch, plan = self.batch, self.plan
        stays = batch.reserve_ids != released[0] if len(released) == 1 else ~np.isin(batch.reserve_ids, released)
        kept = stays.nonzero()[0]
        if len(batch.reserve_ids) - len(kept) < len(released):  # one reserves nothing
            own_ids = np.concatenate([batch.reserve_ids, batch.commit_ids])
            if has_repeats(released) or not np.isin(released, own_ids).all():
                return None
        assert plan.reserve_slots is not None, "a forecast forks nothing"
        grows = stays[self.growing]
        reserved = batch.reserve_max[kept]
        return Forecast(
            batch._replace(reserve_ids=batch.reserve_ids[kept], reserve_min=reserved, reserve_max=reserved),
            plan._replace(reserve_slots=plan.reserve_slots[kept]),
            self.held[kept],
            kept.searchsorted(self.growing[grows]),
            self.places[grows],
            self.roots[grows],
        )


def foretell(seqs: SequenceTable, owner: SessionState) -> Forecast | None:
    """The forecast of the session's next step, its last one being applied; None where no step is likely."""
    if not owner.granted or owner.granted[-1].step_id != owner.step_id or seqs.num_retaining or seqs.num_groups > 1:
        return None
    last = owner.granted[-1]
    completing = next((granted for granted in owner.granted if granted.step_id == last.completes_next), None)
    if completing is None:
        return None
    commit_ids, commit_slots, lens = _still_there(seqs, owner, completing)
    reserve_ids, reserve_slots, held = (
        (commit_ids, commit_slots, lens) if last is completing else _still_there(seqs, owner, last)
    )
    wanted = held + _ONE
    fits = wanted <= seqs.max_tokens[reserve_slots]
    if np.count_nonzero(fits) < len(fits):
        reserve_ids, reserve_slots, held, wanted = reserve_ids[fits], reserve_slots[fits], held[fits], wanted[fits]
    if not len(commit_ids) or not len(reserve_ids) or np.count_nonzero(seqs.may_copy[reserve_slots]):
        return None
    if np.count_nonzero(seqs.num_tokens[commit_slots] != lens) or np.count_nonzero(seqs.num_reserved[reserve_slots] != held):
        return None
    batch = StepBatch(
        owner.step_id + 1,
        last.completes_next,
        commit_ids=commit_ids,
        commit_lens=lens,
        commit_num_new=np.ones(len(commit_ids), np.int32),
        commit_tokens=np.zeros(len(commit_ids), np.int32),
        reserve_ids=reserve_ids,
        reserve_min=wanted,
        reserve_max=wanted,
    )
    try:
        plan = check_step(seqs, owner, batch)
    except CacheError:
        return None
    size = np.int32(seqs.block_size)
    growing = (held % size == 0).nonzero()[0]
    return Forecast(batch, plan, held, growing, held[growing] // size, seqs.roots[reserve_slots[growing]])


def _still_there(seqs: SequenceTable, owner: SessionState, granted: Granted) -> tuple[Int64Array, Int64Array, Int32Array]:
    """Ids, slots and granted lengths of the sequences that run still."""
    ids, slots, lens = granted.ids, granted.slots, granted.lens
    there = (seqs.ids[slots] == ids) & (seqs.owners[slots] == owner.number) & (seqs.states[slots] == SequenceState.RUNNING)
    if np.count_nonzero(there) < len(there):
        return ids[there], slots[there], lens[there]
    return ids, slots, lens
