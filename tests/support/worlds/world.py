"""One tiny pool with its engines, the reference model and the content oracle around it.

Owns the wiring: an operation is drawn, sent through the driver, applied to the reference, which compares the answer, and its
device work is issued to the shadow memory, where it runs as late as the protocol lets it. Rules: `audit` after every
operation, `compare` (comparisons.py) as often as the caller can afford. The Hypothesis machine and the simulator differ only in
what chooses.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from kvkeeper.cache_service.core.values.errors import CacheError
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import Retention, SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import Executor, ItemResult, ReuseHint, SequenceId, SessionId, StartResult
from tests.support.reference.naive_cache import Mismatch, NaiveSequence, expect, require
from tests.support.reference.naive_steps import NaiveSteps
from tests.support.reference.shadow_memory import Contents, DeviceStep, Read
from tests.support.reference.told_tables import ToldTables
from tests.support.worlds.comparisons import compare_contents, compare_pool, compare_views
from tests.support.worlds.drivers import Driver
from tests.support.worlds.engine_model import Choose, EngineModel, EngineSequence, StepPlan, int32, unread
from tests.support.worlds.scopes import SCOPES


@dataclasses.dataclass
class Offer:
    """A sequence as it was offered."""

    giver: SessionId
    known: NaiveSequence
    bytes: bytes
    sequence: tuple[object, ...]
    is_withdrawn: bool = False


class World:
    """A pool, its engines, its reference and its oracle. `alphabet` is the number of tokens; `num_scopes` 1 to 4."""

    def __init__(self, driver: Driver, *, alphabet: int = 2, num_scopes: int = len(SCOPES)) -> None:
        self.driver = driver
        self.config: PoolConfig = driver.config
        self.alphabet = alphabet
        self.scopes = SCOPES[:num_scopes]
        self.naive = NaiveSteps(driver.config)
        self.naive.class_of = self.class_of
        self.memory = driver.memory()
        self.contents = Contents()
        self.engines: dict[SessionId, EngineModel] = {}
        self.pin_ids: list[str] = []  # all that were ever given
        self.ended: list[SessionId] = []  # in quarantine: what they issued may still run
        self.offers: list[Offer] = []  # not taken yet
        self._told: dict[SessionId, ToldTables] = {}
        self.look_every = 1  # at so many refusals one is compared with all that was there before it
        self._num_refusals = 0

    def class_of(self, block: int) -> int:
        """The class of a block in the pool's eviction order, as the reference has it."""
        return {ReuseHint.NONE: -1, ReuseHint.UNSPECIFIED: 0, ReuseHint.SOON: 1}[self.driver.reuse_hint(block)]

    # Sessions

    def open(self, executor: Executor) -> SessionId:
        session = self.driver.open_session(executor)
        self.naive.open_session(session, executor)
        self.engines[session] = EngineModel(executor, self.config.block_size, self.config.num_usable_blocks, self.alphabet)
        self._told[session] = ToldTables(self.config.block_size)
        self.published_by_itself()  # what ended sessions left above the limits goes with the first call that looks
        return session

    def close(self, session: SessionId, *, may_still_write: bool) -> None:
        """The session ends; with may_still_write its device goes on as if nothing had happened."""
        self.engines.pop(session)
        self.offers = [offer for offer in self.offers if offer.giver != session]
        if not may_still_write:
            self.memory.forget(session)
        found = self.driver.close_session(session, may_still_write=may_still_write)
        expect(tuple(found), self.naive.close(session, may_still_write=may_still_write), "released, quarantined")
        if may_still_write:
            self.ended.append(session)
            kept = {block for block, sessions in self.naive.quarantine.items() if session in sessions}
            kept |= {block for q in self.naive.closing for block in q.table}
            exposed = self.memory.written_by(session) - kept
            require(not exposed, f"R6 blocks {exposed} could be had while an engine that died writes them")
        if self.engines:
            self.published_by_itself()

    def reclaim(self, choose: Choose) -> None:
        """Some of what ended sessions held is given back."""
        max_blocks = 1 + choose(3)
        expect(self.driver.reclaim(max_blocks), self.naive.reclaim(max_blocks), "more is to be given back")
        self.naive.observe()

    def run_ended(self, session: SessionId) -> None:
        self.memory.run_one(session, ended=True)

    def end_quarantine(self, session: SessionId) -> None:
        while self.memory.num_in_flight(session):
            self.run_ended(session)
        self.ended.remove(session)
        self.driver.end_quarantine(session)
        self.naive.end_quarantine(session)

    # Sequences and steps

    def create(self, session: SessionId, choose: Choose) -> None:
        """A prompt arrives; or is refused for want of a slot."""
        engine = self.engines[session]
        size = self.config.block_size
        retention = Retention(choose(2 * size + 2), 1 + choose(2 * size + 2)) if choose(3) == 2 else None
        limit = self.config.limit_with(retention)
        max_tokens = 0 if choose(2) else 1 + choose(limit)
        tokens = [engine.token(choose) for _ in range(engine.length(choose, max_tokens or limit))]
        scope = self.scopes[choose(len(self.scopes))]
        if self.naive.logits and choose(4) == 3:  # a prompt that may need no pass
            scope, known = list(self.naive.logits)[choose(len(self.naive.logits))]
            max_tokens, tokens = 0, list(known[:limit])
        priority = (0, 0, -1, 1)[choose(4)]
        number = 1 + choose(self.naive.last_number) if self.naive.last_number and choose(4) == 3 else 0
        sequence_id = SequenceId(engine.new_id(choose))
        usual = {1: ReuseHint.NONE, 3: ReuseHint.SOON}.get(size)  # in some pools nearly all say the same
        others = (ReuseHint.UNSPECIFIED, ReuseHint.UNSPECIFIED, ReuseHint.NONE, ReuseHint.SOON)
        hint = usual if usual is not None and choose(16) else others[choose(4)]
        seconds = (0.0, 0.0, 60.0, 3600.0)[choose(4)] if hint is ReuseHint.SOON else 0.0
        args = SequenceArgs(sequence_id, int32(tokens), max_tokens, scope, priority, retention, number, hint, seconds)
        if len(self.naive.holders) == self.config.max_sequences and not self.naive.closing:
            self.refused("OUT_OF_SEQUENCES", lambda: self.driver.create_sequence(session, args))
            return
        matched = self.driver.create_sequence(session, args)
        q = self.naive.create(session, args)
        expect(matched, len(self.naive.match(scope, tokens)) * self.config.block_size, "matched tokens of a create")
        engine.sequences[q.sequence_id] = EngineSequence(
            q.sequence_id, scope, tokens, len(tokens), q.max_tokens, retention=retention
        )

    def step(self, session: SessionId, choose: Choose) -> StepReply:
        plan = self.plan(session, choose)
        reply = self.driver.step(session, plan.batch)
        self.executed(session, plan, reply)
        self.published_by_itself()
        self.delivered(session, plan, reply, choose)
        return reply

    def publish(self, choose: Choose) -> None:
        """What steps committed is published, all of it or a few blocks."""
        if not self.driver.publishes_itself:
            self.publish_blocks(None if choose(2) == 0 else 1 + choose(3))

    def publish_blocks(self, max_blocks: int | None) -> None:
        self.naive.clock += 1
        is_left = self.driver.publish_pending(max_blocks)
        require(self.naive.publish(max_blocks or 10**9) <= is_left, "there is more to publish than the core says")
        self.naive.observe()
        self.enforced(max_blocks or 10**9)

    def published_by_itself(self) -> None:
        """A pool that publishes by itself has done so by now."""
        if self.driver.publishes_itself:
            self.naive.publish()
            self.naive.observe()
            self.enforced(10**9)

    def plan(self, session: SessionId, choose: Choose) -> StepPlan:
        """Draws a step. What it says is completed has run when this returns."""
        plan = self.engines[session].plan(choose)
        self.fail_on(self.memory.run_through(session, plan.batch.completed_step_id))
        return plan

    def executed(self, session: SessionId, plan: StepPlan, reply: StepReply) -> None:
        """The pool has applied the step: the reference judges it, and what was granted holds nothing of worth."""
        self.naive.step(session, plan.batch, reply)
        fresh = {*reply.new_block_ids.tolist(), *reply.copy_destinations.tolist()}
        for (sequence_id, _, _), result, hit in zip(
            plan.starts, reply.start_results.tolist(), reply.start_hits.tolist(), strict=True
        ):
            if result == StartResult.STARTED:
                fresh.update(self.check_hit(self.naive.sequences[session, sequence_id], hit))
        for sequence_id, _, _ in plan.starts[:1]:
            self.read_logits(session, self.naive.sequences[session, sequence_id])
        self.memory.spoil(fresh)
        copies = list(zip(reply.copy_sources.tolist(), reply.copy_destinations.tolist(), strict=True))
        if self.naive.sessions[session].executor is Executor.CACHE:
            self.memory.copy(copies)
            copies = []
        self.memory.issue(session, DeviceStep(plan.batch.step_id, copies))
        told = self._told[session]
        told.apply(plan.batch, reply)
        expect({q.sequence_id: q.table for q in self.naive.of(session) if q.running}, told.tables, "tables as they are told")

    def delivered(self, session: SessionId, plan: StepPlan, reply: StepReply, choose: Choose) -> None:
        """The reply has reached the engine, which issues its device work."""
        engine = self.engines[session]
        device = self.memory.last_issued(session)
        for (sequence_id, _, _), result, hit, reserved in zip(
            plan.starts, reply.start_results.tolist(), reply.start_hits.tolist(), reply.start_reserved.tolist(), strict=True
        ):
            if result == StartResult.STARTED:
                q = engine.sequences[sequence_id]
                q.running, q.committed, q.num_computed = True, hit, hit
                self._run_model(session, q, reserved, device, choose)
        for (_, child_id, _), result in zip(plan.forks, reply.fork_results.tolist(), strict=True):
            if result == ItemResult.NO_ROOM:
                engine.sequences.pop(child_id, None)
        for (sequence_id, least, _), granted in zip(plan.reserves, reply.reserve_reserved.tolist(), strict=True):
            if granted >= least:
                self._run_model(session, engine.sequences[sequence_id], granted, device, choose)
        device.is_known = True

    def check_hit(self, q: NaiveSequence, hit: int) -> list[int]:
        """Blocks hit must hold the prompt before anything in flight has run (R4, R6). Returns the blocks behind them."""
        num_hit = hit // self.config.block_size
        wanted = self.contents.spell(q.scope, q.tokens[:hit])
        if not self.memory.spells(q.table[:num_hit], wanted):
            raise Mismatch(f"R4 hit of {q.sequence_id}: blocks {q.table[:num_hit]} do not hold its first {hit} tokens")
        return q.table[num_hit:]

    def complete(self, session: SessionId, choose: Choose) -> None:
        """RenewSession reports device work of an idle engine."""
        engine = self.engines[session]
        engine.completed += choose(engine.step_id - engine.completed + 1)
        self.fail_on(self.memory.run_through(session, engine.completed))
        self.driver.complete(session, engine.completed)
        self.naive.clock += 1
        self.naive.complete(session, engine.completed)
        self.naive.settle()
        self.naive.observe()
        self.published_by_itself()

    def narrow(self, session: SessionId, choose: Choose) -> bool:
        """One sequence keeps less from now on; to keep more is refused. Whether it does."""
        ours = list(self.engines[session].sequences.values())
        if not ours:
            return False
        q, size = ours[choose(len(ours))], self.config.block_size
        wanted, held = Retention(choose(2 * size + 2), 1 + choose(2 * size + 2)), q.retention
        if held and (wanted.num_sink_tokens > held.num_sink_tokens or wanted.num_window_tokens > held.num_window_tokens):
            self.refused("INVALID_FIELD", lambda: self.driver.update(session, q.sequence_id, wanted))
            return False
        self.driver.update(session, q.sequence_id, wanted)
        self.naive.narrow(self.naive.sequences[session, q.sequence_id], wanted)
        if wanted != held:
            self.naive.observe()
        q.retention = wanted
        q.drop(size)
        return True

    def change_hint(self, session: SessionId, choose: Choose) -> bool:
        """More is known of one sequence's reuse. Whether it is news."""
        ours = list(self.engines[session].sequences.values())
        if not ours:
            return False
        q = self.naive.sequences[session, ours[choose(len(ours))].sequence_id]
        wanted = ReuseHint(choose(3))
        is_news = wanted != q.hint
        self.driver.update(session, q.sequence_id, None, wanted)
        self.naive.change_hint(q, wanted)
        return is_news

    # Sequences change their session

    def hand_off(self, session: SessionId, choose: Choose) -> bool:
        """Offers a sequence of the session, or lets another session take one. Whether one was taken."""
        ours = [offer for offer in self.offers if offer.giver == session]
        if ours and choose(3):
            return self._take(ours[choose(len(ours))], choose)
        running = [q for q in self.engines[session].sequences.values() if q.running]
        if not running:
            return False
        known = self.naive.sequences[session, running[choose(len(running))].sequence_id]
        completed, filling = self.naive.sessions[session].completed, set(self.naive.filling).intersection(known.table)
        # A block that it shares, or that another sequence has dropped, is copied before it is written for this one.
        writable, naive = known.writable(self.config.block_size), self.naive
        own = {block for block in writable if naive.num_holders(block) == 1 and block not in naive.fences}
        if filling or self.memory.written_by(session) & own:
            self.refused("STEP_NOT_COMPLETED", lambda: self.driver.hand_off(session, known.sequence_id))
            return False
        try:
            made = Offer(session, known, self.driver.hand_off(session, known.sequence_id), known.as_offered)
        except CacheError as error:
            require(error.reason == "STEP_NOT_COMPLETED", f"R7: an offer is refused with {error.reason}")
            require(max(known.granted_at) > completed, "R7: an offer is refused, and its steps are completed")
            return False
        for offer in [offer for offer in self.offers if offer.known is known]:
            is_same = (offer.sequence, offer.bytes) == (made.sequence, made.bytes)
            has_ended = offer.is_withdrawn or offer.sequence != made.sequence
            require(is_same != has_ended, "an offer holds until it is withdrawn or its sequence changes")
            self.offers.remove(offer)
        self.offers.append(made)
        if choose(4) == 3:
            self.driver.withdraw(session, known.sequence_id)
            made.is_withdrawn = True
        return choose(2) == 0 and self._take(made, choose)

    def _take(self, offer: Offer, choose: Choose) -> bool:
        takers = [session for session in self.engines if session != offer.giver]
        if not takers:
            return False
        taker, known = takers[choose(len(takers))], offer.known
        sequence_id = SequenceId(self.engines[taker].new_id(choose))
        self.offers.remove(offer)
        is_there = self.naive.sequences.get((offer.giver, known.sequence_id)) is known
        if not is_there or offer.is_withdrawn or known.as_offered != offer.sequence:
            self.refused("UNKNOWN_OFFER", lambda: self.driver.take(taker, offer.bytes, sequence_id))
            return False
        self.publish_blocks(None)
        table = self.driver.take(taker, offer.bytes, sequence_id)
        self._told[offer.giver].tables.pop(known.sequence_id, None)  # a session of one-item calls is told none
        self._told[taker].tables[sequence_id] = table
        given = self.engines[offer.giver].sequences.pop(known.sequence_id)
        num_known, counters = len(known.tokens), (known.committed, known.reserved, known.committed)
        self.engines[taker].sequences[sequence_id] = dataclasses.replace(
            given, sequence_id=sequence_id, tokens=given.tokens[:num_known], num_known=num_known, committed=counters[0],
            reserved=counters[1], num_computed=counters[2], computed_at={},
        )  # fmt: skip
        self.naive.take(known, taker, sequence_id)
        expect(table, known.table, "table of a sequence that was taken")
        self.refused("UNKNOWN_OFFER", lambda: self.driver.take(taker, offer.bytes, SequenceId(sequence_id + 1)))
        expect(self.driver.take(taker, offer.bytes, sequence_id), table, "a repeat")
        self.refused("UNKNOWN_SEQUENCE", lambda: self.driver.withdraw(offer.giver, given.sequence_id))
        self.naive.observe()
        return True

    def clear(self, session: SessionId) -> None:
        expect(self.driver.clear_prefix_cache(session), self.naive.clear(), "freed, forgotten")
        self.naive.observe()
        self.published_by_itself()

    def evict(self, session: SessionId, num_free: int) -> None:
        self._evict(session, num_free, lambda: self.driver.evict_blocks(session, num_free))

    def evict_excess(self) -> None:
        """What is held and cached above the configured share goes, between two steps."""
        session, share = next(iter(self.engines), None), Fraction(str(self.config.evict_above))
        if session is not None:
            usable = self.config.num_usable_blocks
            self._evict(session, usable - math.floor(share * usable), self.driver.evict_excess)

    def _evict(self, session: SessionId, num_free: int, call: Callable[[], int]) -> None:
        self.naive.clock += 1
        num_evicted = self.driver.evict_blocks(session, num_free)
        self.naive.evict_to(num_free, num_evicted, self.left_index(session))
        num_evicted = call()
        self.naive.evict_to(num_free, num_evicted, self.left_index(session))

    # Pins and time

    def pin(self, session: SessionId, choose: Choose) -> None:
        scope, tokens = self._any_prefix(choose)
        ttl = (0.5, 3.0, 60.0)[choose(3)]
        if not self.naive.can_pin(scope, tokens):
            self.refused("OUT_OF_BLOCKS", lambda: self.driver.pin_prefix(session, scope, int32(tokens), ttl))
            return
        found = self.driver.pin_prefix(session, scope, int32(tokens), ttl)
        self.naive.pin(session, scope, tokens, ttl, found)
        self.pin_ids += [found[0]]
        if found[0]:
            self.naive.observe()

    def hint(self, session: SessionId, choose: Choose) -> None:
        scope, tokens = self._any_prefix(choose)
        hint, seconds = ReuseHint(choose(3)), (0.0, 60.0, 61.0, 3600.0)[choose(4)]
        num_tokens = self.driver.hint_prefix(session, scope, int32(tokens), hint, seconds)
        self.naive.hint(session, scope, tokens, hint, seconds, num_tokens)

    def _any_prefix(self, choose: Choose) -> tuple[str, list[int]]:
        """Of something cached, or of anything."""
        scope, tokens = self.scopes[choose(len(self.scopes))], [choose(self.alphabet) for _ in range(choose(12) + 1)]
        if self.naive.index and choose(4):
            scope, key = list(self.naive.index)[choose(len(self.naive.index))]
            tokens = [*key, *tokens[: choose(3)]]
        return scope, tokens

    def unpin(self, session: SessionId, choose: Choose) -> None:
        """A pin of the session ends; one of another, or one that has ended, is refused."""
        pin_id = ("", *self.pin_ids)[choose(len(self.pin_ids) + 1)]
        pin = self.naive.pins.get(pin_id)
        if pin is None or pin.session != session:
            self.refused("UNKNOWN_PIN", lambda: self.driver.unpin_prefix(session, pin_id))
        else:
            self.driver.unpin_prefix(session, pin_id)
            self.naive.unpin(pin_id)
            self.naive.observe()

    def store_logits(self, session: SessionId, choose: Choose) -> None:
        """Of a prefix that is cached, or of one that is not."""
        ours = self.naive.of(session)
        if not ours:
            return
        q, size = ours[choose(len(ours))], self.config.block_size
        num_tokens = choose(len(q.tokens) // size + 1) * size
        key, num_blocks = (q.scope, tuple(q.tokens[:num_tokens])), num_tokens // size
        sizes = {len(stored) for stored in self.naive.logits.values()}
        logits = logits_of(*key, num_logits=2 if choose(3) else 1 + choose(3))
        send = lambda: self.driver.store_logits(session, q.sequence_id, num_tokens, logits)  # noqa: E731
        if not 0 < num_tokens <= q.committed:
            self.refused("INVALID_FIELD", send)
        elif num_blocks > q.published or not q.table[num_blocks - 1] or not self.config.logits_memory:
            self.refused("WRONG_STATE", send)
        elif self.config.logits_memory < len(logits) or (sizes and {len(logits)} != sizes):
            self.refused("INVALID_FIELD", send)
        else:
            send()
            self.naive.store_logits(key, logits)

    def read_logits(self, session: SessionId, q: NaiveSequence) -> None:
        """What was promised is what belongs to the prompt; of the others there is none."""
        if (session, q.sequence_id) in self.naive.promised:
            found = self.driver.read_logits(session, q.sequence_id)
            wanted = logits_of(q.scope, tuple(q.tokens[: q.hit]), num_logits=len(found) // 4)
            expect(found, wanted, "logits")
            expect(found, self.naive.promised[session, q.sequence_id][1], "logits, of the size that was stored")
        else:
            self.refused("UNKNOWN_LOGITS", lambda: self.driver.read_logits(session, q.sequence_id))

    def pass_time(self, seconds: float) -> None:
        """At most a second at a time: a service may take so long until it looks at what falls due."""
        while seconds > 0:
            self.driver.advance(min(seconds, 1.0))
            self.naive.pass_time(min(seconds, 1.0))
            self.enforced(10**9)
            self.naive.observe()
            seconds -= 1.0

    def enforced(self, max_blocks: int) -> None:
        """The pool has evicted what was above its limits, or so many blocks of it."""
        if self.naive.excess() > 0:
            self.naive.enforce(max_blocks, self.left_index(next(iter(self.engines), SessionId(""))))

    def left_index(self, session: SessionId) -> list[int]:
        """Blocks of which the reference says that they are indexed, and the pool that they are not."""
        return [block for (scope, tokens), block in self.naive.index.items()
                if block not in self.driver.match_prefix(session, scope, int32(list(tokens)))]  # fmt: skip

    # Checks

    def refused(self, reason: str, call: Callable[[], object]) -> None:
        self.refused_with((reason,), call)

    def refused_with(self, reasons: tuple[str, ...], call: Callable[[], object]) -> None:
        """The call fails with one of these reasons and changes nothing (R7)."""
        self._num_refusals += 1
        is_looked_at = self._num_refusals % self.look_every == 0
        before = self.snapshot() if is_looked_at else ()
        try:
            call()
        except CacheError as error:
            require(error.reason in reasons, f"R7: refused with {error.reason} ({error}), not with {reasons}")
        else:
            raise Mismatch(f"R7: not refused with {reasons}")
        if is_looked_at:
            expect(self.snapshot(), before, "R7 state after a refusal")

    def snapshot(self) -> tuple[object, ...]:
        """All that a client can see, but for how often it has asked."""
        shown = self.driver.shown([(SessionId(session), SequenceId(i)) for session, i in self.naive.sequences])
        stats = vars(self.driver.stats()) | {"revision": 0, "num_steps": 0, "num_refusals": 0, "num_refused_starts": 0}
        return shown, stats

    def audit(self) -> None:
        wrong = self.driver.check_invariants()
        if wrong:
            raise Mismatch(f"R1 audit: {wrong}")

    def compare(self) -> None:
        """Views and block states against the reference, contents against the oracle (R1 to R4)."""
        compare_views(self.driver, self.naive)
        compare_pool(self.driver, self.naive)
        compare_contents(self.driver, self.naive, self.memory, self.contents, list(self.engines))

    def fail_on(self, faults: list[str]) -> None:
        if faults:
            raise Mismatch(f"R3: {faults}")

    def _run_model(self, session: SessionId, q: EngineSequence, granted: int, device: DeviceStep, choose: Choose) -> None:
        """One sequence's part of the forward pass: attend to what is computed, write the rest."""
        q.reserved = max(q.reserved, granted)
        first, last = self.engines[session].compute(choose, q, granted)
        table = list(self._told[session].tables[q.sequence_id])
        contents = self.contents.spell(q.scope, q.tokens[:last])
        label = f"R6 step {device.step_id} of sequence {q.sequence_id}"
        device.reads.append(Read(label, table, contents[:first], unread(q.retention, first)))
        device.writes += [(self.memory.slot(table, position), contents[position]) for position in range(first, last)]


def logits_of(scope: str, tokens: tuple[int, ...], num_logits: int) -> bytes:
    """Numbers, 1 to 3 of them, that are those of no other prefix."""
    digest = zlib.crc32(repr((scope, tokens)).encode())
    return np.array([digest & 0xFFFF, digest >> 16, digest & 0xFF], np.float32)[:num_logits].tobytes()
