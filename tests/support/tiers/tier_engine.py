"""An engine on a pool with a host tier: what it knows of its sequences, what it sends in a step, and what it reports.

It sends any number of items for each sequence, and for the children that the step forks, of which there may be too many:
commit, fork, truncate, swaps and reservation in one step, all of them valid. Orders are reported late, twice, as failed or
never; `TierCounts` says how often each thing happened.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from kvkeeper.cache_service.core.values.kv_spec import WHOLE, ReadSpan
from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.types import Executor, Int64Array, SequenceState, SessionId
from tests.support.reference.read_spans import first_read, least_length
from tests.support.reference.tier_memory import TierOrder
from tests.support.reference.told_tables import ToldTables
from tests.support.worlds.engine_model import Choose

MOST_FORKS = 4  # of one step


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
    forks: int = 0
    refused_forks: int = 0
    refused_children: int = 0  # items that named the child of a refused fork
    refused_steps: int = 0
    both_swaps: int = 0  # a swap-out and a swap-in of one sequence in one step
    clears: int = 0
    grouped_hits: int = 0  # hits in a pool of several groups of layers
    grouped_swaps: int = 0
    short_cuts: int = 0  # which left less than was asked for, because the states were not there
    state_tables: int = 0  # of hits and swap-ins, with states
    tail_swaps: int = 0  # of sequences that had pages of a tail
    tail_gaps: int = 0  # tokens of a window that were not in the tail
    tail_unwritten: int = 0  # tokens that had no page to be written to

    def add(self, other: "TierCounts") -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class TierSequence:
    """One sequence as its engine knows it. computed: written, or being written; written: (step, length) of each write."""

    id: int
    scope: str
    tokens: list[int]
    max_tokens: int
    state: SequenceState = SequenceState.WAITING
    num_known: int = 0  # tokens that the service knows
    committed: int = 0
    reserved: int = 0
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)  # of each group of layers
    passed_len: int = 0  # most tokens that were ever committed: so far windows have moved
    written: list[tuple[int, int]] = field(default_factory=list)
    is_start: bool = False  # what it loads is the hit of a start
    retention: Retention | None = None


@dataclass
class TierItems:
    """Items of a step, as core_pool.step_batch takes them; outs and ins are sequence ids."""

    commits: list[tuple[int, int, list[int]]] = field(default_factory=list)
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
    told: ToldTables
    step_id: int = 0
    completed: int = 0
    sequences: dict[int, TierSequence] = field(default_factory=dict)
    orders: list[TierOrder] = field(default_factory=list)
    next_id: int = 1
    forks_much: bool = False
    spans: tuple[ReadSpan, ...] = (WHOLE,)  # of the groups of layers
    num_usable_blocks: int = 0  # of the pool
    has_tail: bool = False  # which no cut and no hit needs

    @property
    def has_states(self) -> bool:
        return any(span.checkpoint_blocks for span in self.spans)

    def least_cut(self, q: TierSequence, block_size: int) -> int:
        """The least length that what the windows have left behind lets a sequence be cut to."""
        if self.has_tail or self.has_states:
            return 1
        ends = zip(self.spans, self._hole_ends(q, block_size), strict=True)
        return max((least_length(span, end * block_size) for span, end in ends), default=1)

    def most_slots(self, q: TierSequence, block_size: int) -> int:
        """Slots whose blocks of all groups the pool could hold beside the holes."""
        if len(self.spans) == 1:
            return q.max_tokens
        held = (self.num_usable_blocks + sum(self._hole_ends(q, block_size))) // len(self.spans)
        return min(q.max_tokens, held * block_size)

    def _hole_ends(self, q: TierSequence, block_size: int) -> list[int]:
        if self.has_tail:  # a cut may have put pages where holes were
            return [0] * len(self.spans)
        return [0 if span.checkpoint_blocks else first_read(span, q.passed_len) // block_size for span in self.spans]

    def items(self, choose: Choose, block_size: int) -> TierItems:
        """What the sequences allow, group by group; each group sees them as those before it leave them, all forks granted."""
        items, odds = TierItems(), 3 if self.forks_much else 12
        seen = [replace(q) for q in self.sequences.values()]
        for q in seen:  # the children too, which may be parents
            while (
                len(items.forks) < MOST_FORKS and q.state is SequenceState.RUNNING and q.committed and choose(odds) == odds - 1
            ):
                is_whole = q.retention is not None or choose(2)
                length = q.committed if is_whole else max(self.least_cut(q, block_size), 1 + choose(q.committed))
                items.forks.append((q.id, self.next_id, length))
                counters = {"num_known": length, "committed": length, "reserved": length, "computed": length}
                seen.append(replace(q, id=self.next_id, **counters))
                self.next_id += 1
        for q in seen:  # with retention, to which lengths it can be cut is tested without tiers
            if q.state is SequenceState.RUNNING and q.retention is None and choose(14) == 13:
                length = max(self.least_cut(q, block_size), 1 + choose(q.num_known + 1))
                items.truncates.append((q.id, length))
                q.num_known, q.committed = min(q.num_known, length), min(q.committed, length)
                q.reserved, q.computed = min(q.reserved, length), min(q.computed, length)
        items.releases += [q.id for q in seen if choose(6) == 5]
        seen = [q for q in seen if q.id not in items.releases]
        for q in seen:
            odds = 2 if self.forks_much and q.id not in self.sequences else 7
            if q.state in (SequenceState.RUNNING, SequenceState.SWAPPED) and choose(odds) == odds - 1:
                items.outs.append(q.id)
                q.state = SequenceState.SWAPPED
        for q in seen:  # one that runs already is there: nothing changes
            may_come = q.state in (SequenceState.RUNNING, SequenceState.SWAPPED, SequenceState.LOADING) and not q.is_start
            if may_come and choose(12 if q.state is SequenceState.RUNNING else 3) == 2:
                items.ins.append(q.id)
                q.state = SequenceState.RUNNING if q.state is SequenceState.RUNNING else SequenceState.LOADING
        waiting = [q for q in seen if q.state is SequenceState.WAITING and choose(4)]
        items.starts += [(q.id, 1 + choose(2 * block_size), min(choose(4), 1) * 1000) for q in waiting]
        for q in seen:
            if q.state is SequenceState.RUNNING and q.computed < q.max_tokens and choose(3):
                least, most = q.computed + 1, self.most_slots(q, block_size)
                if least <= most:
                    items.reserves.append((q.id, least, min(most, least + choose(block_size + 1))))
        if choose(4) == 3:
            items.reserves.reverse()
        return items

    def wrong_items(self, choose: Choose) -> TierItems | None:
        """Items of which one is for a sequence in another state than it may have, beside valid ones; None where there is none.

        The commits repeat what is committed. The reservations are often the very list of the commits, which name swapped ones.
        """
        by_state = {state: [q for q in self.sequences.values() if q.state is state] for state in SequenceState}
        running, swapped = by_state[SequenceState.RUNNING], by_state[SequenceState.SWAPPED]
        loading, waiting = by_state[SequenceState.LOADING], by_state[SequenceState.WAITING]
        committed = [q for q in self.sequences.values() if q in running or q in swapped]
        repeated = TierItems(commits=[(q.id, q.committed, []) for q in committed], reserves=_reserves(committed))
        options: list[TierItems] = []
        if swapped:
            options += [repeated] * 3
            options.append(replace(repeated, ins=[swapped[0].id], reserves=_reserves(swapped), commits=repeated.commits))
        if running:
            options.append(replace(repeated, outs=[running[0].id], reserves=_reserves(running)))
            options.append(TierItems(outs=[running[0].id], ins=[running[0].id], reserves=_reserves(running[:1])))
        for q in (swapped + loading + waiting)[:2]:
            options += [
                TierItems(forks=[(q.id, self.next_id, 1)]),
                TierItems(truncates=[(q.id, 1)]),
                TierItems(reserves=_reserves([q])),
            ]
        for q in (loading + waiting)[:2]:
            options.append(TierItems(outs=[q.id]))
        for q in (running + swapped + loading)[:2]:
            options.append(TierItems(starts=[(q.id, 1, 0)]))
        if not options:
            return None
        wrong = options[choose(len(options))]
        named = {item[0] for item in (*wrong.forks, *wrong.truncates, *wrong.reserves, *wrong.starts)} | {
            *wrong.outs,
            *wrong.ins,
        }
        return replace(wrong, releases=[q.id for q in self.sequences.values() if q.id not in named][:1])

    def commits(self, choose: Choose, counts: TierCounts) -> list[tuple[int, int, list[int]]]:
        """What has been written by completed steps, also of sequences that were swapped out since."""
        commits = []
        for q in self.sequences.values():
            done = max([length for step, length in q.written if step <= self.completed], default=0)
            if q.state in (SequenceState.RUNNING, SequenceState.SWAPPED) and done > q.committed and choose(4):
                q.committed = done
                q.passed_len = max(q.passed_len, done)
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


def _reserves(sequences: list[TierSequence]) -> list[tuple[int, int, int]]:
    return [(q.id, 1, max(q.reserved, 1)) for q in sequences]
