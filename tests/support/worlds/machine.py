"""The Hypothesis machine: any pool behind a driver, against the reference model and the content oracle.

Owns the rules. Everything is tiny, so that prefixes collide and blocks run out all the time; after every rule the pool is
audited and compared.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Executor, SessionId
from tests.support.worlds.calls_world import CallsWorld
from tests.support.worlds.drivers import Driver
from tests.support.worlds.engine_model import Choose
from tests.support.worlds.hostile import refuse_step
from tests.support.worlds.scopes import SCOPES

MAX_SESSIONS = 3

configs = st.builds(
    PoolConfig,
    num_blocks=st.integers(2, 10),
    block_size=st.integers(1, 4),
    max_sequences=st.integers(1, 6),
    max_tokens_per_sequence=st.integers(1, 24),
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
    eviction_policy=st.just("lru"),  # the model knows its order exactly
    prefix_caching=st.sampled_from([True, True, True, False]),
    prefix_ttl=st.sampled_from([None, None, 1.0, 4.5]),
    min_prefix_tokens=st.sampled_from([0, 0, 3]),
    max_cached_blocks=st.sampled_from([None, None, 0, 2]),
    tenant_quota=st.sampled_from([1.0, 1.0, 0.2, 0.5]),
    logits_memory=st.sampled_from([0, 4, 16, 1000]),  # two numbers of 4 bytes each
    evict_above=st.sampled_from([1.0, 1.0, 0.75, 0.1]),
    soon_share=st.sampled_from([0.25, 0.0, 0.5, 1.0]),
    pressure_levels=st.sampled_from([(0.6, 0.8, 0.95), (0.01, 0.3, 0.5), (0.5, 0.5, 1.0)]),
)


class CacheMachine(RuleBasedStateMachine):
    """Subclasses make the driver."""

    def make_driver(self, config: PoolConfig) -> Driver:
        raise NotImplementedError

    @initialize(config=configs, alphabet=st.integers(1, 3), num_scopes=st.integers(1, len(SCOPES)))
    def start(self, config: PoolConfig, alphabet: int, num_scopes: int) -> None:
        self.world = CallsWorld(self.make_driver(config), alphabet=alphabet, num_scopes=num_scopes)

    @precondition(lambda self: len(self.world.engines) < MAX_SESSIONS)
    @rule(executor=st.sampled_from(Executor))
    def open_for_steps(self, executor: Executor) -> None:
        self.world.open(executor)

    @precondition(lambda self: len(self.world.engines) < MAX_SESSIONS)
    @rule()
    def open_for_calls(self) -> None:
        self.world.open_for_calls()

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        choose = chooser(data)
        self.world.create(self.any_session(choose), choose)

    @precondition(lambda self: self.stepping())
    @rule(data=st.data(), count=st.integers(1, 8))
    def step(self, data: st.DataObject, count: int) -> None:
        choose = chooser(data)
        session = self.any_of(self.stepping(), choose)
        for _ in range(count):
            self.world.step(session, choose)
            self.holds()
            if choose(2):
                self.world.publish(choose)
                self.holds()
            if self.world.config.evict_above < 1:
                self.world.evict_excess()
                self.holds()

    @precondition(lambda self: self.world.naive.closing)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        self.world.reclaim(chooser(data))

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.world.publish(chooser(data))

    @precondition(lambda self: self.world.one_item)
    @rule(data=st.data(), count=st.integers(1, 8))
    def call(self, data: st.DataObject, count: int) -> None:
        choose = chooser(data)
        session = self.any_of(self.world.one_item, choose)
        for _ in range(count):
            self.world.call(session, choose)
            self.holds()

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def narrow(self, data: st.DataObject) -> None:
        choose = chooser(data)
        self.world.narrow(self.any_session(choose), choose)

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def change_hint(self, data: st.DataObject) -> None:
        choose = chooser(data)
        self.world.change_hint(self.any_session(choose), choose)

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def hand_off(self, data: st.DataObject) -> None:
        choose = chooser(data)
        self.world.hand_off(self.any_session(choose), choose)

    @precondition(lambda self: self.stepping())
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        choose = chooser(data)
        self.world.complete(self.any_of(self.stepping(), choose), choose)

    @precondition(lambda self: self.stepping())
    @rule(data=st.data())
    def run_device(self, data: st.DataObject) -> None:
        """The oldest step in flight of a session runs."""
        session = self.any_of(self.stepping(), chooser(data))
        self.world.fail_on(self.world.memory.run_one(session))

    @precondition(lambda self: self.stepping())
    @rule(data=st.data())
    def hostile_step(self, data: st.DataObject) -> None:
        choose = chooser(data)
        refuse_step(self.world, self.any_of(self.stepping(), choose), choose)

    @precondition(lambda self: any(self.world.engines[s].step_id for s in self.stepping()))
    @rule(data=st.data())
    def repeat_step(self, data: st.DataObject) -> None:
        """Exactly once: the same bytes back, nothing changed."""
        stepped = [session for session in self.stepping() if self.world.engines[session].step_id]
        before = self.world.snapshot()
        assert self.world.driver.repeat_step(self.any_of(stepped, chooser(data)))
        assert self.world.snapshot() == before

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data(), may_still_write=st.booleans())
    def end_session(self, data: st.DataObject, may_still_write: bool) -> None:
        self.world.close(self.any_session(chooser(data)), may_still_write=may_still_write)

    @precondition(lambda self: self.world.ended)
    @rule(data=st.data())
    def run_ended(self, data: st.DataObject) -> None:
        """A step of a dead session runs on the device all the same."""
        self.world.run_ended(self.any_of(self.world.ended, chooser(data)))

    @precondition(lambda self: self.world.ended)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        self.world.end_quarantine(self.any_of(self.world.ended, chooser(data)))

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data(), num_free=st.none() | st.integers(0, 10))
    def forget(self, data: st.DataObject, num_free: int | None) -> None:
        """The whole index is cleared, or blocks are evicted until so many are free."""
        session = self.any_session(chooser(data))
        if num_free is None:
            self.world.clear(session)
        else:
            self.world.evict(session, num_free)

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data(), unpin=st.booleans())
    def pin(self, data: st.DataObject, unpin: bool) -> None:
        choose = chooser(data)
        (self.world.unpin if unpin else self.world.pin)(self.any_session(choose), choose)

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def hint(self, data: st.DataObject) -> None:
        choose = chooser(data)
        self.world.hint(self.any_session(choose), choose)

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def store_logits(self, data: st.DataObject) -> None:
        choose = chooser(data)
        self.world.store_logits(self.any_session(choose), choose)

    @rule(seconds=st.sampled_from([1.0, 2.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def holds(self) -> None:
        self.world.audit()
        self.world.compare()

    def stepping(self) -> list[SessionId]:
        return [session for session in self.world.engines if session not in self.world.one_item]

    def any_session(self, choose: Choose) -> SessionId:
        return self.any_of(list(self.world.engines), choose)

    def any_of(self, sessions: list[SessionId], choose: Choose) -> SessionId:
        return sessions[choose(len(sessions))]


def chooser(data: st.DataObject) -> Choose:
    return lambda count: data.draw(st.integers(0, count - 1)) if count > 1 else 0
