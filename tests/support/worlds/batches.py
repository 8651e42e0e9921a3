"""A step's Batch from one object per row: plain, and the measure of the engine's own assembly by array work.

And the Work of a step that decodes, for those that compute a batch without a scheduler.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeeper.engine_service.scheduler.plan import StepChanges, Work
from kvkeeper.engine_service.values.batch import Batch, IntArray


class WantLogits(enum.Enum):
    """Of which of a row's tokens the logits are wanted."""

    NONE = "none"  # a chunk that does not end its prompt
    LAST = "last"  # to sample the next token
    ALL = "all"  # prompt logprobs, verification of drafts


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledRow:
    """One sequence's part of a step.

    Attributes:
        token_ids: [Q] token ids to compute, at least one.
        context_len: tokens before them with K and V in the cache; the first one's position.
        block_table: [>= ceil((context_len + Q) / block_size)] block ids, the whole sequence's.
    """

    token_ids: Sequence[int] | IntArray
    context_len: int
    block_table: IntArray
    want_logits: WantLogits = WantLogits.LAST


def build_batch(rows: Sequence[ScheduledRow], block_size: int) -> Batch:
    """Flatten a step's rows. At least one row; what the rows promise is asserted."""
    num_rows = len(rows)
    assert num_rows > 0, "a step without rows has no batch"
    query_lens = np.fromiter((len(row.token_ids) for row in rows), np.int64, num_rows)
    context_lens = np.fromiter((row.context_len for row in rows), np.int64, num_rows)
    assert query_lens.min() > 0
    assert context_lens.min() >= 0
    if int(query_lens.max()) == 1:  # all decode: one pass over the rows instead of one small array per row
        token_ids = np.fromiter((row.token_ids[0] for row in rows), np.int64, num_rows)
    else:
        token_ids = np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows])
    seq_lens = context_lens + query_lens
    num_used = -(-seq_lens // block_size)
    block_tables = np.zeros((num_rows, int(num_used.max())), dtype=np.int32)
    for padded, row, used in zip(block_tables, rows, num_used.tolist(), strict=True):
        assert len(row.block_table) >= used, "the block table must cover the row's tokens"
        padded[:used] = row.block_table[:used]

    query_start_loc = _starts(query_lens)
    row_of_token = np.repeat(np.arange(num_rows), query_lens)
    positions = np.arange(len(token_ids)) + (context_lens - query_start_loc[:-1])[row_of_token]
    slot_mapping = block_tables[row_of_token, positions // block_size].astype(np.int64) * block_size
    slot_mapping += positions % block_size
    num_logits = np.fromiter((_num_logits(row) for row in rows), np.int64, num_rows)
    logit_start_loc = _starts(num_logits)
    ends = np.repeat(query_start_loc[1:] - logit_start_loc[1:], num_logits)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_start_loc=query_start_loc.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_tables=block_tables,
        logit_rows=np.arange(len(ends)) + ends,
        logit_start_loc=logit_start_loc.astype(np.int32),
    )


def _num_logits(row: ScheduledRow) -> int:
    if row.want_logits is WantLogits.LAST:
        return 1
    return len(row.token_ids) if row.want_logits is WantLogits.ALL else 0


def _starts(lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[0, lens[0], lens[0] + lens[1], ...]"""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lens)))


def decode_work(batch: Batch, num_context: npt.NDArray[np.int32], *, is_awaited: bool) -> Work:
    """The work of a step that decodes the rows of the batch, one behind the other, and draws each once."""
    assert batch.rows is not None
    rows, none = batch.rows, np.empty(0, np.int64)
    count = len(rows)
    return Work(
        rows=rows,
        num_new=np.ones(count, np.int32),
        serials=rows,
        num_prompt_tokens=0,
        copies=[],
        batch=batch,
        sample_rows=rows,
        awaited=np.full(count, is_awaited),
        sampled=[],
        guesses=[],
        logit_idx=np.arange(count),
        searched=[],
        search_idx=none,
        scores=(),
        unfinished=[],
        check_idx=none,
        sequences=[],
        num_context=num_context,
        changes=StepChanges((), (), (), ()),
    )
