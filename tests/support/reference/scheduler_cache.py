"""NaiveCache: the cache service's Step on dicts and lists, for tests of the scheduler alone.

As plain as can be: holders are counted by looking at all tables, evictions take the longest prefix. It refuses all that
breaks the protocol, and counts what the scheduler's tests ask about.
"""

from dataclasses import dataclass, field

import numpy as np

from kvkeeper.engine_service.scheduler.plan import Plan


class OutOfSequencesError(Exception):
    """create found no slot."""


@dataclass
class FakeSequence:
    tokens: list[int]
    max_len: int
    committed: int = 0
    reserved: int = 0
    table: list[int] | None = None  # None: waiting


@dataclass
class FakeAnswer:
    fork_results: list[int] = field(default_factory=list)
    fork_committed: list[int] = field(default_factory=list)
    swap_out_results: list[int] = field(default_factory=list)
    swap_in_results: list[int] = field(default_factory=list)
    start_results: list[int] = field(default_factory=list)
    start_hits: list[int] = field(default_factory=list)
    start_reserved: list[int] = field(default_factory=list)
    start_num_blocks: list[int] = field(default_factory=list)
    start_block_ids: list[int] = field(default_factory=list)
    reserve_reserved: list[int] = field(default_factory=list)
    new_block_item_idx: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)
    update_ids: list[int] = field(default_factory=list)
    update_table_idx: list[int] = field(default_factory=list)
    update_block_ids: list[int] = field(default_factory=list)
    new_block_groups: list[int] = field(default_factory=list)
    update_groups: list[int] = field(default_factory=list)
    copy_sources: list[int] = field(default_factory=list)
    copy_destinations: list[int] = field(default_factory=list)
    transfer_ids: list[int] = field(default_factory=list)
    transfer_kinds: list[int] = field(default_factory=list)
    transfer_sources: list[int] = field(default_factory=list)
    transfer_destinations: list[int] = field(default_factory=list)
    ready_ids: list[int] = field(default_factory=list)
    ready_hits: list[int] = field(default_factory=list)
    ready_reserved: list[int] = field(default_factory=list)
    ready_num_blocks: list[int] = field(default_factory=list)
    ready_block_ids: list[int] = field(default_factory=list)
    num_free: int = 0
    num_evictable: int = 0
    num_fenced: int = 0
    num_reclaim_hint: int = 0

    def as_columns(self) -> "FakeAnswer":
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(self, name, np.array(value, np.int64 if name == "update_ids" else np.int32))
        return self


