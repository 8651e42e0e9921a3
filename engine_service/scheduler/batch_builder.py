"""Builds a step's Work and the model's Batch from rows of running sequences, by array work.

With hundreds of decoding sequences, one object per row would cost more than all the other bookkeeping of a step. Pure.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.batch import Batch, BatchRetention
from ..values.request import NO_TOKENS, Int32Array, Sequence
from .plan import PromptScore, StepAnswer, StepChanges, Work
from .running import NO_IDS, IndexArray, Int64Array, RunningSequences, Runs, choose


class RowParts(NamedTuple):
    """The rows [S] that a step computes, and of each: how many tokens, behind how many, and of how many that there are.

    num_tokens counts those that the step before draws, num_drawing of them.
    """

    rows: IndexArray
    num_new: Int32Array
    computed: Int32Array
    num_tokens: Int32Array
    num_drawing: Int32Array


def rows_to_compute(running: RunningSequences, rows: IndexArray, targets: Int32Array, *, has_guesses: bool) -> RowParts:
    """Those of these rows that have something to compute up to their targets, first the ones with a single token.

    Since the plan was made, a step may have ended: sequences with it, or short of what was counted on when it failed.
    """
    rows, targets = choose(~running.ended[rows], rows, targets)
    computed, num_drawing = running.num_computed[rows] + running.num_computing[rows], running.num_drawing[rows]
    num_tokens = running.num_tokens[rows] + num_drawing
    num_new = (targets if has_guesses else np.minimum(targets, num_tokens)) - computed
    columns = choose(num_new > 0, rows, num_new, computed, num_tokens, num_drawing)
    if np.count_nonzero(has_several := columns[1] > 1):
        order = np.argsort(has_several, kind="stable")
        columns = tuple(column[order] for column in columns)
    return RowParts(*columns)


def assemble_work(
    running: RunningSequences, part: RowParts, guesses: Mapping[int, Int32Array], answer: StepAnswer, changes: StepChanges
) -> Work:
    """What a step computes, behind the copies that the answer ordered.

    guesses, by row, count among the new tokens; they stand behind the row's own, and are no part of the sequence yet. Where the
    step before is still computed, this one goes on behind it, from tokens that it draws.
    """
    rows, num_new, computed, num_tokens, _ = part
    ends, num_prompt = computed + num_new, running.num_prompt[rows]
    is_last, in_prompt = ends >= num_tokens, computed < num_prompt
    tokens = drawn = logits = Runs(num_new)  # one of each, where each row has one token
    if guesses or not tokens.are_single:
        drawn = logits = Runs(np.maximum(ends - num_tokens, 0) + 1)
    num_prompt_tokens, scored = 0, list[int]()
    if has_prompts := bool(np.count_nonzero(in_prompt)):
        num_prompt_tokens = int((np.minimum(ends, num_prompt) - computed)[in_prompt].sum())
        if scored := _scored(running, part):
            num_logits = drawn.counts.copy()
            num_logits[scored] = num_new[scored]
            logits = Runs(num_logits)
    logit_ends, is_drawn = logits.start_loc[1:], is_last
    searched, unfinished, search_idx, check_idx = list[Sequence](), list[Sequence](), NO_IDS, NO_IDS
    if running.num_searching:
        is_search, is_drawn = is_last & running.searches[rows], is_last & ~running.searches[rows]
        searched, search_idx = running.at(rows[is_search]), _last_before(logit_ends[is_search])
    if np.count_nonzero(is_last) < len(rows):
        unfinished, check_idx = running.at(rows[~is_last]), _last_before(logit_ends[~is_last])
    draws = _draw(running, part, is_drawn, drawn.counts, logit_ends, guesses)
    if has_prompts:
        draws = _with_continuations(draws, in_prompt[is_drawn])
    return Work(
        rows=rows,
        num_new=num_new,
        serials=running.serials[rows],
        num_prompt_tokens=num_prompt_tokens,
        copies=list(zip(answer.copy_sources.tolist(), answer.copy_destinations.tolist(), strict=True)),
        batch=assemble_batch(running, part, tokens, logits) if len(rows) else None,
        sample_rows=draws.sample_rows,
        awaited=draws.awaited,
        sampled=draws.sampled,
        guesses=draws.guesses,
        logit_idx=draws.logit_idx,
        searched=searched,
        search_idx=search_idx,
        scores=tuple([_score(running, rows[at], int(computed[at]), int(logit_ends[at]), int(num_new[at])) for at in scored]),
        unfinished=unfinished,
        check_idx=check_idx,
        sequences=running.at(rows),
        num_context=computed,
        changes=changes,
    )


class _Draws(NamedTuple):
    """What a step draws; Work explains it."""

    sample_rows: IndexArray
    awaited: npt.NDArray[np.bool_]
    sampled: list[Sequence]
    guesses: list[Int32Array]
    logit_idx: Int64Array


def _draw(
    running: RunningSequences,
    part: RowParts,
    is_drawn: npt.NDArray[np.bool_],
    counts: Int32Array,
    logit_ends: Int32Array,
    guesses: Mapping[int, Int32Array],
) -> _Draws:
    """For the rows that are drawn for, so many tokens [S] from the logits that end there [S]."""
    rows, counts, ends, num_drawing = choose(is_drawn, part.rows, counts, logit_ends, part.num_drawing)
    if not guesses:
        return _Draws(rows, num_drawing > 0, running.at(rows), [NO_TOKENS] * len(rows), _last_before(ends))
    ahead = zip(rows.tolist(), counts.tolist(), strict=True)
    own = [guesses[row][: count - 1] if count > 1 else NO_TOKENS for row, count in ahead]
    return _Draws(rows, num_drawing > 0, running.at(rows), own, Runs(counts).expand((ends - counts).astype(np.int64)))


def _with_continuations(draws: _Draws, in_prompt: npt.NDArray[np.bool_]) -> _Draws:
    """Continuations that wait for the end of their prompt get their first tokens from its logits: it has no guesses."""
    children, logit_idx = list[Sequence](), list[int]()
    for at in np.flatnonzero(in_prompt).tolist():
        sequence = draws.sampled[at]
        if sequence.request.n > 1 and not sequence.num_output and not sequence.index:
            unforked = sequence.request.unforked
            children += unforked
            logit_idx += [int(draws.logit_idx[sum(map(len, draws.guesses[:at])) + at])] * len(unforked)
    if not children:
        return draws
    return draws._replace(
        sampled=[*draws.sampled, *children],
        guesses=[*draws.guesses, *[NO_TOKENS] * len(children)],
        logit_idx=np.append(draws.logit_idx, np.array(logit_idx, np.int64)),
    )


def _last_before(ends: Int32Array) -> Int64Array:
    return ends.astype(np.int64) - 1


def _scored(running: RunningSequences, part: RowParts) -> list[int]:
    """Indices of rows that compute prompt tokens to be scored: all their new tokens' logits are wanted."""
    scored = []
    for at in (part.computed + 1 < running.num_prompt[part.rows]).nonzero()[0].tolist():
        sequence = running.sequences[part.rows[at]]
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


