"""Whether somebody is computing, right now, the prefix that a waiting sequence is about to compute too.

Looked up when a start asks for it and kept nowhere: the running sequences whose next block is the one wanted are found by one
comparison of columns, and a pool in which nobody asks pays nothing.
"""

import numpy as np

from cache_service.block_tables import BlockTables
from cache_service.types import SequenceState


def computing_len(tables: BlockTables, slot: int, max_hit: int, ended: list[int]) -> int:
    """Tokens, whole blocks, that the waiting sequence could hit once a running one has committed what it was granted.

    0 where that is no more than it could hit now, with max_hit as the most that it takes. ended: numbers of sessions that will
    commit no more.
    """
    seqs, size = tables.sequences, tables.sequences.block_size
    start = len(tables.match(slot, max_hit)) * size
    end = min(min(max_hit, int(seqs.num_tokens[slot]) - 1) // size, int(seqs.share_limits[slot])) * size
    if end <= start or not tables.prefix_caching:
        return 0
    lens = np.minimum(np.minimum(seqs.num_tokens, seqs.num_reserved), seqs.share_limits.astype(np.int64) * size)
    rivals = np.flatnonzero((seqs.states == SequenceState.RUNNING) & (seqs.roots == seqs.roots[slot]) & (lens >= start + size))
    if ended:
        rivals = rivals[~np.isin(seqs.owners[rivals], ended)]
    next_blocks = seqs.tokens[rivals, start : start + size]
    longest = 0
    for rival in rivals[(next_blocks == seqs.tokens[slot, start : start + size]).all(1)].tolist():
        known = min(int(lens[rival]), end)
        differ = np.flatnonzero(seqs.tokens[rival, :known] != seqs.tokens[slot, :known])
        num_common = (int(differ[0]) if len(differ) else known) // size * size
        longest = max(longest, num_common)
    return longest if longest > start and longest >= tables.min_prefix_tokens else 0