class NaiveCache:
    def __init__(self, num_blocks: int, block_size: int, max_sequences: int = 256) -> None:
        self.block_size = block_size
        self.max_sequences = max_sequences
        self.blocks = set(range(1, num_blocks))
        self.sequences: dict[int, FakeSequence] = {}
        self.index: dict[tuple[int, ...], int] = {}
        self.num_refused_forks_to_come = 0
        self.num_reclaim_hint = 0  # told with every answer
        self.ended_orders: tuple[list[int], list[int]] = ([], [])  # never any: there is no host tier

    @property
    def num_reusable_blocks(self) -> int:
        return len(self.free_blocks()) + len(self.evictable())

    def create(self, sequence_id: int, tokens: list[int], max_len: int, priority: int = 0, start_number: int = 0) -> int:
        """Answers the start number, which this cache does not know."""
        assert sequence_id not in self.sequences
        assert 0 < len(tokens) < max_len
        if len(self.sequences) >= self.max_sequences:
            raise OutOfSequencesError
        self.sequences[sequence_id] = FakeSequence(list(tokens), max_len)
        return 0

    def holders(self, block: int) -> int:
        tables = sum(block in (sequence.table or ()) for sequence in self.sequences.values())
        return tables + (block in self.index.values())

    def free_blocks(self) -> list[int]:
        held = {block for sequence in self.sequences.values() for block in sequence.table or ()}
        return sorted(self.blocks - held - set(self.index.values()))

    def evictable(self) -> list[tuple[int, ...]]:
        held = {block for sequence in self.sequences.values() for block in sequence.table or ()}
        return [key for key, block in self.index.items() if block not in held]

    def _take(self, count: int, keep: tuple[int, ...] = ()) -> list[int] | None:
        """count blocks, evicting if need be but for the blocks in keep; None: no room."""
        evictable = [key for key in self.evictable() if self.index[key] not in keep]
        if count > len(self.free_blocks()) + len(evictable):
            return None
        for key in sorted(evictable, key=len, reverse=True)[: max(0, count - len(self.free_blocks()))]:
            del self.index[key]
        return self.free_blocks()[:count]

    def clear(self) -> None:
        self.index.clear()

    def step(self, plan: Plan) -> FakeAnswer:
        answer = FakeAnswer()
        ids = (plan.commit_ids, plan.release_ids, plan.start_ids, plan.reserve_ids, plan.fork_children)
        assert all(len(set(column.tolist())) == len(column) for column in ids), "an id twice in one list"
        new = iter(plan.commit_tokens.tolist())
        for sequence_id, length, num_new in zip(plan.commit_ids, plan.commit_lens, plan.commit_num_new, strict=True):
            self._commit(int(sequence_id), int(length), [next(new) for _ in range(num_new)], answer)
        for parent, child, length in zip(plan.fork_parents, plan.fork_children, plan.fork_lens, strict=True):
            self._fork(self.sequences[int(parent)], int(child), int(length), answer)
        for sequence_id in plan.release_ids.tolist():
            del self.sequences[sequence_id]
        for sequence_id, max_new, max_hit in zip(
            plan.start_ids.tolist(), plan.start_max_new.tolist(), plan.start_max_hit.tolist(), strict=True
        ):
            self._start(self.sequences[sequence_id], max_new, max_hit, answer)
        starved = False
        for item, (sequence_id, least, most) in enumerate(
            zip(plan.reserve_ids.tolist(), plan.reserve_min.tolist(), plan.reserve_max.tolist(), strict=True)
        ):
            starved = not self._reserve(item, sequence_id, least, most, starved, answer)
        answer.num_reclaim_hint = self.num_reclaim_hint
        answer.num_free, answer.num_evictable = len(self.free_blocks()), len(self.evictable())
        return answer.as_columns()

    def _commit(self, sequence_id: int, length: int, new: list[int], answer: FakeAnswer) -> None:
        sequence = self.sequences[sequence_id]
        assert sequence.table is not None
        sequence.tokens += new
        assert len(sequence.tokens) <= sequence.max_len
        assert sequence.committed <= length <= min(len(sequence.tokens), sequence.reserved)
        sequence.committed = length
        for table_idx in range(length // self.block_size):
            key = tuple(sequence.tokens[: (table_idx + 1) * self.block_size])
            known = self.index.setdefault(key, sequence.table[table_idx])
            if known != sequence.table[table_idx]:
                sequence.table[table_idx] = known
                self._update(answer, sequence_id, table_idx, known)

    def _fork(self, parent: FakeSequence, child: int, length: int, answer: FakeAnswer) -> None:
        assert parent.table is not None
        assert 0 < length <= parent.committed
        refused = self.num_refused_forks_to_come > 0 or len(self.sequences) >= self.max_sequences
        if refused:
            self.num_refused_forks_to_come -= 1
        else:
            table = parent.table[: -(-length // self.block_size)]
            self.sequences[child] = FakeSequence(parent.tokens[:length], parent.max_len, length, length, table)
        answer.fork_results.append(2 if refused else 1)

    def _start(self, sequence: FakeSequence, max_new: int, max_hit: int, answer: FakeAnswer) -> None:
        assert sequence.table is None
        size = self.block_size
        hit: list[int] = []
        most = min(max_hit, len(sequence.tokens) - 1) // size
        while len(hit) < most and (block := self.index.get(tuple(sequence.tokens[: (len(hit) + 1) * size]))):
            hit.append(block)
        for wanted in range(min(len(sequence.tokens), len(hit) * size + max_new), len(hit) * size, -1):
            got = self._take(-(-wanted // size) - len(hit), tuple(hit))
            if got is not None:
                sequence.table, sequence.committed, sequence.reserved = hit + got, len(hit) * size, wanted
                break
        started = sequence.table is not None
        answer.start_results.append(1 if started else 4)
        answer.start_hits.append(len(hit) * size if started else 0)
        answer.start_reserved.append(sequence.reserved)
        answer.start_num_blocks.append(len(sequence.table or ()))
        answer.start_block_ids += sequence.table or []

    def _reserve(self, item: int, sequence_id: int, least: int, most: int, starved: bool, answer: FakeAnswer) -> bool:
        """Whether later items may have new blocks."""
        if sequence_id not in self.sequences:  # a child of a refused fork
            answer.reserve_reserved.append(0)
            return not starved
        sequence = self.sequences[sequence_id]
        assert sequence.table is not None
        assert least <= most <= sequence.max_len
        size, table_idx = self.block_size, sequence.committed // self.block_size
        shared = table_idx < len(sequence.table) and self.holders(sequence.table[table_idx]) > 1
        for wanted in range(most, least - 1, -1):
            count = max(0, -(-wanted // size) - len(sequence.table)) + shared
            got = [] if not count else None if starved else self._take(count)
            if got is None:
                continue
            if shared:
                copy = got.pop()
                answer.copy_sources.append(sequence.table[table_idx])
                answer.copy_destinations.append(copy)
                sequence.table[table_idx] = copy
                self._update(answer, sequence_id, table_idx, copy)
            sequence.table += got
            answer.new_block_item_idx += [item] * len(got)
            answer.new_block_ids += got
            sequence.reserved = max(sequence.reserved, wanted)
            answer.reserve_reserved.append(sequence.reserved)
            return not starved
        answer.reserve_reserved.append(min(sequence.reserved, least - 1))
        return False

    def _update(self, answer: FakeAnswer, sequence_id: int, table_idx: int, block: int) -> None:
        answer.update_ids.append(sequence_id)
        answer.update_table_idx.append(table_idx)
        answer.update_block_ids.append(block)
