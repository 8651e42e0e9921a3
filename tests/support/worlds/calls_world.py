"""A world with sessions that may also use the one-item calls, with writes that happen at once.

Owns the choice of calls and their retries: every call that the protocol calls retry-safe is sometimes sent twice, and must
change nothing the second time.
"""

from kvkeeper.cache_service.core.values.errors import CacheError
from kvkeeper.cache_service.core.values.types import NULL_BLOCK, Executor, SequenceId, SessionId
from tests.support.reference.naive_cache import NaiveSequence, expect
from tests.support.reference.naive_calls import NaiveCalls
from tests.support.worlds.drivers import Driver
from tests.support.worlds.engine_model import Choose, EngineModel, EngineSequence, int32
from tests.support.worlds.scopes import SCOPES
from tests.support.worlds.world import World


class CallsWorld(World):
    """A World with sessions of one-item calls too: it chooses the calls, and sends the retry-safe ones again."""

    naive: NaiveCalls

    def __init__(self, driver: Driver, *, alphabet: int = 2, num_scopes: int = len(SCOPES)) -> None:
        super().__init__(driver, alphabet=alphabet, num_scopes=num_scopes)
        self.naive = NaiveCalls(driver.config)
        self.naive.class_of = self.class_of
        self.naive.reclaim_at_once = driver.reclaim_at_once
        self.one_item: list[SessionId] = []  # in the order they were opened, not that of their ids
        self.num_refused = 0

    def open_for_calls(self) -> SessionId:
        session = self.open(Executor.CACHE)
        self.one_item.append(session)
        self.naive.sessions[session].is_one_item = True
        return session

    def close(self, session: SessionId, *, may_still_write: bool) -> None:
        if session in self.one_item:
            self.one_item.remove(session)
        super().close(session, may_still_write=may_still_write)

    def call(self, session: SessionId, choose: Choose) -> None:
        """One call on one sequence of the session; the service publishes before it."""
        self.publish_blocks(None)
        engine = self.engines[session]
        if not engine.sequences or choose(6) == 5:
            self.create(session, choose)
            return
        q = list(engine.sequences.values())[choose(len(engine.sequences))]
        known = self.naive.sequences[session, q.sequence_id]
        calls = [self._extend, self._write, self._commit, self._fork, self._truncate, self._release]
        call = self._extend if not q.running and choose(8) else calls[choose(len(calls))]
        call(session, engine, q, known, choose)
        self.published_by_itself()

    def _extend(self, session: SessionId, engine: EngineModel, q: EngineSequence, known: NaiveSequence, choose: Choose) -> None:
        length = engine.length(choose, q.max_tokens)
        look_up = choose(4) > 0
        if self.config.num_usable_blocks < self.naive.num_blocks(length) - known.table.count(NULL_BLOCK):
            self.refused("INVALID_FIELD", lambda: self.driver.extend(session, q.sequence_id, length, look_up=look_up))
            return
        if not self.naive.fits(known, length, look_up=look_up):
            self.refused("OUT_OF_BLOCKS", lambda: self.driver.extend(session, q.sequence_id, length, look_up=look_up))
            self.num_refused += 1
            return
        was_waiting = not known.running
        copies = self.driver.extend(session, q.sequence_id, length, look_up=look_up)
        pairs = None if copies is None else list(zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True))
        shown = self._table(session, q)
        before = list(known.table)
        fresh = self.naive.extend(known, length, shown, pairs, look_up=look_up)
        self.memory.spoil(fresh)
        self.memory.copy([(old, new) for old, new in zip(before, shown, strict=False) if old != new])
        if was_waiting:
            self.check_hit(known, known.hit)
            q.running, q.committed, q.num_computed = True, known.hit, known.hit
        q.reserved = known.reserved
        self._write(session, engine, q, known, choose)

    def _write(self, session: SessionId, engine: EngineModel, q: EngineSequence, known: NaiveSequence, choose: Choose) -> None:
        """K and V of some of the slots behind what is written; tokens not told yet may be drawn again."""
        if not q.running:
            return
        first = q.num_computed - choose(q.num_computed - q.committed + 1)
        del q.tokens[max(first, q.num_known) :]
        last = first + choose(max(1, q.reserved - first + 1)) if choose(3) == 2 else max(first, q.reserved)
        while len(q.tokens) < last:
            q.tokens.append(engine.token(choose))
        contents = self.contents.spell(q.scope, q.tokens[:last])
        written = contents[first:last]
        if written and not self.driver.write_kv(session, q.sequence_id, first, written):
            for position, content in enumerate(written, start=first):
                self.memory.write(self.memory.slot(known.table, position), content)
        q.num_computed = last

    def _commit(self, session: SessionId, engine: EngineModel, q: EngineSequence, known: NaiveSequence, choose: Choose) -> None:
        if not q.running:
            self.refused("WRONG_STATE", lambda: self.driver.commit(session, q.sequence_id, 1, 0, int32([])))
            return
        length = q.committed + choose(q.num_computed - q.committed + 1)
        told = max(length, q.num_known)
        told += choose(len(q.tokens) - told + 1)
        first, new = q.num_known, q.tokens[q.num_known : told]
        self.driver.commit(session, q.sequence_id, length, first, int32(new))
        if new or length > q.committed:  # else it says nothing new, like a repeat
            self.naive.commit_one(known, length, new, self._table(session, q))
        if choose(3) == 2:  # the answer was lost, the client asks again
            before = self.snapshot()
            self.driver.commit(session, q.sequence_id, length, first, int32(new))
            expect(self.snapshot(), before, "R7 state after a repeated commit")
        q.num_known, q.committed = told, length
        q.drop(self.config.block_size)

    def _fork(self, session: SessionId, engine: EngineModel, q: EngineSequence, known: NaiveSequence, choose: Choose) -> None:
        child_id = engine.new_id(choose)
        if not q.running or not q.committed:
            reason = "INVALID_FIELD" if q.running else "WRONG_STATE"
            self.refused(reason, lambda: self.driver.fork(session, q.sequence_id, child_id, 1))
            return
        length = engine.length(choose, q.committed)
        if not known.can_be_cut(length, self.config.block_size):
            self.refused("INVALID_FIELD", lambda: self.driver.fork(session, q.sequence_id, child_id, length))
            return
        if len(self.naive.holders) == self.config.max_sequences:
            self.refused("OUT_OF_SEQUENCES", lambda: self.driver.fork(session, q.sequence_id, child_id, length))
            return
        self.driver.fork(session, q.sequence_id, child_id, length)
        if choose(3) == 2:
            before = self.snapshot()
            self.driver.fork(session, q.sequence_id, child_id, length)
            expect(self.snapshot(), before, "R7 state after a repeated fork")
        self.naive.fork_one(known, child_id, length)
        engine.sequences[child_id] = q.forked(child_id, length, self.config.block_size)

    def _truncate(
        self, session: SessionId, engine: EngineModel, q: EngineSequence, known: NaiveSequence, choose: Choose
    ) -> None:
        length = engine.length(choose, q.max_tokens)
        if not q.running:
            self.refused("WRONG_STATE", lambda: self.driver.truncate(session, q.sequence_id, length))
            return
        if not known.can_be_cut(length, self.config.block_size):
            self.refused("INVALID_FIELD", lambda: self.driver.truncate(session, q.sequence_id, length))
            return
        for _ in range(1 + choose(2)):  # idempotent
            self.driver.truncate(session, q.sequence_id, length)
        self.naive.truncate_one(known, length)
        q.holes = {block_idx for block_idx in q.holes if block_idx * self.config.block_size < length}
        del q.tokens[length:]
        q.num_known, q.committed = min(q.num_known, length), min(q.committed, length)
        q.reserved = min(q.reserved, length)
        q.cut(length)

    def _release(
        self, session: SessionId, engine: EngineModel, q: EngineSequence, known: NaiveSequence, choose: Choose
    ) -> None:
        found = self.driver.release(session, q.sequence_id)
        expect(found, self.naive.release_one(known), f"blocks dropped by the release of {q.sequence_id}")
        del engine.sequences[q.sequence_id]
        try:
            self.driver.release(session, q.sequence_id)
        except CacheError as error:
            expect(error.reason, "UNKNOWN_SEQUENCE", "a second release")
        else:
            raise AssertionError("a second release was not refused")

    def _table(self, session: SessionId, q: EngineSequence) -> list[int]:
        return [int(block) for block in self.driver.view(session, SequenceId(q.sequence_id)).block_table]
