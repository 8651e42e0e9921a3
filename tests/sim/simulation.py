"""Seeded simulation of several engines on one pool, over a network that loses and repeats, under a virtual clock.

Owns the events: engines open, create, step and renew; requests and replies get lost and are sent again with the same bytes;
engines die, hang past their lease and come back, and what they had in flight goes on writing; old messages arrive late. One
seed replays everything. After every core call, or every few where a run says so, the pool is audited; every 16th it is compared
with the reference and with what its blocks hold. `Counts` proves that each fault fired.
"""

import random
from dataclasses import dataclass, field

from kvkeeper.cache_service.core.values.errors import CacheError
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import Executor, SessionId
from tests.support.reference.naive_cache import expect, require
from tests.support.worlds.calls_world import CallsWorld
from tests.support.worlds.drivers import CoreDriver, encode
from tests.support.worlds.engine_model import StepPlan
from tests.support.worlds.hostile import refuse_step

COMPARE_EVERY = 16
TTL = 10.0


@dataclass
class Counts:
    """How often each thing happened; names are those of the soak's summary."""

    core_calls: int = 0
    compares: int = 0
    changes: int = 0
    steps: int = 0
    requests_lost: int = 0
    replies_lost: int = 0
    repeats: int = 0
    conflicts: int = 0
    gaps: int = 0
    deaths: int = 0
    hangs: int = 0
    stale_calls: int = 0
    reaped: int = 0
    graced: int = 0
    late_writes: int = 0
    refused_steps: int = 0
    hits: int = 0
    copies_on_write: int = 0
    adopted: int = 0
    evicted: int = 0
    forks: int = 0
    pins: int = 0
    expired: int = 0
    quota_evictions: int = 0
    full_hits: int = 0
    retention_dropped: int = 0
    narrowed: int = 0
    claims: int = 0
    kept_for_elders: int = 0
    give_backs: int = 0
    computing: int = 0
    pressure_changes: int = 0
    clears: int = 0
    hand_offs: int = 0
    hints_changed: int = 0
    hints_ignored: int = 0
    hints_distrusted: int = 0

    def add(self, other: "Counts") -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Engine:
    """One engine process. `pending` was sent and not answered; a hung engine says nothing until `wakes`."""

    session: SessionId | None = None
    epoch: int = 0
    pending: StepPlan | None = None
    wakes: float = 0.0
    alive: bool = True
    old: list[tuple[SessionId, int, StepBatch]] = field(default_factory=list)  # messages that may still arrive


