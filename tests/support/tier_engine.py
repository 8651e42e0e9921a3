"""An engine on a pool with a host tier: what it knows of its sequences, what it sends in a step, and what it reports.

It sends at most one item for each sequence, but for those that it forks, all of them lawful. Orders are reported late, twice,
as failed or never; `TierCounts` says how often each thing happened.
"""

from dataclasses import dataclass, field

import numpy as np

from cache_service.types import Executor, Int64Array, Retention, SequenceState, SessionId
from tests.support.engine_model import Choose
from tests.support.tier_memory import TierOrder


@dataclass
class TierCounts:
    """How often each thing happened."""

    steps: int = 0
    loading: int = 0
    ready: int = 0
    short_hits: int = 0
    swap_outs: int = 0
    swap_ins: int = 0
    refused_outs: int = 0
    refused_ins: int = 0
    failed: int = 0
    repeated: int = 0
    late: int = 0
    silent: int = 0
    deaths: int = 0
    closes: int = 0
    demoted: int = 0
    promoted: int = 0
    evicted_hosts: int = 0
    back_on_device: int = 0
    back_in_host: int = 0
    late_commits: int = 0
    narrowed: int = 0
    moved_children: int = 0
    dropped: int = 0
    moved: int = 0

    def add(self, other: "TierCounts") -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class TierSequence:
    """One sequence as its engine knows it. computed: written, or being written; written: (step, length) of each write."""

    id: int
    tenant: str
    tokens: list[int]
    max_tokens: int
    state: SequenceState = SequenceState.WAITING
    num_known: int = 0  # tokens that the service knows
    committed: int = 0
    reserved: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    is_start: bool = False  # what it loads is the hit of a start
    retention: Retention | None = None


@dataclass
class TierItems:
    """Items of a step, as core_pool.step_batch takes them; outs and ins are sequence ids."""

    forks: list[tuple[int, int, int]] = field(default_factory=list)
    truncates: list[tuple[int, int]] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)
    ins: list[int] = field(default_factory=list)
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    reserves: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class TierEngine:
    """One session."""

    session: SessionId
    executor: Executor
    step_id: int = 0
    completed: int = 0
    sequences: dict[int, TierSequence] = field(default_factory=dict)
    orders: list[TierOrder] = field(default_factory=list)
    next_id: int = 1
    forks_much: bool = False

    def items(self, choose: Choose, block_size: int, num_free: int) -> TierItems:
        """At most one item for each sequence, but what is forked may go on, or move, at once. num_free: sequences that fit."""
        items = TierItems()
        for q in self.sequences.values():
            turn = choose(12)
            if self.forks_much and q.state is SequenceState.RUNNING:
                turn = (0, 9, 9, 5, 5, turn)[choose(6)]
            if turn == 0 or (turn == 11 and q.state is SequenceState.RUNNING):
                items.releases.append(q.id)
            elif q.state is SequenceState.WAITING and turn < 9:
                items.starts.append((q.id, 1 + choose(2 * block_size), choose(3) * 1000))
            elif q.state is SequenceState.RUNNING:
                if turn < 6 and q.reserved < q.max_tokens:
                    least = q.computed + 1
                    most = min(q.max_tokens, least + choose(block_size + 1))
                    if least <= most:
                        items.reserves.append((q.id, least, most))
                elif turn < 8:
                    items.outs.append(q.id)
                elif turn < 10 and q.retention is not None:
                    continue  # which lengths it can be cut to is tested without tiers
                elif turn == 8:
                    items.truncates.append((q.id, 1 + choose(q.num_known)))
                elif turn == 9 and q.committed:
                    self._fork(choose, q, items, is_sure=len(items.forks) < num_free)
                elif turn == 10:
                    items.ins.append(q.id)  # it is there: nothing changes
            elif q.state in (SequenceState.SWAPPED, SequenceState.LOADING):
                if turn < 3 and not q.is_start:
                    items.ins.append(q.id)
                elif turn == 3 and q.state is SequenceState.SWAPPED:
                    items.outs.append(q.id)
        return items

    def _fork(self, choose: Choose, parent: TierSequence, items: TierItems, *, is_sure: bool) -> None:
        """Its parent may grow in the same step, or end; a child that is sure to be made may be moved."""
        num_tokens = parent.committed if choose(4) else 1 + choose(parent.committed)
        items.forks.append((parent.id, self.next_id, num_tokens))
        turn = choose(6)
        if turn < 4 and parent.computed < parent.max_tokens:
            least = parent.computed + 1
            items.reserves.append((parent.id, least, least))
        elif turn == 4:
            items.releases.append(parent.id)
        if is_sure and choose(3):
            items.outs.append(self.next_id)
            if choose(4):
                items.ins.append(self.next_id)
        self.next_id += 1

    def commits(self, choose: Choose, counts: TierCounts) -> list[tuple[int, int, list[int]]]:
        """What has been written by completed steps, also of sequences that were swapped out since."""
        commits = []
        for q in self.sequences.values():
            done = max([length for step, length in q.written if step <= self.completed], default=0)
            if q.state in (SequenceState.RUNNING, SequenceState.SWAPPED) and done > q.committed and choose(4):
                q.committed = done
                new = q.tokens[q.num_known : done]
                q.num_known = max(q.num_known, done)
                commits.append((q.id, done, new))
                counts.late_commits += q.state is SequenceState.SWAPPED
        return commits

    def reports(self, choose: Choose, counts: TierCounts) -> tuple[Int64Array, Int64Array]:
        """Ids of orders that have ended: some late, some again, some never."""
        done: list[int] = []
        failed: list[int] = []
        for order in list(self.orders):
            if not order.has_run or order.silent:
                continue
            if order.num_reports == 0 and choose(3) == 0:
                counts.late += 1
                continue
            if order.num_reports:
                if choose(3):
                    self.orders.remove(order)
                    continue
                counts.repeated += 1
            order.num_reports += 1
            (failed if order.fails else done).append(order.id)
            counts.failed += order.fails and order.num_reports == 1
        return np.array(done, np.int64), np.array(failed, np.int64)
