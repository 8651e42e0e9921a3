"""Builds a step's Work and the model's Batch from rows of running sequences, by array work.

With hundreds of decoding sequences, one object per row would cost more than all the other bookkeeping of a step. Pure.
"""

from collections.abc import Mapping

import numpy as np

from ..values.batch import Batch, BatchRetention
from ..values.request import NO_TOKENS, Int32Array
from .plan import StepAnswer
from .state.running import IndexArray, RunningSequences, ranks
from .work import PromptScore, StepChanges, Work


def assemble_work(
    running: RunningSequences,
    rows: IndexArray,
    num_new: Int32Array,
    guesses: Mapping[int, Int32Array],
    answer: StepAnswer,
    changes: StepChanges,
) -> Work:
    """What a step computes: the next num_new [S] tokens of rows [S], behind the copies that the answer ordered.

    guesses, by row, count among the new tokens; they stand behind the row's own, and are no part of the sequence yet. Where the
    step before is still computed, this one goes on behind it, from tokens that it draws.
    """
    copies = list(zip(answer.copy_sources.tolist(), answer.copy_destinations.tolist(), strict=True))
    computed, num_prompt = running.num_computed[rows] + running.num_computing[rows], running.num_prompt[rows]
    num_drawing = running.num_drawing[rows]
    num_tokens = running.num_tokens[rows] + num_drawing
    num_guessed = np.maximum(computed + num_new - num_tokens, 0) if guesses else np.zeros_like(num_new)
    is_last = computed + num_new - num_guessed == num_tokens
    is_search = is_last & running.searches[rows]
    is_drawn = is_last & ~is_search
    num_logits = 1 + num_guessed
    scored = _scored(running, rows, computed)
    num_logits[scored] = num_new[scored]
    sampled = running.at(rows[is_drawn])
    ends = np.cumsum(num_logits)
    counts = 1 + num_guessed[is_drawn]
    logit_idx = (np.repeat(ends[is_drawn] - counts, counts) + ranks(counts)).tolist()
    guessed = [NO_TOKENS] * len(sampled)
    if guesses:
        ahead = zip(rows[is_drawn].tolist(), (counts - 1).tolist(), strict=True)
        guessed = [guesses[row][:count] if count else NO_TOKENS for row, count in ahead]
    awaited = num_drawing[is_drawn] > 0
    starts = np.cumsum(counts) - counts
    for at in np.flatnonzero(computed[is_drawn] < num_prompt[is_drawn]).tolist():  # ends of prompts; most steps have none
        sequence, idx = sampled[at], int(starts[at])
        if sequence.request.n > 1 and not sequence.num_output and not sequence.index:
            children = sequence.request.unforked
            sampled += children
            guessed += [NO_TOKENS] * len(children)
            logit_idx += [logit_idx[idx]] * len(children)
    return Work(
        rows=rows,
        num_new=num_new,
        serials=running.serials[rows],
        num_prompt_tokens=int((np.minimum(computed + num_new, num_prompt) - np.minimum(computed, num_prompt)).sum()),
        copies=copies,
        batch=assemble_batch(running, rows, num_new, num_logits) if len(rows) else None,
        sample_rows=rows[is_drawn],
        awaited=awaited,
        sampled=sampled,
        guesses=guessed,
        logit_idx=np.array(logit_idx, np.int64),
        searched=running.at(rows[is_search]),
        search_idx=ends[is_search] - 1,
        unfinished=running.at(rows[~is_last]),
        check_idx=ends[~is_last] - 1,
        scores=tuple(_score(running, rows[at], int(computed[at]), int(ends[at]), int(num_logits[at])) for at in scored),
        sequences=running.at(rows),
        num_context=computed,
        changes=changes,
    )


def _scored(running: RunningSequences, rows: IndexArray, computed: Int32Array) -> list[int]:
    """Indices of rows that compute prompt tokens to be scored: all their new tokens' logits are wanted."""
    scored = []
    for at in (computed + 1 < running.num_prompt[rows]).nonzero()[0].tolist():
        sequence = running.sequences[rows[at]]
        if sequence is not None and sequence.request.num_prompt_logprobs is not None and not sequence.index:
            scored.append(at)
    return scored


def _score(running: RunningSequences, row: int, computed: int, end: int, num_logits: int) -> PromptScore:
    """Each computed token predicts the next one; no token predicts the prompt's first."""
    sequence = running.sequences[row]
    assert sequence is not None
    num_top = sequence.request.num_prompt_logprobs
    assert num_top is not None
    targets = sequence.request.prompt[computed + 1 : computed + 1 + num_logits].tolist()
    return PromptScore(sequence, computed + 1, targets, end - num_logits, num_top)


def assemble_batch(running: RunningSequences, rows: IndexArray, num_new: Int32Array, num_logits: Int32Array) -> Batch:
    """The next num_new [S] tokens of rows [S]; the logits of the last num_logits [S] of them."""
    computed, block_size = running.num_computed[rows] + running.num_computing[rows], running.block_size
    seq_lens = computed + num_new
    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_new, out=query_start_loc[1:])
    logit_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_logits, out=logit_start_loc[1:])
    row_of_token = np.repeat(rows, num_new)
    positions = (np.repeat(computed, num_new) + ranks(num_new)).astype(np.int64)
    block_idx, offsets = np.divmod(positions, block_size)
    max_blocks = -(-int(seq_lens.max()) // block_size)
    group_tables = group_slots = None
    if running.num_groups > 1:
        tables = running.group_tables
        group_tables = tables[rows, 1:, :max_blocks]
        group_slots = tables[row_of_token, 1:, block_idx].T.astype(np.int64) * block_size + offsets
    token_ids, awaited_rows = running.tokens[row_of_token, positions].astype(np.int64), None
    if running.num_drawing[rows].any():
        is_awaited = positions >= running.num_tokens[row_of_token]  # there are no guesses in a step that runs ahead
        awaited_rows, token_ids[is_awaited] = np.where(is_awaited, row_of_token, -1), 0
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=running.tables[row_of_token, block_idx].astype(np.int64) * block_size + offsets,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=running.tables[rows, :max_blocks],
        logit_rows=(np.repeat(query_start_loc[1:] - num_logits, num_logits) + ranks(num_logits)).astype(np.int64),
        logit_start_loc=logit_start_loc,
        retention=_retention(running, rows, seq_lens) if running.num_retaining else None,
        group_tables=group_tables,
        group_slots=group_slots,
        awaited_rows=awaited_rows,
        rows=rows,
    )


def _retention(running: RunningSequences, rows: IndexArray, seq_lens: Int32Array) -> BatchRetention | None:
    """Of the rows that are longer than what they keep."""
    sinks, windows = running.num_sink[rows], running.num_window[rows]
    is_cut = (windows > 0) & (seq_lens > sinks + windows)
    return BatchRetention(np.where(is_cut, sinks, 0), np.where(is_cut, windows, 0)) if is_cut.any() else None