def assemble_batch(running: RunningSequences, part: RowParts, tokens: Runs, logits: Runs) -> Batch:
    """The next tokens of these rows. tokens, logits: how many of each row, the logits at the end."""
    rows, num_new, computed, _, num_drawing = part
    block_size, seq_lens = running.block_size, computed + num_new
    query_start_loc, row_of_token = tokens.start_loc, tokens.repeat(rows)
    positions = tokens.expand(computed).astype(np.int64)
    block_idx = positions // block_size
    offsets = positions - block_idx * block_size
    max_blocks = -(-int(seq_lens.max()) // block_size)
    group_tables = group_slots = None
    if running.num_groups > 1:
        tables = running.group_tables
        group_tables = tables[rows, 1:, :max_blocks]
        group_slots = tables[row_of_token, 1:, block_idx].T.astype(np.int64) * block_size + offsets
    token_ids, awaited_rows = running.tokens[row_of_token, positions].astype(np.int64), None
    if np.count_nonzero(num_drawing):
        is_awaited = positions >= running.num_tokens[row_of_token]  # there are no guesses in a step that runs ahead
        awaited_rows, token_ids[is_awaited] = np.where(is_awaited, row_of_token, -1), 0
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=running.tables[row_of_token, block_idx].astype(np.int64) * block_size + offsets,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=running.tables[rows, :max_blocks],
        logit_rows=logits.expand(query_start_loc[1:] - logits.counts).astype(np.int64),
        logit_start_loc=logits.start_loc,
        retention=_retention(running, rows, seq_lens) if running.num_retaining else None,
        group_tables=group_tables,
        group_slots=group_slots,
        awaited_rows=awaited_rows,
        rows=rows,
    )


def _retention(running: RunningSequences, rows: IndexArray, seq_lens: Int32Array) -> BatchRetention | None:
    """The retention of the rows that are longer than what they keep."""
    sinks, windows = running.num_sink[rows], running.num_window[rows]
    is_cut = (windows > 0) & (seq_lens > sinks + windows)
    return BatchRetention(np.where(is_cut, sinks, 0), np.where(is_cut, windows, 0)) if is_cut.any() else None
