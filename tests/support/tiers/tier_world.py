"""A tiny pool with a host tier, its engines, and the content oracle of both tiers around it.

Owns the sessions: each steps with what its sequences allow, and its device work runs as late as the protocol lets it, or
after its end. Rules: `audit` after every operation, `drain` at the end. The Hypothesis machine, the simulation or a long run
makes the choices.
"""

import numpy as np

from kvkeeper.cache_service.core.values.errors import WrongState
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import Retention, SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import (
    BlockId,
    Executor,
    Int64Array,
    ReuseHint,
    SequenceId,
    SequenceState,
    SessionId,
)
from tests.support.reference.tier_memory import TierOrder
from tests.support.reference.told_tables import ToldTables
from tests.support.tiers.tier_answers import TierAnswers
from tests.support.tiers.tier_engine import TierEngine, TierItems, TierSequence
from tests.support.worlds.core_pool import step_batch
from tests.support.worlds.engine_model import Choose
from tests.support.worlds.scopes import SCOPES


class TierWorld(TierAnswers):
    """A pool with a host tier and its engines, each operation checked by the content oracle of both tiers."""

    def __init__(
        self, config: PoolConfig, *, alphabet: int = 2, num_scopes: int = 2, faults: int = 8, at_once: int = 10**9
    ) -> None:
        """faults: one order in so many fails, and one in four times as many is never reported.

        at_once: orders of a report that are ended with it; the others when their turn comes.
        """
        super().__init__(config, alphabet, faults)
        if self.manager.swapper is not None:
            self.manager.swapper.at_once = at_once
        self.engines: dict[SessionId, TierEngine] = {}
        self.ended: list[SessionId] = []
        self.forks_much = False  # engines of sessions to come
        self.scopes = SCOPES[:num_scopes]
        self._num_opened = 0

    # Sessions

    def open(self, executor: Executor) -> SessionId:
        self._num_opened += 1
        session = SessionId(f"{self._num_opened:032x}")
        self.manager.sessions.open(session, executor)
        spans = self.config.group_spans
        told = ToldTables(self.config.block_size, len(spans))
        sizes = {"spans": spans, "num_usable_blocks": self.config.num_usable_blocks, "has_tail": self.has_tail}
        self.engines[session] = TierEngine(session, executor, told, forks_much=self.forks_much, **sizes)
        return session

    def close(self, session: SessionId, *, may_still_write: bool) -> None:
        """The session ends; with may_still_write its device goes on as if nothing had happened."""
        del self.engines[session]
        self.counts.deaths += may_still_write
        self.counts.closes += not may_still_write
        self.manager.sessions.close(session, may_still_write=may_still_write)
        if may_still_write:
            self.ended.append(session)
        else:
            self.memory.in_flight.pop(session, None)

    def run_ended(self, session: SessionId) -> None:
        """A step of a dead session runs: a sequence that reads what it tears was given the block too early."""
        queue = self.memory.in_flight.get(session)
        if queue:
            queue[0].reads.clear()
            queue[0].own.clear()
            self.memory.num_late += 1
            self.memory.run_one(session)

    def end_quarantine(self, session: SessionId) -> None:
        while self.memory.in_flight.get(session):
            self.run_ended(session)
        self.ended.remove(session)
        self.manager.sessions.end_quarantine(session)

    def create(self, session: SessionId, choose: Choose) -> None:
        engine, limit = self.engines[session], self.config.limit_tokens
        used = sum(len(other.sequences) for other in self.engines.values())
        if used >= self.config.max_sequences:
            return
        size = self.config.block_size
        num_tokens = max(1, min(limit, size * choose(limit // size + 1) + choose(3) - 1))
        tokens = [choose(self.alphabet) for _ in range(num_tokens)]
        q = TierSequence(engine.next_id, self.scopes[choose(len(self.scopes))], tokens, limit, num_known=num_tokens)
        q.retention = self._retention(choose) if choose(4) == 3 and len(self.spans) == 1 else None
        engine.next_id += 1
        args = SequenceArgs(SequenceId(q.id), np.array(tokens, np.int32), 0, q.scope, retention=q.retention)
        self.manager.creation.create(session, args)
        engine.sequences[q.id] = q

    def hint(self, session: SessionId, choose: Choose) -> None:
        """Of any prefix; what a tier below has of it is brought ahead."""
        tokens = [choose(self.alphabet) for _ in range(1 + choose(self.config.limit_tokens))]
        scope, hint = self.scopes[choose(len(self.scopes))], ReuseHint(choose(3))
        self.manager.prefixes.hint(session, scope, np.array(tokens, np.int32), hint, 3600.0 * choose(2), prefetch=True)

    def narrow(self, session: SessionId, choose: Choose) -> None:
        """A sequence that kept everything keeps less from now on."""
        states = (SequenceState.WAITING, SequenceState.RUNNING)
        whole = [q for q in self.engines[session].sequences.values() if q.retention is None and q.state in states]
        if whole and len(self.spans) == 1:
            q = whole[choose(len(whole))]
            q.retention = self._retention(choose)
            self.manager.updates.update(session, q.id, retention=q.retention)
            self.counts.narrowed += 1

    def _retention(self, choose: Choose) -> Retention:
        size = self.config.block_size
        return Retention(choose(2 * size + 2), 1 + choose(2 * size + 2))

    # Steps

    def step(self, session: SessionId, choose: Choose) -> StepReply:
        """Draws a step, sends it, checks the answer and issues its device work."""
        engine = self.engines[session]
        step_id = engine.step_id + 1
        self._complete_some(engine, choose)
        commits = engine.commits(choose, self.counts)
        items = engine.items(choose, self.config.block_size)
        items.commits = commits
        batch = self._batch(engine, items, *engine.reports(choose, self.counts))
        before = {q.id: q.state for q in engine.sequences.values()}
        reply = self.manager.steps.step(session, batch)
        engine.step_id = step_id
        self.counts.steps += 1
        self.apply(engine, items, before, reply, choose)
        engine.told.apply(batch, reply)
        running = [q for q in engine.sequences.values() if q.state is SequenceState.RUNNING]
        told = {i: [table, *engine.told.groups.get(i, [])] for i, table in engine.told.tables.items()}
        assert told == {q.id: q.tables for q in running}, "tables as they are told"
        if choose(2):
            self.manager.maintenance.publish_pending(1 + choose(4))
            self.manager.maintenance.end_reported_orders(1 + choose(4))
        return reply

    def refuse_step(self, session: SessionId, choose: Choose) -> None:
        """Sends one wrong step, if there is one: it is refused and changes nothing."""
        engine = self.engines[session]
        self._complete_some(engine, choose)
        items = engine.wrong_items(choose)
        if items is None:
            return
        none = np.array([], np.int64)
        before = self._snapshot()
        try:
            self.manager.steps.step(session, self._batch(engine, items, none, none))
        except WrongState:
            self.counts.refused_steps += 1
        else:
            raise AssertionError(f"not refused: {items}")
        assert self._snapshot() == before, "a refused step leaves no trace"

    def clear(self) -> None:
        self.manager.prefixes.clear()
        self.counts.clears += 1

    def _snapshot(self) -> tuple[object, ...]:
        """All that a client can see."""
        ids = [(engine.session, q) for engine in self.engines.values() for q in engine.sequences]
        views = [self.manager.queries.view(session, SequenceId(q)) for session, q in ids]
        shown = [repr(view) for view in views]
        return (
            shown,
            self.manager.queries.stats(),
            [self.manager.state.pool.state(BlockId(b)) for b in range(self.config.num_blocks)],
        )

    def _batch(self, engine: TierEngine, items: TierItems, done: Int64Array, failed: Int64Array) -> StepBatch:
        """The engine's next step."""
        return step_batch(
            engine.step_id + 1,
            engine.completed,
            commits=items.commits,
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

    def _complete_some(self, engine: TierEngine, choose: Choose) -> None:
        """As much as the next step has to say, or more."""
        step_id = engine.step_id + 1
        least = step_id - 1 if engine.executor is Executor.CACHE else max(engine.completed, step_id - 2, 0)
        self._complete(engine, least + choose(step_id - least))

    def report(self, session: SessionId, choose: Choose) -> None:
        """A renewal: orders and steps are reported without a step."""
        engine = self.engines[session]
        self._complete(engine, engine.completed + choose(engine.step_id - engine.completed + 1))
        self.manager.steps.complete(session, engine.completed, *engine.reports(choose, self.counts))

    def evict(self, session: SessionId, count: int) -> None:
        """Evicts cached blocks outside of a step: to the host tier where this session's orders are run at once."""
        with self.manager.evictions.demoting(session) as moved:
            self.manager.evictions.evict_blocks(count)
        copies = moved.copies
        columns = (copies.transfer_kinds.tolist(), copies.transfer_sources.tolist(), copies.transfer_destinations.tolist())
        for kind, source, destination in zip(*columns, strict=True):
            self.memory.move(TierOrder(0, kind, source, destination))

    def audit(self) -> None:
        """The pool's own audit, and the content oracle."""
        wrong = self.manager.queries.check_invariants() + self.memory.faults
        assert not wrong, wrong
        swapper = self.manager.swapper
        assert swapper is not None
        told = {order.id for engine in self.engines.values() for order in engine.orders if not order.num_reports}
        transfers = swapper.offloader.transfers
        assert told == set(transfers.in_flight) - transfers.reported_ids(), "orders in flight are not those that were told"

    def drain(self) -> None:
        """Everything ends: no block of either tier may be left behind."""
        for session in list(self.engines):
            self.close(session, may_still_write=False)
        for session in list(self.ended):
            self.end_quarantine(session)
        self.audit()
        self.manager.prefixes.clear()
        self.audit()
        stats, config = self.manager.queries.stats(), self.config
        assert stats.num_free_blocks == config.num_usable_blocks, stats
        assert stats.num_free_host_blocks == max(config.num_host_blocks - 1, 0), stats
        counts = self.counts
        counts.dropped = stats.num_retention_dropped_blocks
        counts.demoted, counts.promoted = stats.num_demoted_blocks, stats.num_promoted_blocks
        counts.evicted_hosts, counts.moved = stats.num_evicted_host_blocks, self.memory.num_moved

    def _complete(self, engine: TierEngine, completed: int) -> None:
        self.memory.run_through(engine.session, completed)
        engine.completed = max(engine.completed, completed)
