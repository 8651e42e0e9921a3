"""A tiny pool with a host tier, its engines, and the content oracle of both tiers around it.

Owns the engines: each steps with whatever its sequences allow, runs its device work as late as the protocol lets it, and
reports orders late, twice, as failed or never. Rules: whoever has an answer checks it (a hit holds its tokens right now, a
refusal changed nothing, tables are those that were told); `audit` after every operation. Who chooses is the Hypothesis
machine, the simulation or a long run; `Counts` proves that the faults fired.
"""

from dataclasses import dataclass, field

import numpy as np

from cache_service.manager import Manager
from cache_service.types import (
    Executor,
    Int64Array,
    ItemResult,
    PoolConfig,
    SequenceArgs,
    SequenceId,
    SequenceState,
    SessionId,
    StartResult,
    StepReply,
)
from tests.support.core_pool import step_batch
from tests.support.engine_model import Choose
from tests.support.shadow_memory import Contents
from tests.support.tier_memory import TierMemory, TierOrder, TierStep

TENANTS = ("", "other")


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


class TierWorld:
    """See the module."""

    def __init__(self, config: PoolConfig, *, alphabet: int = 2, num_tenants: int = 2, faults: int = 8) -> None:
        """faults: one order in so many fails, and one in four times as many is never reported."""
        self.config = config
        self.manager = Manager(config)
        self.memory = TierMemory(config.num_blocks, config.num_host_blocks, config.block_size)
        self.contents = Contents()
        self.engines: dict[SessionId, TierEngine] = {}
        self.ended: list[SessionId] = []
        self.counts = TierCounts()
        self.alphabet, self.tenants, self.faults = alphabet, TENANTS[:num_tenants], faults
        self._num_opened = 0

    # Sessions

    def open(self, executor: Executor) -> SessionId:
        self._num_opened += 1
        session = SessionId(f"{self._num_opened:032x}")
        self.manager.open_session(session, executor)
        self.engines[session] = TierEngine(session, executor)
        return session

    def close(self, session: SessionId, *, may_still_write: bool) -> None:
        """The session ends; with may_still_write its device goes on as if nothing had happened."""
        del self.engines[session]
        self.counts.deaths += may_still_write
        self.counts.closes += not may_still_write
        self.manager.close_session(session, may_still_write=may_still_write)
        if may_still_write:
            self.ended.append(session)
        else:
            self.memory.in_flight.pop(session, None)

    def run_ended(self, session: SessionId) -> None:
        """A step of a dead session runs: whoever reads what it tears has been given it too early."""
        queue = self.memory.in_flight.get(session)
        if queue:
            queue[0].reads.clear()
            self.memory.num_late += 1
            self.memory.run_one(session)

    def end_quarantine(self, session: SessionId) -> None:
        while self.memory.in_flight.get(session):
            self.run_ended(session)
        self.ended.remove(session)
        self.manager.end_quarantine(session)

    def create(self, session: SessionId, choose: Choose) -> None:
        engine, limit = self.engines[session], self.config.limit_tokens
        used = sum(len(other.sequences) for other in self.engines.values())
        if used >= self.config.max_sequences:
            return
        size = self.config.block_size
        num_tokens = max(1, min(limit, size * choose(limit // size + 1) + choose(3) - 1))
        tokens = [choose(self.alphabet) for _ in range(num_tokens)]
        q = TierSequence(engine.next_id, self.tenants[choose(len(self.tenants))], tokens, limit, num_known=num_tokens)
        engine.next_id += 1
        self.manager.create_sequence(session, SequenceArgs(SequenceId(q.id), np.array(tokens, np.int32), 0, q.tenant))
        engine.sequences[q.id] = q

    # Steps

    def step(self, session: SessionId, choose: Choose) -> StepReply:
        """Draws a step, sends it, checks the answer and issues its device work."""
        engine = self.engines[session]
        step_id = engine.step_id + 1
        least = step_id - 1 if engine.executor is Executor.CACHE else max(engine.completed, step_id - 2, 0)
        self._complete(engine, least + choose(step_id - least))
        items = self._items(engine, choose)
        done, failed = self._reports(engine, choose)
        batch = step_batch(
            step_id,
            engine.completed,
            commits=self._commits(engine, choose, items),
            forks=items.forks,
            truncates=items.truncates,
            releases=items.releases,
            starts=items.starts,
            reserves=items.reserves,
        )._replace(
            completed_transfers=done,
            failed_transfers=failed,
            swap_out_ids=np.array(items.outs, np.int64),
            swap_in_ids=np.array(items.ins, np.int64),
        )
        before = {q.id: q.state for q in engine.sequences.values()}
        reply = self.manager.step(session, batch)
        engine.step_id = step_id
        self.counts.steps += 1
        self._apply(engine, items, before, reply, choose)
        if choose(2):
            self.manager.publish_pending(1 + choose(4))
        return reply

    def report(self, session: SessionId, choose: Choose) -> None:
        """A renewal: orders and steps are reported without a step."""
        engine = self.engines[session]
        self._complete(engine, engine.completed + choose(engine.step_id - engine.completed + 1))
        self.manager.complete(session, engine.completed, *self._reports(engine, choose))

    def evict(self, session: SessionId, count: int) -> None:
        """Evicts cached blocks outside of a step: to the host tier where this session's orders are run at once."""
        with self.manager.demoting(session) as moved:
            self.manager.evict_blocks(count)
        copies = moved.copies
        columns = (copies.transfer_kinds.tolist(), copies.transfer_sources.tolist(), copies.transfer_destinations.tolist())
        for kind, source, destination in zip(*columns, strict=True):
            self.memory.move(TierOrder(0, kind, source, destination))

    def audit(self) -> None:
        """The pool's own audit, and the content oracle."""
        wrong = self.manager.check_invariants() + self.memory.faults
        assert not wrong, wrong

    def drain(self) -> None:
        """Everything ends: no block of either tier may be left behind."""
        for session in list(self.engines):
            self.close(session, may_still_write=False)
        for session in list(self.ended):
            self.end_quarantine(session)
        self.audit()
        self.manager.clear_prefix_cache()
        self.audit()
        stats, config = self.manager.stats(), self.config
        assert stats.num_free_blocks == config.num_usable_blocks, stats
        assert stats.num_free_host_blocks == max(config.num_host_blocks - 1, 0), stats
        counts = self.counts
        counts.demoted, counts.promoted = stats.num_demoted_blocks, stats.num_promoted_blocks
        counts.evicted_hosts, counts.moved = stats.num_evicted_host_blocks, self.memory.num_moved

    # What an engine sends

    def _complete(self, engine: TierEngine, completed: int) -> None:
        self.memory.run_through(engine.session, completed)
        engine.completed = max(engine.completed, completed)

    def _items(self, engine: TierEngine, choose: Choose) -> TierItems:
        """At most one item for each sequence."""
        items = TierItems()
        for q in engine.sequences.values():
            turn = choose(12)
            if turn == 0:
                items.releases.append(q.id)
            elif q.state is SequenceState.WAITING and turn < 9:
                items.starts.append((q.id, 1 + choose(2 * self.config.block_size), choose(3) * 1000))
            elif q.state is SequenceState.RUNNING:
                if turn < 6 and q.reserved < q.max_tokens:
                    least = q.computed + 1
                    most = min(q.max_tokens, least + choose(self.config.block_size + 1))
                    if least <= most:
                        items.reserves.append((q.id, least, most))
                elif turn < 8:
                    items.outs.append(q.id)
                elif turn == 8:
                    items.truncates.append((q.id, 1 + choose(q.num_known)))
                elif turn == 9 and q.committed:
                    items.forks.append((q.id, engine.next_id, 1 + choose(q.committed)))
                    engine.next_id += 1
                elif turn == 10:
                    items.ins.append(q.id)  # it is there: nothing changes
            elif q.state in (SequenceState.SWAPPED, SequenceState.LOADING):
                if turn < 3 and not q.is_start:
                    items.ins.append(q.id)
                elif turn == 3 and q.state is SequenceState.SWAPPED:
                    items.outs.append(q.id)
        return items

    def _commits(self, engine: TierEngine, choose: Choose, items: TierItems) -> list[tuple[int, int, list[int]]]:
        """What has been written by completed steps, also of sequences that were swapped out since."""
        commits = []
        for q in engine.sequences.values():
            done = max([length for step, length in q.written if step <= engine.completed], default=0)
            if q.state in (SequenceState.RUNNING, SequenceState.SWAPPED) and done > q.committed and choose(4):
                q.committed = done
                new = q.tokens[q.num_known : done]
                q.num_known = max(q.num_known, done)
                commits.append((q.id, done, new))
                self.counts.late_commits += q.state is SequenceState.SWAPPED
        return commits

    def _reports(self, engine: TierEngine, choose: Choose) -> tuple[Int64Array, Int64Array]:
        """Ids of orders that have ended: some late, some again, some never."""
        done: list[int] = []
        failed: list[int] = []
        for order in list(engine.orders):
            if not order.has_run or order.silent:
                continue
            if order.num_reports == 0 and choose(3) == 0:
                self.counts.late += 1
                continue
            if order.num_reports:
                if choose(3):
                    engine.orders.remove(order)
                    continue
                self.counts.repeated += 1
            order.num_reports += 1
            (failed if order.fails else done).append(order.id)
            self.counts.failed += order.fails and order.num_reports == 1
        return np.array(done, np.int64), np.array(failed, np.int64)

    # What it makes of the answer

    def _apply(
        self,
        engine: TierEngine,
        items: TierItems,
        before: dict[int, SequenceState],
        reply: StepReply,
        choose: Choose,
    ) -> None:
        step = TierStep(engine.step_id)
        runs_now = engine.executor is Executor.CACHE
        for order_id, kind, source, destination in zip(
            reply.transfer_ids.tolist(),
            reply.transfer_kinds.tolist(),
            reply.transfer_sources.tolist(),
            reply.transfer_destinations.tolist(),
            strict=True,
        ):
            order = TierOrder(order_id, kind, source, destination)
            if runs_now:
                self.memory.move(order)
            else:
                order.fails = choose(self.faults) == 1
                order.silent = choose(4 * self.faults) == 1
                self.counts.silent += order.silent
                step.orders.append(order)
                engine.orders.append(order)
        copies = list(zip(reply.copy_sources.tolist(), reply.copy_destinations.tolist(), strict=True))
        if runs_now:
            self.memory.run(TierStep(engine.step_id, copies=copies))
        else:
            step.copies = copies
        for (parent_id, child_id, num_tokens), result in zip(items.forks, reply.fork_results.tolist(), strict=True):
            if result == ItemResult.OK:
                parent = engine.sequences[parent_id]
                tokens = parent.tokens[:num_tokens]
                child = TierSequence(child_id, parent.tenant, tokens, parent.max_tokens, SequenceState.RUNNING, num_tokens)
                child.committed = child.reserved = child.computed = num_tokens
                engine.sequences[child_id] = child
        for sequence_id, num_tokens in items.truncates:
            q = engine.sequences[sequence_id]
            del q.tokens[max(num_tokens, 0) :]
            q.num_known = min(q.num_known, num_tokens)
            q.committed, q.computed = min(q.committed, num_tokens), min(q.computed, num_tokens)
            q.reserved = min(q.reserved, num_tokens)
            q.written = [(at, min(length, num_tokens)) for at, length in q.written]
        for sequence_id in items.releases:
            del engine.sequences[sequence_id]
        self._apply_swaps(engine, items, before, reply)
        self._apply_starts(engine, items, reply)
        late_starts = self._apply_ready(engine, before, reply)
        for sequence_id, least, most in items.reserves:
            q = engine.sequences[sequence_id]
            granted = int(reply.reserve_reserved[[item[0] for item in items.reserves].index(sequence_id)])
            if granted >= least:
                assert granted <= max(most, q.reserved)
                q.reserved = granted
        for q in engine.sequences.values():
            view = self.manager.view(engine.session, SequenceId(q.id))
            assert view.state == q.state, (q, view)
            q.table = [int(block) for block in view.block_table]
            if q.state is SequenceState.RUNNING:
                assert view.num_reserved_tokens == q.reserved, (q, view)
        writing = [item[0] for item in items.reserves] + [item[0] for item in items.starts] + reply.ready_ids.tolist()
        for sequence_id in dict.fromkeys(writing):
            q = engine.sequences.get(sequence_id)
            if (
                q is not None
                and q.state is SequenceState.RUNNING
                and (sequence_id not in before or self._may_write(q, items, reply, late_starts))
            ):
                self._write(engine, q, step, choose)
        if runs_now:
            self.memory.run(step)
        else:
            self.memory.issue(engine.session, step)

    def _may_write(self, q: TierSequence, items: TierItems, reply: StepReply, late_starts: set[int]) -> bool:
        """A step writes only what it reserves or starts: of a sequence that is ready, the reservation comes first."""
        for row, (sequence_id, least, _) in enumerate(items.reserves):
            if sequence_id == q.id:
                return int(reply.reserve_reserved[row]) >= least
        return q.id not in reply.ready_ids.tolist() or q.id in late_starts

    def _write(self, engine: TierEngine, q: TierSequence, step: TierStep, choose: Choose) -> None:
        """Reads the context of a sequence and writes up to all of its slots; beyond its tokens it makes some up."""
        size, upto = self.config.block_size, q.reserved - choose(2)
        if upto <= q.computed:
            upto = q.reserved
        while len(q.tokens) < upto:
            q.tokens.append(choose(self.alphabet))
        spelled = self.contents.spell(q.tenant, q.tokens[:upto])
        step.reads.append((f"{engine.session[-2:]}/{q.id} step {step.step_id}", list(q.table), spelled[: q.computed]))
        for position in range(q.computed, upto):
            step.writes.append((q.table[position // size], position % size, spelled[position]))
        if upto > q.computed:
            q.computed = upto
            q.written.append((step.step_id, upto))

    def _apply_swaps(self, engine: TierEngine, items: TierItems, before: dict[int, SequenceState], reply: StepReply) -> None:
        ready = set(reply.ready_ids.tolist())
        for sequence_id, result in zip(items.outs, reply.swap_out_results.tolist(), strict=True):
            q = engine.sequences[sequence_id]
            if result == ItemResult.OK:
                q.state = SequenceState.SWAPPED
                self.counts.swap_outs += before[sequence_id] is SequenceState.RUNNING
            else:
                self.counts.refused_outs += 1
                q.state = SequenceState.RUNNING  # where it was swapped, that had failed
        for sequence_id, result in zip(items.ins, reply.swap_in_results.tolist(), strict=True):
            q = engine.sequences[sequence_id]
            if result == ItemResult.NO_ROOM:
                self.counts.refused_ins += 1
                q.state = SequenceState.SWAPPED
            elif sequence_id not in ready and before[sequence_id] is not SequenceState.RUNNING:
                q.state = SequenceState.LOADING
        for q in engine.sequences.values():
            # The load of a swap-in failed, and nobody is told but who asks again.
            if before.get(q.id) is SequenceState.LOADING and not q.is_start and q.id not in ready and q.id not in items.ins:
                q.state = self.manager.view(engine.session, SequenceId(q.id)).state
                assert q.state in (SequenceState.LOADING, SequenceState.SWAPPED)
                self.counts.back_in_host += q.state is SequenceState.SWAPPED

    def _apply_starts(self, engine: TierEngine, items: TierItems, reply: StepReply) -> None:
        first = 0
        for row, (sequence_id, _, _) in enumerate(items.starts):
            q, result, hit = engine.sequences[sequence_id], int(reply.start_results[row]), int(reply.start_hits[row])
            table = reply.start_block_ids[first : first + reply.start_num_blocks[row]].tolist()
            first += int(reply.start_num_blocks[row])
            if result == StartResult.STARTED:
                q.state, q.reserved = SequenceState.RUNNING, int(reply.start_reserved[row])
                self._check_hit(q, table, hit)
            elif result == StartResult.LOADING:
                q.state, q.is_start = SequenceState.LOADING, True
                q.committed = hit  # for now: what it may become
                self.counts.loading += 1

    def _apply_ready(self, engine: TierEngine, before: dict[int, SequenceState], reply: StepReply) -> set[int]:
        """Answers the starts among those that are ready."""
        late_starts: set[int] = set()
        first = 0
        for row, sequence_id in enumerate(reply.ready_ids.tolist()):
            q = engine.sequences[sequence_id]
            table = reply.ready_block_ids[first : first + reply.ready_num_blocks[row]].tolist()
            first += int(reply.ready_num_blocks[row])
            hit, reserved = int(reply.ready_hits[row]), int(reply.ready_reserved[row])
            self.counts.ready += 1
            q.state = SequenceState.RUNNING
            if q.is_start:
                self.counts.short_hits += hit < q.committed
                q.reserved, q.committed, q.is_start = reserved, 0, False
                late_starts.add(q.id)
                self._check_hit(q, table, hit)
            else:
                self.counts.swap_ins += before[sequence_id] is SequenceState.LOADING
                self.counts.back_on_device += before[sequence_id] is SequenceState.SWAPPED
                assert reserved == q.reserved, (q, reserved)
                if before[sequence_id] is SequenceState.LOADING:
                    spelled = self.contents.spell(q.tenant, q.tokens[: q.committed])
                    assert not (fault := self.memory.fault(f"swap-in of {q.id}", table, spelled)), fault
        return late_starts

    def _check_hit(self, q: TierSequence, table: list[int], hit: int) -> None:
        """Blocks hit hold the prompt right now, whatever is in flight (R4, R6)."""
        assert hit % self.config.block_size == 0
        assert hit < len(q.tokens)
        fault = self.memory.fault(f"hit of {q.id}", table, self.contents.spell(q.tenant, q.tokens[:hit]))
        assert not fault, fault
        q.committed = q.computed = hit
