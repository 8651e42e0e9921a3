"""Plain steps: each running sequence decodes one token, and nothing comes, goes or waits that could.

Most steps are plain, and with hundreds of streams they are many a second. Planner, AnswerApplier and batch_builder are right
for them, too; what is here gives the same values from fewer array operations, and touches no object of a sequence. Where a step
is not plain, or cannot be told to be, the answer is None and they have it. Tests hold the two to each other. Pure.
"""

import numpy as np
import numpy.typing as npt

from ..values.batch import Batch
from ..values.request import NO_TOKENS, Int32Array
from .plan import Plan, StepAnswer
from .state.running import IndexArray, RunningSequences
from .state.scheduler_state import SchedulerState
from .work import NO_CHANGES, Work

_NO_IDS, _NO_COUNTS = np.empty(0, np.int64), np.empty(0, np.int32)


def plain_plan(state: SchedulerState) -> Plan | None:
    """The plan of a plain step."""
    running, limits = state.running, state.limits
    if not _may_be_plain(state):
        return None
    rows = running.order
    if running.ended[rows].any():
        return None
    num_computed, num_drawing = running.num_computed[rows], running.num_drawing[rows]
    computed = num_computed + running.num_computing[rows]
    is_decode = (running.num_tokens[rows] + num_drawing - computed == 1) & (computed >= running.num_prompt[rows])
    if not (is_decode & (running.num_left[rows] > num_drawing) & (num_computed > running.num_committed[rows])).all():
        return None
    first_new = running.num_known[rows]
    num_new = running.num_tokens[rows] - first_new
    if not (num_new == 1).all():
        return None
    num_wanted = computed + 1
    ids = running.sequence_ids[rows]
    assert len(rows) <= limits.token_budget, "each row may compute a token a step"
    return Plan(
        commit_ids=ids,
        commit_lens=num_computed,
        commit_num_new=num_new,
        commit_tokens=running.tokens[rows, first_new],
        fork_parents=_NO_IDS,
        fork_children=_NO_IDS,
        fork_lens=_NO_COUNTS,
        release_ids=_NO_IDS,
        swap_out_ids=_NO_IDS,
        swap_in_ids=_NO_IDS,
        start_ids=_NO_IDS,
        start_max_new=_NO_COUNTS,
        start_max_hit=_NO_COUNTS,
        start_may_wait=_NO_COUNTS,
        reserve_ids=ids,
        reserve_min=num_wanted,
        reserve_max=num_wanted,
        guesses={},
        commit_rows=rows,
        forked=(),
        released=(),
        swapped_out=(),
        swapped_in=(),
        started=(),
        reserve_rows=rows,
        is_plain=True,
    )


def _may_be_plain(state: SchedulerState) -> bool:
    """Whether nothing is there beside rows that run, all of one client or of clients that do not share steps."""
    running, waiting, limits = state.running, state.waiting, state.limits
    if waiting.releases or state.loading or state.unforked or (waiting.sequences and running.num_free_rows):
        return False
    if running.num_searching or running.num_retaining or running.num_groups > 1 or not running.by_id:
        return False
    return len(running.by_id) <= limits.decode_budget and not (limits.client_shares and running.num_clients > 1)


def apply_plain(state: SchedulerState, plan: Plan, answer: StepAnswer) -> Work | None:
    """Apply the answer to a plain plan. None: something has come between; then nothing has changed."""
    running, rows = state.running, plan.reserve_rows
    if len(answer.update_ids) or len(answer.copy_destinations) or len(answer.ready_ids) or answer.num_reclaim_hint:
        return None
    if running.ended[rows].any() or not np.array_equal(answer.reserve_reserved, plan.reserve_max):
        return None
    computed, num_drawing = running.num_computed[rows] + running.num_computing[rows], running.num_drawing[rows]
    if (computed + 1 != plan.reserve_max).any() or (running.num_tokens[rows] + num_drawing != plan.reserve_max).any():
        return None
    running.num_committed[plan.commit_rows] = plan.commit_lens
    running.num_known[plan.commit_rows] += plan.commit_num_new
    state.headroom.note_answer(answer)
    state.headroom.note_growth()
    if len(answer.new_block_ids):
        running.append_blocks(rows, answer.new_block_item_idx, answer.new_block_ids, answer.new_block_groups)
    running.num_reserved[rows] = plan.reserve_max
    work = _plain_work(running, rows, computed, num_drawing)
    running.num_computing[rows] += 1
    running.num_drawing[rows] += 1
    state.num_plans += 1
    return work


def _plain_work(running: RunningSequences, rows: IndexArray, computed: Int32Array, num_drawing: Int32Array) -> Work:
    count = len(rows)
    sequences = running.in_order if rows is running.order else running.at(rows)
    awaited, places = num_drawing > 0, np.arange(count, dtype=np.int64)
    return Work(
        rows=rows,
        num_new=np.ones(count, np.int32),
        serials=running.serials[rows],
        num_prompt_tokens=0,
        copies=[],
        batch=_plain_batch(running, rows, computed, awaited),
        sample_rows=rows,
        awaited=awaited,
        sampled=sequences,
        guesses=[NO_TOKENS] * count,
        logit_idx=places,
        searched=[],
        search_idx=_NO_IDS,
        scores=(),
        unfinished=[],
        check_idx=_NO_IDS,
        sequences=sequences,
        num_context=computed,
        changes=NO_CHANGES,
    )


def _plain_batch(running: RunningSequences, rows: IndexArray, computed: Int32Array, awaited: npt.NDArray[np.bool_]) -> Batch:
    count, block_size = len(rows), running.block_size
    positions, starts = computed.astype(np.int64), np.arange(count + 1, dtype=np.int32)
    block_idx = positions // block_size
    token_ids, awaited_rows = running.tokens[rows, positions].astype(np.int64), None
    if awaited.any():
        token_ids[awaited] = 0
        awaited_rows = np.where(awaited, rows, -1)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=running.tables[rows, block_idx].astype(np.int64) * block_size + positions - block_idx * block_size,
        query_start_loc=starts,
        seq_lens=computed + 1,
        block_tables=running.tables[rows, : int(block_idx.max()) + 1],
        logit_rows=np.arange(count, dtype=np.int64),
        logit_start_loc=starts,
        awaited_rows=awaited_rows,
        rows=rows,
    )
