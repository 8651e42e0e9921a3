"""TinyColumns: TinyCache behind the scheduler's columns, for tests of the scheduler without the core."""

from typing import Any

import numpy as np

from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import ItemResult, PressureLevel, StartResult
from kvkeeper.cache_service.tiny_cache import Commit, Fork, Reply, Reserve, Start, TinyCache
from kvkeeper.engine_service.scheduler.plan import Plan


class OutOfSequences(Exception):
    """There are as many sequences as there may be."""


class TinyColumns(TinyCache):
    """It checks itself after every step, has a bound of sequences, and refuses forks and reports waiting engines on demand."""

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int = 256) -> None:
        super().__init__(num_blocks, block_size)
        self.max_sequences = max_sequences
        self.num_refused_forks_to_come = 0
        self.forks_done: list[bool] = []  # of the step
        self.num_reclaim_hint = 0  # in every reply
        self.ended_orders: tuple[list[int], list[int]] = ([], [])  # never any: there is no host tier

    @property
    def num_reusable_blocks(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self.cached)

    def num_blocks_in_table(self, sequence_id: int) -> int:
        return len(self.sequences[sequence_id].table)

    def create(  # type: ignore[override]  # as the core does
        self, sequence_id: int, tokens: list[int], max_tokens: int, priority: int = 0, start_number: int = 0
    ) -> int:
        """Returns the start number, which this cache does not know. Raises OutOfSequences."""
        if len(self.sequences) >= self.max_sequences:
            raise OutOfSequences
        super().create(sequence_id, tokens, max_tokens)
        return 0

    def fork(self, fork: Fork) -> None:
        is_refused = self.num_refused_forks_to_come > 0
        self.num_refused_forks_to_come -= is_refused
        self.forks_done.append(not is_refused and len(self.sequences) < self.max_sequences)
        if self.forks_done[-1]:
            super().fork(fork)

    def reserve(self, item: int, reserve: Reserve, reply: Reply, *, may_take: bool) -> bool:
        if reserve.sequence_id in self.sequences:
            return super().reserve(item, reserve, reply, may_take=may_take)
        reply.reserved.append(0)  # a child whose fork was refused
        return may_take

    def clear(self) -> None:
        """As an operator does: all that is cached is forgotten."""
        self.free += self.cached
        self.index, self.prefix_of, self.cached = {}, {}, {}

    def step(self, plan: Plan) -> StepReply:  # type: ignore[override]  # the same step in columns
        ids = (plan.commit_ids, plan.release_ids, plan.start_ids, plan.reserve_ids, plan.fork_children)
        assert all(len(set(column.tolist())) == len(column) for column in ids), "an id twice in one list"
        new = iter(plan.commit_tokens.tolist())
        commits = rows(plan.commit_ids, plan.commit_lens, plan.commit_num_new)
        starts = [Start(*row) for row in rows(plan.start_ids, plan.start_max_new, plan.start_max_hit)]
        self.forks_done.clear()
        reply = super().step(
            commits=[Commit(each, length, tuple(next(new) for _ in range(num_new))) for each, length, num_new in commits],
            forks=[Fork(*row) for row in rows(plan.fork_parents, plan.fork_children, plan.fork_lens)],
            releases=plan.release_ids.tolist(),
            starts=starts,
            reserves=[Reserve(*row) for row in rows(plan.reserve_ids, plan.reserve_min, plan.reserve_max)],
        )
        self.check()
        return self._columns(starts, reply)

    def _columns(self, starts: list[Start], reply: Reply) -> StepReply:
        started = [self.sequences[start.sequence_id] for start in starts]
        update_ids, update_table_idx, update_blocks = transposed(reply.updates, 3)
        new_block_items, new_blocks = transposed(reply.new_blocks, 2)
        sources, destinations = transposed(reply.copies, 2)
        return StepReply(
            fork_results=int32([ItemResult.OK if is_done else ItemResult.NO_ROOM for is_done in self.forks_done]),
            start_results=int32([StartResult.NO_ROOM if hit is None else StartResult.STARTED for hit in reply.starts]),
            start_hits=int32([hit or 0 for hit in reply.starts]),
            start_reserved=int32([sequence.num_reserved for sequence in started]),
            start_num_blocks=int32([len(sequence.table) for sequence in started]),
            start_block_ids=int32([block for sequence in started for block in sequence.table]),
            reserve_reserved=int32(reply.reserved),
            new_block_item_idx=int32(new_block_items),
            new_block_ids=int32(new_blocks),
            update_ids=np.array(update_ids, np.int64),
            update_table_idx=int32(update_table_idx),
            update_block_ids=int32(update_blocks),
            copy_sources=int32(sources),
            copy_destinations=int32(destinations),
            num_free=len(self.free),
            num_evictable=len(self.cached),
            num_fenced=0,
            pressure=PressureLevel.LOW,
            revision=0,
            num_reclaim_hint=self.num_reclaim_hint,
        )


def rows(*columns: Any) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def transposed(items: list[Any], num_columns: int) -> list[list[int]]:
    return [[item[place] for item in items] for place in range(num_columns)]


def int32(values: list[int]) -> Any:
    return np.array(values, np.int32)
