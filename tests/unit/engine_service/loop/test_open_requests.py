"""What becomes of open requests when a step's results come late."""

from typing import Any, cast

import numpy as np
import pytest

from kvkeeper.engine_service.compute.sampler import SampledTokens
from kvkeeper.engine_service.compute.step_compute import Computed
from kvkeeper.engine_service.loop.open_requests import OpenRequests
from kvkeeper.engine_service.loop.stats import EngineStats
from kvkeeper.engine_service.loop.tracing import EngineTracing
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.model_text import StopRules
from kvkeeper.engine_service.scheduler.limits import Limits
from kvkeeper.engine_service.scheduler.plan import Work
from kvkeeper.engine_service.scheduler.scheduler import Scheduler
from kvkeeper.engine_service.values.errors import EngineError
from kvkeeper.engine_service.values.output_chunk import OutputChunk
from kvkeeper.engine_service.values.request import FinishReason, Request, SequenceState
from kvkeeper.engine_service.values.sampling_params import GREEDY
from tests.support.stand_ins.no_text import NoText
from tests.support.worlds.core_cache import CoreCache

NUM_BLOCKS, BLOCK_SIZE, STOP = 20, 2, 7


class World:
    """Requests on the real core, each step of which is launched before the one before it is read."""

    def __init__(self, num_rows: int) -> None:
        limits = Limits(BLOCK_SIZE, 30, 8, num_rows, 64, 64, 64, 8, num_usable_blocks=NUM_BLOCKS - 1)
        self.scheduler, self.cache = Scheduler(limits), CoreCache(NUM_BLOCKS, BLOCK_SIZE, 8)
        self.requests = OpenRequests(self.scheduler, EngineStats(), EngineTracing(None), 10, lambda: None)
        self.got: dict[str, list[OutputChunk | EngineError]] = {}

    def submit(self, name: str, *, n: int = 1) -> Generation:
        self.got[name] = []
        request, stop = (
            Request(name, np.array([1, 2, 3], np.int32), 5, n=n, look_up=False),
            StopRules(stop_token_ids=frozenset({STOP})),
        )
        generation = Generation(request, GREEDY, 0, stop, [NoText() for _ in range(n)], self.got[name].append)
        self.requests.submit(generation)
        return generation

    def launch(self, *, is_ahead: bool) -> Work:
        while (sequence := self.scheduler.next_to_create()) is not None:
            assert sequence.sequence_id is not None
            self.cache.create(sequence.sequence_id, sequence.token_ids.tolist(), sequence.request.max_len)
            self.scheduler.waiting.created(sequence)
        plan = self.scheduler.schedule(0.0)
        self.cache.has_step_in_flight = is_ahead
        answer = self.cache.step(plan)
        assert not is_ahead or self.scheduler.find_wait(plan, answer) is None
        return self.scheduler.apply(plan, answer)

    def read(self, work: Work, *token_ids: int, has_failed: bool = False) -> None:
        self.requests.emit(work, None if has_failed else Computed(SampledTokens(np.array(token_ids), ())))
        self.requests.end_closed()
        self.requests.deliver()


def test_a_step_that_fails_for_a_sequence_that_had_ended_ends_no_request_that_has_its_row_by_now() -> None:
    world = World(num_rows=1)
    first, second = world.submit("first"), world.submit("second")
    steps = [world.launch(is_ahead=False), world.launch(is_ahead=True)]
    world.read(steps[0], STOP)
    assert first.finish_reasons == [FinishReason.STOP]
    steps.append(world.launch(is_ahead=True))
    assert steps[2].sequences == second.request.sequences
    assert steps[2].rows.tolist() == steps[1].rows.tolist()
    world.read(steps[1], has_failed=True)
    assert second.is_open
    world.read(steps[2], 4)
    assert second.num_taken == 1


def test_a_step_that_fails_ends_the_requests_that_it_computed_for() -> None:
    world = World(num_rows=4)
    one, two = world.submit("one"), world.submit("two", n=2)
    world.read(world.launch(is_ahead=False), 4, 4, STOP)
    assert two.finish_reasons == [FinishReason.STOP], "of one of its continuations"
    step = world.launch(is_ahead=False)
    world.read(step, has_failed=True)
    for generation in (one, two):
        assert generation.refusal is not None
        assert generation.refusal.reason == "REQUEST_FAILED"


class BrokenTracer:
    """Of a collector's library that fails at whatever it is asked for."""

    def __init__(self, *, begins: bool) -> None:
        self._begins = begins

    def start_span(self, *_: object, **__: object) -> "BrokenTracer":
        if not self._begins:
            raise RuntimeError("no span")
        return self

    def is_recording(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"no {name}")


@pytest.mark.parametrize("begins", [False, True], ids=["at its begin", "at its end"])
def test_a_span_that_cannot_be_written_changes_nothing_for_its_request(begins: bool, caplog: pytest.LogCaptureFixture) -> None:
    world = World(num_rows=1)
    world.requests._tracing = EngineTracing(cast(Any, BrokenTracer(begins=begins)))
    first = world.submit("first")
    world.read(world.launch(is_ahead=False), STOP)
    assert first.finish_reasons == [FinishReason.STOP]
    assert world.requests.generations == {}
    assert [record.message for record in caplog.records] == ["a span could not be written: RuntimeError"]
    second = world.submit("second")  # its row is free
    world.read(world.launch(is_ahead=False), STOP)
    assert second.finish_reasons == [FinishReason.STOP]


def test_a_request_ends_in_the_steps_also_where_its_end_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_rows=1)
    first = world.submit("first")
    work = world.launch(is_ahead=False)

    def fail(*_: object) -> None:
        raise RuntimeError("it cannot be counted")

    with monkeypatch.context() as patch:
        patch.setattr(EngineStats, "count_end", fail)
        world.read(work, STOP)
    world.requests.end_closed()
    assert first.request.sequences[0].state is SequenceState.ENDED
