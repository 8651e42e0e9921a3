"""Block tables as a client keeps them: of nothing but what it sent and what it was answered, by the rules of the protocol.

A pool's own tables must be these right after each step, or else a client that follows the comments of the proto reads and
writes other blocks than its sequences have.
"""

import numpy as np

from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import ItemResult, StartResult

Update = tuple[int, int, int, int]  # sequence id, group, table index, block


class ToldTables:
    """The tables of one session's running sequences, by sequence id."""

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.groups: dict[int, list[list[int]]] = {}  # of the groups of layers behind the first, where there are any
        self._reserved: dict[int, int] = {}  # slots
        self._num_groups = num_groups

    def apply(self, batch: StepBatch, reply: StepReply) -> None:
        """One step and its answer, group by group."""
        of_groups = reply.update_groups if len(reply.update_groups) else np.zeros(len(reply.update_ids), np.int32)
        columns = (reply.update_ids, of_groups, reply.update_table_idx, reply.update_block_ids)
        updates = list(zip(*(column.tolist() for column in columns), strict=True))
        num_early = len(updates) - int(np.count_nonzero(reply.copy_sources))  # copies-on-write come last
        assert reply.update_block_ids[num_early:].tolist() == reply.copy_destinations[reply.copy_sources != 0].tolist()
        self._update(updates[:num_early])
        self._fork(batch, reply)
        for row, (sequence_id, num_tokens) in enumerate(
            zip(batch.truncate_ids.tolist(), batch.truncate_lens.tolist(), strict=True)
        ):
            if len(reply.truncate_committed) and num_tokens >= self._reserved.get(sequence_id, 0):
                continue
            kept = int(reply.truncate_committed[row]) if len(reply.truncate_committed) else num_tokens
            self._reserved[sequence_id] = kept
            for table in self._all(sequence_id):
                del table[-(-kept // self._block_size) :]
        for sequence_id in batch.release_ids.tolist():
            self.tables.pop(sequence_id, None)
            self.groups.pop(sequence_id, None)
        for sequence_id, result in zip(batch.swap_out_ids.tolist(), reply.swap_out_results.tolist(), strict=True):
            if result == ItemResult.OK:
                self.tables.pop(sequence_id, None)
                self.groups.pop(sequence_id, None)
        results = np.array([StartResult(result) is StartResult.STARTED for result in reply.start_results.tolist()], bool)
        self._take(batch.start_ids, reply.start_num_blocks, reply.start_block_ids, results)
        self._reserved.update(zip(batch.start_ids[results].tolist(), reply.start_reserved[results].tolist(), strict=True))
        self._update(updates[num_early:])
        of_groups = reply.new_block_groups if len(reply.new_block_groups) else np.zeros(len(reply.new_block_ids), np.int32)
        columns = (reply.new_block_item_idx, of_groups, reply.new_block_ids)
        for item, group, block in zip(*(column.tolist() for column in columns), strict=True):
            self._all(int(batch.reserve_ids[item]))[group].append(block)
        columns = (batch.reserve_ids, batch.reserve_min, reply.reserve_reserved)
        for sequence_id, least, granted in zip(*(column.tolist() for column in columns), strict=True):
            if granted >= least:
                self._reserved[sequence_id] = granted
        self._take(reply.ready_ids, reply.ready_num_blocks, reply.ready_block_ids, np.ones(len(reply.ready_ids), bool))
        self._reserved.update(zip(reply.ready_ids.tolist(), reply.ready_reserved.tolist(), strict=True))

    def _update(self, updates: list[Update]) -> None:
        for sequence_id, group, table_idx, block in updates:
            if sequence_id in self.tables:  # else it has been swapped out, and `ready` will tell
                self._all(sequence_id)[group][table_idx] = block

    def _all(self, sequence_id: int) -> list[list[int]]:
        """The tables of all groups."""
        return [self.tables.get(sequence_id, []), *self.groups.get(sequence_id, [])]

    def _fork(self, batch: StepBatch, reply: StepReply) -> None:
        columns = (batch.fork_parents, batch.fork_children, batch.fork_lens, reply.fork_results)
        for row, (parent, child, num_tokens, result) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if result == ItemResult.OK:
                if len(reply.fork_committed):
                    num_tokens = int(reply.fork_committed[row])
                self._reserved[child] = num_tokens
                num_blocks = -(-num_tokens // self._block_size)
                self.tables[child] = self.tables[parent][:num_blocks]
                self.groups[child] = [table[:num_blocks] for table in self.groups.get(parent, [])]

    def _take(self, ids: np.ndarray, counts: np.ndarray, blocks: np.ndarray, there: np.ndarray) -> None:
        """Whole tables, concatenated."""
        ends = np.cumsum(counts) * self._num_groups
        for sequence_id, end, count, is_there in zip(ids.tolist(), ends.tolist(), counts.tolist(), there.tolist(), strict=True):
            if is_there:
                first, *others = blocks[end - count * self._num_groups : end].reshape(self._num_groups, count).tolist()
                self.tables[sequence_id], self.groups[sequence_id] = first, others