class Simulation:
    """One seed: one pool, a few engines."""

    def __init__(self, seed: int, audit_every: int = 1) -> None:
        self.rng = random.Random(seed)
        self._audit_every = audit_every
        rng = self.rng
        config = PoolConfig(
            num_blocks=rng.choice([5, 9, 17, 33, 65]),
            block_size=rng.choice([1, 2, 3, 4]),
            max_sequences=rng.choice([4, 8, 16, 32]),
            max_tokens_per_sequence=rng.choice([6, 12, 24, 48]),
            watermark=rng.choice([0.0, 0.01, 0.2]),
            eviction_policy="lru",  # the model knows its order exactly
            prefix_ttl=rng.choice([None, None, 1.0, 10.0]),
            min_prefix_tokens=rng.choice([0, 0, 3]),
            max_cached_blocks=rng.choice([None, None, 0, 4]),
            tenant_quota=rng.choice([1.0, 1.0, 0.2, 0.5]),
            logits_memory=rng.choice([0, 16, 1000]),
            evict_above=rng.choice([1.0, 1.0, 0.9, 0.5]),
            soon_share=rng.choice([0.25, 0.0, 0.5, 1.0]),
        )
        self.driver = CoreDriver(config, reclaim_at_once=rng.choice([1, 4, 10**9]))
        self.world = CallsWorld(self.driver, alphabet=rng.choice([1, 2, 3]))
        self.world.look_every = -(-audit_every // 2)
        self.engines = [Engine() for _ in range(rng.choice([1, 2, 3]))]
        self.loss = rng.choice([0.0, 0.1, 0.3])
        self.counts = Counts()
        self._recorded: dict[SessionId, tuple[StepBatch, StepReply]] = {}

    def choose(self, count: int) -> int:
        return int(self.rng.random() * count)

    def tick(self) -> None:
        """One event of one engine, and what the clock brings."""
        self.world.pass_time(self.rng.choice([0.001, 0.01, 0.05, 0.2]))
        self._reap()
        engine = self.engines[self.choose(len(self.engines))]
        if self.driver.now < engine.wakes:
            return
        if engine.session is None or not engine.alive:
            self._open(engine)
        elif engine.pending is not None:
            self._send(engine)
        else:
            self._act(engine)

    def finish(self) -> Counts:
        """The last audit, and the sums."""
        self.world.compare()
        naive, counts = self.world.naive, self.counts
        counts.changes, counts.late_writes = naive.num_changes, self.world.memory.num_late_writes
        stats = self.driver.stats()
        expect(stats.num_copies_on_write, naive.num_copies, "copies on write")
        expect(stats.num_adopted_blocks, naive.num_adopted, "adopted blocks")
        expect(stats.num_retention_dropped_blocks, naive.num_retention_dropped, "blocks dropped by retention")
        expect(stats.num_evicted_blocks, naive.num_evicted + naive.num_retention_dropped, "evicted blocks")
        expect(stats.num_expired_blocks, naive.num_expired, "expired blocks")
        expect(stats.num_hit_tokens, naive.num_hit_tokens, "tokens hit")
        counts.hits, counts.copies_on_write, counts.adopted = stats.num_hits, naive.num_copies, naive.num_adopted
        counts.evicted, counts.forks = naive.num_evicted, stats.num_forks
        counts.full_hits = stats.num_full_hits
        counts.expired, counts.quota_evictions = naive.num_expired, stats.num_quota_evictions
        counts.pins = sum(pin_id != "" for pin_id in self.world.pin_ids)
        counts.retention_dropped = naive.num_retention_dropped
        counts.claims, counts.kept_for_elders = naive.num_claims_made, naive.num_kept
        counts.give_backs, counts.computing = naive.num_given_back, naive.num_computing
        counts.hints_ignored, counts.hints_distrusted = naive.hints.num_ignored, naive.hints.num_distrusted
        counts.pressure_changes = naive.num_pressure_changes
        return counts

    def _open(self, engine: Engine) -> None:
        """A new process, or one that has lost its session: what the old one had mapped is unmapped first."""
        if engine.session in self.world.ended and engine.alive:
            self.world.end_quarantine(engine.session)
        session = self.world.open(self.rng.choice([Executor.ENGINE, Executor.ENGINE, Executor.CACHE]))
        engine.session, engine.epoch = session, self.driver.sessions[session].epoch
        engine.pending, engine.alive = None, True
        self._called()

    def _act(self, engine: Engine) -> None:
        session = engine.session
        assert session is not None
        if session not in self.driver.sessions:
            self._stale_call(engine, session)
            return
        self._renew(session)
        if self.choose(2):
            self.world.publish(self.choose)
        if self.world.naive.closing and not self.choose(3):
            self.world.reclaim(self.choose)
            self._called()
        event = self.choose(200)
        if event < 30:
            self.world.create(session, self.choose)
        elif event < 40 and self.world.engines[session].step_id:
            self.world.complete(session, self.choose)
        elif event == 40:
            engine.alive = False
            self.counts.deaths += 1
            if self.choose(2):  # its stream is seen to break; else only the lease tells
                self.driver.table.start_grace(self.driver.sessions[session], self.driver.now)
                self.counts.graced += 1
            engine.wakes = self.driver.now + self.rng.choice([0.1, 2.0, 20.0])
            return
        elif event == 41:
            self.counts.hangs += 1
            engine.wakes = self.driver.now + self.rng.choice([1.0, 9.0, 30.0])
            return
        elif event == 42:
            self.world.close(session, may_still_write=False)
            engine.session = None
        elif event < 51:
            self.counts.refused_steps += refuse_step(self.world, session, self.choose)
        elif event < 53:
            self._late_message(engine)
        elif event < 55:
            self.world.clear(session)
            self.counts.clears += 1
        elif event < 60:
            self.world.pin(session, self.choose)
        elif event < 62:
            self.world.unpin(session, self.choose)
        elif event < 64:
            self.counts.narrowed += self.world.narrow(session, self.choose)
        elif event < 66:
            self.counts.hints_changed += self.world.change_hint(session, self.choose)
        elif event < 71:
            self.counts.hand_offs += self.world.hand_off(session, self.choose)
        elif event < 78:
            self.world.store_logits(session, self.choose)
        elif event < 88:
            self.world.fail_on(self.world.memory.run_one(session))
            return
        else:
            engine.pending = self.world.plan(session, self.choose)
            self._send(engine)
            return
        self._called()

    def _send(self, engine: Engine) -> None:
        """One try of the pending step: lost on the way, lost on the way back, doubled, or answered."""
        session, plan = engine.session, engine.pending
        assert session is not None
        assert plan is not None
        if self.rng.random() < self.loss:
            self.counts.requests_lost += 1
            return
        if session not in self.driver.sessions:
            self._stale_call(engine, session)
            return
        reply = self._receive(session, engine.epoch, plan)
        if self.rng.random() < self.loss / 2:
            require(self._receive(session, engine.epoch, plan) is reply, "exactly once: another reply to a repeat")
        if self.rng.random() < self.loss:
            self.counts.replies_lost += 1
            return
        engine.pending = None
        engine.old.append((session, engine.epoch, plan.batch))
        del engine.old[:-4]
        self.world.delivered(session, plan, reply, self.choose)

    def _receive(self, session: SessionId, epoch: int, plan: StepPlan) -> StepReply:
        """The service's end of a step, as its shell does it: gate, core, record."""
        gate = self.driver.table.require(session, epoch, self.driver.now)
        self.driver.table.renew(gate, self.driver.now)
        raw = encode(plan.batch)
        recorded = gate.find_repeat(plan.batch.step_id, raw)
        if recorded is not None:
            self.counts.repeats += 1
            reply = self._recorded[session][1]
            expect(recorded, encode(reply), "exactly once: bytes of a repeat")
            return reply
        reply = self.driver.step(session, plan.batch)
        self._recorded[session] = (plan.batch, reply)
        self.counts.steps += 1
        self.world.executed(session, plan, reply)
        self._called()
        if self.driver.config.evict_above < 1:
            self.world.evict_excess()
            self._called()
        return reply

    def _late_message(self, engine: Engine) -> None:
        """A message of the past arrives once more: it is answered or refused, and changes nothing."""
        if not engine.old:
            return
        session, epoch, batch = self.rng.choice(engine.old)
        before = self.world.snapshot()
        try:
            gate = self.driver.table.require(session, epoch, self.driver.now)
            changed = self.rng.random() < 0.3
            recorded = gate.find_repeat(batch.step_id, encode(batch) + b"?" * changed)
            expect(recorded, encode(self._recorded[session][1]), "exactly once: bytes of a late repeat")
            require(not changed, "exactly once: other contents taken for a repeat")
            self.counts.repeats += 1
        except CacheError as error:
            self.counts.conflicts += error.reason == "STEP_CONFLICT"
            self.counts.gaps += error.reason == "STEP_GAP"
            self.counts.stale_calls += error.reason == "UNKNOWN_SESSION"
        expect(self.world.snapshot(), before, "R7 state after a late message")

    def _stale_call(self, engine: Engine, session: SessionId) -> None:
        """The engine was reaped while it hung. It is told so, drains its device and starts over."""
        try:
            self.driver.table.require(session, engine.epoch, self.driver.now)
        except CacheError as error:
            expect(error.reason, "UNKNOWN_SESSION", "a call of a session that ended")
            self.counts.stale_calls += 1
        else:
            raise AssertionError("a session that ended was let in")
        engine.pending = None
        if session in self.world.ended:
            self.world.end_quarantine(session)
            self._called()
        engine.session = None

    def _reap(self) -> None:
        """Leases and graces that ran out; writes of dead engines; quarantines of processes that have ended."""
        for gate in self.driver.table.expired(self.driver.now):
            require(gate.deadline <= self.driver.now or gate.grace_deadline is not None, "a live session was reaped")
            self.world.close(gate.id, may_still_write=True)
            self.counts.reaped += 1
            self._called()
        for session in list(self.world.ended):
            event = self.choose(40)
            if event < 4:
                self.world.run_ended(session)
            elif event == 4 and not any(e.session == session and e.alive for e in self.engines):
                self.world.end_quarantine(session)
                self._called()

    def _renew(self, session: SessionId) -> None:
        self.driver.table.renew(self.driver.sessions[session], self.driver.now)

    def _called(self) -> None:
        self.counts.core_calls += 1
        if self.counts.core_calls % self._audit_every == 0:
            self.world.audit()
        if self.counts.core_calls % COMPARE_EVERY == 0:
            self.counts.compares += 1
            self.world.compare()
