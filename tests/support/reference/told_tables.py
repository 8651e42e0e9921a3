"""Block tables as a client keeps them: of nothing but what it sent and what it was answered, by the rules of the protocol.

A pool's own tables must be these right after each step, or else a client that follows the comments of the proto reads and
writes other blocks than its sequences have.
"""

import numpy as np

from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import ItemResult, StartResult

Update = tuple[int, int, int]  # sequence id, table index, block


class ToldTables:
    """The tables of one session's running sequences, by sequence id."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.tables: dict[int, list[int]] = {}

    def apply(self, batch: StepBatch, reply: StepReply) -> None:
        """One step and its answer, group by group."""
        columns = (reply.update_ids, reply.update_table_idx, reply.update_block_ids)
        updates = list(zip(*(column.tolist() for column in columns), strict=True))
        num_early = len(updates) - int(np.count_nonzero(reply.copy_sources))  # copies-on-write come last
        assert reply.update_block_ids[num_early:].tolist() == reply.copy_destinations[reply.copy_sources != 0].tolist()
        self._update(updates[:num_early])
        self._fork(batch, reply)
        for sequence_id, num_tokens in zip(batch.truncate_ids.tolist(), batch.truncate_lens.tolist(), strict=True):
            del self.tables.get(sequence_id, [])[-(-num_tokens // self._block_size) :]
        for sequence_id in batch.release_ids.tolist():
            self.tables.pop(sequence_id, None)
        for sequence_id, result in zip(batch.swap_out_ids.tolist(), reply.swap_out_results.tolist(), strict=True):
            if result == ItemResult.OK:
                self.tables.pop(sequence_id, None)
        results = np.array([StartResult(result) is StartResult.STARTED for result in reply.start_results.tolist()], bool)
        self._take(batch.start_ids, reply.start_num_blocks, reply.start_block_ids, results)
        self._update(updates[num_early:])
        for item, block in zip(reply.new_block_item_idx.tolist(), reply.new_block_ids.tolist(), strict=True):
            self.tables[int(batch.reserve_ids[item])].append(block)
        self._take(reply.ready_ids, reply.ready_num_blocks, reply.ready_block_ids, np.ones(len(reply.ready_ids), bool))

    def _update(self, updates: list[Update]) -> None:
        for sequence_id, table_idx, block in updates:
            if sequence_id in self.tables:  # else it has been swapped out, and `ready` will tell
                self.tables[sequence_id][table_idx] = block

    def _fork(self, batch: StepBatch, reply: StepReply) -> None:
        columns = (batch.fork_parents, batch.fork_children, batch.fork_lens, reply.fork_results)
        for parent, child, num_tokens, result in zip(*(column.tolist() for column in columns), strict=True):
            if result == ItemResult.OK:
                self.tables[child] = self.tables[parent][: -(-num_tokens // self._block_size)]

    def _take(self, ids: np.ndarray, counts: np.ndarray, blocks: np.ndarray, there: np.ndarray) -> None:
        """Whole tables, concatenated."""
        ends = np.cumsum(counts)
        for sequence_id, end, count, is_there in zip(ids.tolist(), ends.tolist(), counts.tolist(), there.tolist(), strict=True):
            if is_there:
                self.tables[sequence_id] = blocks[end - count : end].tolist()
