"""From rows of running sequences to the model's Batch, by array work.

One object per row would, for hundreds of decoding sequences, cost more than all the rest of a step's bookkeeping. Pure.
"""

import numpy as np

from engine_service.batch import Batch
from engine_service.request import Int32Array
from engine_service.running import IndexArray, RunningSequences, ranks


def assemble_batch(running: RunningSequences, rows: IndexArray, num_new: Int32Array, num_logits: Int32Array) -> Batch:
    """The next num_new [S] tokens of rows [S]; the logits of the last num_logits [S] of them."""
    computed, block_size = running.num_computed[rows], running.block_size
    seq_lens = computed + num_new
    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_new, out=query_start_loc[1:])
    logit_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_logits, out=logit_start_loc[1:])
    row_of_token = np.repeat(rows, num_new)
    positions = (np.repeat(computed, num_new) + ranks(num_new)).astype(np.int64)
    block_idx, offsets = np.divmod(positions, block_size)
    max_blocks = -(-int(seq_lens.max()) // block_size)
    return Batch(
        token_ids=running.tokens[row_of_token, positions].astype(np.int64),
        positions=positions,
        slot_mapping=running.tables[row_of_token, block_idx].astype(np.int64) * block_size + offsets,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=running.tables[rows, :max_blocks],
        logit_rows=(np.repeat(query_start_loc[1:] - num_logits, num_logits) + ranks(num_logits)).astype(np.int64),
        logit_start_loc=logit_start_loc,
    )
