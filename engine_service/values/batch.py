"""Batch: one step's rows as flat arrays, the form in which the model reads them.

A pure value. A row is one sequence's part of the step, a decode being a row of one token; there is no other difference
between prefill and decode here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class BatchRetention:
    """Sink and window of each row, int32 [S]; window 0: it keeps everything, or sees all of its keys as yet."""

    sink_lens: npt.NDArray[np.int32]
    window_lens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """S rows, T tokens, R of them with logits. Ranges are half-open.

    Attributes:
        token_ids, positions, slot_mapping: int64 [T].
        query_start_loc: int32 [S + 1]; row s has the tokens [query_start_loc[s], query_start_loc[s + 1]).
        seq_lens: int32 [S], context and queries.
        block_tables: int32 [S, max_blocks], padded with the null block.
        logit_rows: int64 [R], tokens whose logits are wanted, ascending.
        logit_start_loc: int32 [S + 1]; row s has the logits [logit_start_loc[s], logit_start_loc[s + 1]).
        awaited_rows: int64 [T], for a token that the step before draws, the row that it draws it for, of all rows that there
            are; -1: the token is in token_ids. None: all of them are.
        rows: int64 [S], which of all rows that there are each is; None: what they draw is taken from nowhere there.
        group_tables: int32 [S, groups - 1, max_blocks], of the groups of layers behind the first; None: there is one group.
        group_slots: int64 [groups - 1, T], likewise.
        retention: of a batch with rows that do not see all of their keys (kernels/attention/retention.py); mostly None.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int64]
    logit_start_loc: npt.NDArray[np.int32]
    retention: BatchRetention | None = None
    group_tables: npt.NDArray[np.int32] | None = None
    group_slots: npt.NDArray[np.int64] | None = None
    awaited_rows: npt.NDArray[np.int64] | None = None
    rows: npt.NDArray[np.int64] | None = None

    @property
    def only_decodes(self) -> bool:
        """Whether each row has one token, whose logits are wanted, and sees all of its keys."""
        count = len(self.seq_lens)
        if self.retention is not None or len(self.token_ids) != count:
            return False
        return len(self.logit_rows) == count and np.array_equal(self.logit_rows, np.arange(count))
