"""Both tiers under Hypothesis: contents are right and nothing leaks through any mix of steps, orders and deaths."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Executor, SessionId
from tests.support.reference.read_spans import make_spans
from tests.support.slices import scaled
from tests.support.tiers.tier_world import TierWorld
from tests.support.worlds.machine import chooser

_CHUNKED = (*make_spans(0, 2), ReadSpan(3, is_chunk=True))
_STATES = (*make_spans(0), state_span(2)), (*make_spans(0, 2), state_span(1))


def _config(
    num_blocks: int, num_host_blocks: int, group_spans: tuple[ReadSpan, ...], has_tail: bool, **others: Any
) -> PoolConfig:
    """num_blocks: for each group of layers."""
    usable = (num_blocks - 1) * len(group_spans)
    are_windows = not any(span.is_whole or span.is_chunk or span.checkpoint_blocks for span in group_spans[1:])
    is_tail = has_tail and len(group_spans) > 1 and are_windows
    return PoolConfig(usable + 1, num_host_blocks=num_host_blocks, group_spans=group_spans, has_tail=is_tail, **others)


configs = st.builds(
    _config,
    num_blocks=st.integers(2, 8),
    group_spans=st.sampled_from(
        [*map(make_spans, (0, 0)), make_spans(0, 3), make_spans(0, 1), make_spans(0, 0, 2), _CHUNKED, *_STATES]
    ),
    has_tail=st.booleans(),
    block_size=st.integers(1, 3),
    max_sequences=st.integers(1, 5),
    max_tokens_per_sequence=st.integers(1, 16),
    watermark=st.sampled_from([0.0, 0.3]),
    num_host_blocks=st.integers(2, 10),
)


class TierMachine(RuleBasedStateMachine):
    """Up to three sessions on one pool."""

    @initialize(config=configs, alphabet=st.integers(1, 2), faults=st.sampled_from([2, 5, 1000]))
    def start(self, config: PoolConfig, alphabet: int, faults: int) -> None:
        self.world = TierWorld(config, alphabet=alphabet, faults=faults)

    @precondition(lambda self: len(self.world.engines) < 3)
    @rule(executor=st.sampled_from(Executor))
    def open(self, executor: Executor) -> None:
        self.world.open(executor)

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        self.world.create(self.any_of(data), chooser(data))

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data(), count=st.integers(1, 6))
    def step(self, data: st.DataObject, count: int) -> None:
        session = self.any_of(data)
        for _ in range(count):
            self.world.step(session, chooser(data))
            self.world.audit()

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def refuse_step(self, data: st.DataObject) -> None:
        self.world.refuse_step(self.any_of(data), chooser(data))

    @rule()
    def clear(self) -> None:
        self.world.clear()

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        self.world.report(self.any_of(data), chooser(data))

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data())
    def narrow(self, data: st.DataObject) -> None:
        self.world.narrow(self.any_of(data), chooser(data))

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data(), count=st.integers(1, 8))
    def evict(self, data: st.DataObject, count: int) -> None:
        self.world.evict(self.any_of(data), count)

    @precondition(lambda self: self.world.engines)
    @rule(data=st.data(), may_still_write=st.booleans())
    def close(self, data: st.DataObject, may_still_write: bool) -> None:
        self.world.close(self.any_of(data), may_still_write=may_still_write)

    @precondition(lambda self: self.world.ended)
    @rule(data=st.data(), drained=st.booleans())
    def run_ended(self, data: st.DataObject, drained: bool) -> None:
        session = self.world.ended[chooser(data)(len(self.world.ended))]
        (self.world.end_quarantine if drained else self.world.run_ended)(session)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.audit()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()

    def any_of(self, data: st.DataObject) -> SessionId:
        sessions = list(self.world.engines)
        return sessions[chooser(data)(len(sessions))]


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=scaled(150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
