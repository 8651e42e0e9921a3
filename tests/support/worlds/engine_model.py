"""What an engine knows of its sequences, and the valid steps it makes of it.

Owns the engine's side: tokens it has sampled and not yet reported, how far it has computed, what of that is certain at each
completed step. Rules: every choice is drawn through `choose`, so Hypothesis shrinks it and a seed replays it; a plan is
always valid, and as nasty as the protocol allows: lengths beside block edges, rejected drafts, steps that overlap, forks of
forks, everything about one sequence in one step. Knows nothing of blocks but what replies tell.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.step_columns import StepBatch
from kvkeeper.cache_service.core.values.types import Executor, Int32Array, Int64Array

Choose = Callable[[int], int]  # n -> a number from 0 to n - 1; 0 is the simplest


def int32(values: list[int]) -> Int32Array:
    return np.array(values, np.int32)


def unread(retention: Retention | None, length: int) -> range:
    """Positions that attention passes over when so many tokens are there."""
    if retention is None:
        return range(0)
    return range(retention.num_sink_tokens, length - retention.num_window_tokens)


def int64(values: list[int]) -> Int64Array:
    return np.array(values, np.int64)


@dataclass
class EngineSequence:
    """One sequence as its engine sees it. tokens[:num_known] are those the cache service has been told."""

    sequence_id: int
    scope: str
    tokens: list[int]
    num_known: int
    max_tokens: int
    running: bool = False
    committed: int = 0
    reserved: int = 0
    num_computed: int = 0  # written, or to be written by steps already issued
    computed_at: dict[int, int] = field(default_factory=dict)  # num_computed after each step
    retention: Retention | None = None
    holes: set[int] = field(default_factory=set)  # table indices of the holes

    def drop(self, block_size: int) -> None:
        """A commit makes holes of the blocks of which nothing is read any more."""
        passed = unread(self.retention, self.committed)
        if len(passed):
            self.holes.update(range(-(-passed.start // block_size), passed.stop // block_size))

    def least_cut(self, length: int, block_size: int) -> int:
        """The least length from this one on that the sequence can be cut to, or forked at."""
        while self.holes and length < self.committed:
            passed = unread(self.retention, length)
            if all(position in passed or position // block_size not in self.holes for position in range(length)):
                break
            length += 1
        return length

    def forked(self, child_id: int, length: int, block_size: int) -> "EngineSequence":
        holes = {block_idx for block_idx in self.holes if block_idx * block_size < length}
        counters = (length, length, length)  # committed, reserved, computed
        return EngineSequence(child_id, self.scope, self.tokens[:length], length, self.max_tokens, True, *counters,
                              retention=self.retention, holes=holes)  # fmt: skip

    def certain_at(self, completed: int) -> int:
        """Computed tokens that were there when step `completed` ended, and that nothing has touched since."""
        older = [n for step, n in self.computed_at.items() if step <= completed]
        return max(self.committed, older[-1] if older else 0)

    def cut(self, length: int) -> None:
        """Nothing past `length` counts as computed any more."""
        self.num_computed = min(self.num_computed, length)
        self.computed_at = {step: min(n, length) for step, n in self.computed_at.items()}


@dataclass
class StepPlan:
    """One step, and what its lists say as Python values."""

    batch: StepBatch
    commits: list[tuple[int, int, list[int]]]
    forks: list[tuple[int, int, int]]
    truncates: list[tuple[int, int]]
    releases: list[int]
    starts: list[tuple[int, int, int]]
    reserves: list[tuple[int, int, int]]


class EngineModel:
    """One session's engine."""

    def __init__(self, executor: Executor, block_size: int, num_usable_blocks: int, alphabet: int) -> None:
        self.executor = executor
        self.block_size = block_size
        self.num_usable_blocks = num_usable_blocks
        self.alphabet = alphabet
        self.sequences: dict[int, EngineSequence] = {}
        self.step_id = 0
        self.completed = 0
        self._next_id = 0

    def new_id(self, choose: Choose) -> int:
        self._next_id += 1 + 3 * (choose(4) == 3)  # gaps, so that an id is no slot by accident
        return self._next_id

    def token(self, choose: Choose) -> int:
        return choose(self.alphabet)

    def length(self, choose: Choose, most: int) -> int:
        """1 to most, with a liking for block edges."""
        size = self.block_size
        edge = (1 + choose(most // size + 1)) * size - 1 + choose(3)
        return max(1, min(edge, most)) if choose(2) else 1 + choose(most)

    def plan(self, choose: Choose) -> StepPlan:
        """Draws the next step and applies the engine's own part of it, as if no fork were refused."""
        lag = choose(2) if self.executor is Executor.ENGINE and self.step_id else 0
        self.step_id += 1
        self.completed = max(self.completed, self.step_id - 1 - lag)
        live = list(self.sequences.values())
        commits = [item for q in live if q.running and choose(4) and (item := self._commit(choose, q))]
        forks = self._forks(choose)
        truncates = [(q.sequence_id, self._truncate(choose, q))
                     for q in self.sequences.values() if q.running and choose(6) == 5]  # fmt: skip
        releases = [q.sequence_id for q in self.sequences.values() if choose(8) == 7]
        for sequence_id in releases:
            del self.sequences[sequence_id]
        starts = [(q.sequence_id, self.length(choose, len(q.tokens)), self._max_hit(choose, q))
                  for q in self.sequences.values() if not q.running and choose(3)]  # fmt: skip
        may_wait = [choose(2) for _ in starts] if choose(2) else []
        running = [q for q in self.sequences.values() if q.running]
        reserves = [self._reserve(choose, q) for q in running if choose(4)]
        if commits and choose(4) == 3:  # the very list of the commits, as engines that decode send it
            still = {q.sequence_id: q for q in running}
            reserves = [self._reserve(choose, still[item[0]]) for item in commits if item[0] in still]
        elif len(reserves) > 1 and choose(3) == 2:
            reserves.append(reserves.pop(0))
        batch = StepBatch(
            step_id=self.step_id,
            completed_step_id=self.completed,
            commit_ids=int64([item[0] for item in commits]),
            commit_lens=int32([item[1] for item in commits]),
            commit_num_new=int32([len(item[2]) for item in commits]),
            commit_tokens=int32([token for item in commits for token in item[2]]),
            fork_parents=int64([item[0] for item in forks]),
            fork_children=int64([item[1] for item in forks]),
            fork_lens=int32([item[2] for item in forks]),
            truncate_ids=int64([item[0] for item in truncates]),
            truncate_lens=int32([item[1] for item in truncates]),
            release_ids=int64(releases),
            start_ids=int64([item[0] for item in starts]),
            start_max_new=int32([item[1] for item in starts]),
            start_max_hit=int32([item[2] for item in starts]),
            reserve_ids=int64([item[0] for item in reserves]),
            reserve_min=int32([item[1] for item in reserves]),
            reserve_max=int32([item[2] for item in reserves]),
            start_may_wait=int32(may_wait),
        )
        return StepPlan(batch, commits, forks, truncates, releases, starts, reserves)

    def compute(self, choose: Choose, q: EngineSequence, granted: int) -> tuple[int, int]:
        """The engine computes some of [num_computed, granted) in this step, sampling or drafting tokens it lacks.

        Returns the range of positions written. Sometimes it takes back what it drafted before.
        """
        if choose(5) == 4:  # rejected drafts, or a recomputation
            kept = q.committed + choose(q.num_computed - q.committed + 1)
            q.cut(kept)
            del q.tokens[max(kept, q.num_known) :]
        first = q.num_computed
        last = granted if choose(3) else first + choose(max(1, granted - first + 1))
        last = max(first, min(last, granted))
        while len(q.tokens) < last:
            q.tokens.append(self.token(choose))
        q.num_computed = last
        q.computed_at = {**dict(list(q.computed_at.items())[-2:]), self.step_id: last}
        return first, last

    def _commit(self, choose: Choose, q: EngineSequence) -> tuple[int, int, list[int]] | None:
        most = q.certain_at(self.completed)
        length = most if choose(3) else q.committed + choose(most - q.committed + 1)
        if len(q.tokens) < q.max_tokens and len(q.tokens) <= q.num_computed and choose(2):
            q.tokens.append(self.token(choose))  # the token sampled last, not computed yet
        told = max(length, q.num_known)
        told += choose(len(q.tokens) - told + 1)
        if told == q.num_known and length == q.committed and choose(4):
            return None
        new = q.tokens[q.num_known : told]
        q.num_known, q.committed = told, length
        q.drop(self.block_size)
        return q.sequence_id, length, new

    def _forks(self, choose: Choose) -> list[tuple[int, int, int]]:
        forks = []
        for parent in list(self.sequences.values()):
            while parent.running and parent.committed and choose(8) == 7:
                length = parent.least_cut(self.length(choose, parent.committed), self.block_size)
                child = parent.forked(self.new_id(choose), length, self.block_size)
                forks.append((parent.sequence_id, child.sequence_id, length))
                self.sequences[child.sequence_id] = child
        return forks

    def _truncate(self, choose: Choose, q: EngineSequence) -> int:
        length = q.least_cut(self.length(choose, min(len(q.tokens) + 1, q.max_tokens)), self.block_size)
        q.holes = {block_idx for block_idx in q.holes if block_idx * self.block_size < length}
        del q.tokens[max(length, 0) :]
        q.num_known, q.committed = min(q.num_known, length), min(q.committed, length)
        q.reserved = min(q.reserved, length)
        q.cut(length)
        return length

    def _max_hit(self, choose: Choose, q: EngineSequence) -> int:
        return (len(q.tokens) + 5, 0, self.length(choose, len(q.tokens)))[choose(3)]

    def _reserve(self, choose: Choose, q: EngineSequence) -> tuple[int, int, int]:
        most = self.length(choose, q.max_tokens)
        if choose(2):
            most = min(q.max_tokens, max(q.reserved, q.num_computed) + 1)
        least = (most, 1, min(most, q.committed + 1))[choose(3)]
        least = min(least, (self.num_usable_blocks + len(q.holes)) * self.block_size)  # what fits at once
        return q.sequence_id, least, most
