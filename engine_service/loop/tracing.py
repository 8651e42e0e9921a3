"""EngineTracing: the spans of requests, and of a few of the steps that compute for them.

A request's span lasts from its arrival to its end, and records when it left the queue and when its first token came. A span for
every step would say little and cost much: a step has a span when a traced request starts with it, and every 64th step has one.
The span is part of the trace of the first traced request in the step, links to the others, and goes to the cache service with
the step. Without a tracer no request is traced, and each call returns at its first line.
"""

import time
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeeper.common import tracing

from ..outputs.generation import Generation
from ..scheduler.plan import Plan
from ..scheduler.running import RunningSequences
from ..values.request import Request, Sequence
from .step_worker import InFlight

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_EVERY = 64  # steps
_MOST_LINKS = 32


@dataclass(slots=True)
class _Traced:
    """One open request."""

    span: "Span"
    clock: tracing.Clock
    started_at: float | None = None  # of time.monotonic, when it left the queue


class EngineTracing:
    """The spans of open requests, and of the steps that are traced. All calls come from the engine's loop."""

    def __init__(self, tracer: "Tracer | None", model_id: str = "") -> None:
        self._tracer = tracer
        self._model_id = model_id
        self._requests: dict[Request, _Traced] = {}
        self._steps: dict[int, tuple[Span, tracing.Clock]] = {}  # by step id, while they compute
        self._num_steps = 0
        self._num_waiting = 0  # traced requests that have computed nothing yet

    @tracing.harmless(tracing.nothing)
    def begin_request(self, generation: Generation) -> None:
        """A request was queued; its caller's span is the current one."""
        if self._tracer is None:
            return
        request, params = generation.request, generation.params
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "kvkeeper",
            "gen_ai.request.model": self._model_id,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.request.choice.count": generation.num_returned,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
        }
        if generation.session_id:
            attributes["gen_ai.conversation.id"] = generation.session_id
        clock = tracing.Clock()
        name = f"text_completion {self._model_id}"
        span = self._tracer.start_span(name, attributes=attributes, start_time=clock.began_ns)
        if span.is_recording():
            self._requests[request] = _Traced(span, clock)
            self._num_waiting += 1

    @tracing.harmless(tracing.nothing)
    def end_request(self, generation: Generation) -> None:
        """A request ended, for any reason."""
        traced = self._requests.pop(generation.request, None)
        if traced is None:
            return
        self._num_waiting -= traced.started_at is None
        span, usage = traced.span, generation.usage
        for name, at in (("kvkeeper.started", traced.started_at), ("kvkeeper.first_token", generation.first_token_at)):
            if at is not None:
                span.add_event(name, timestamp=traced.clock.ns(at))
        if traced.started_at is not None:
            span.set_attribute("kvkeeper.queue_seconds", traced.started_at - generation.started_at)
        if generation.first_token_at is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", generation.first_token_at - generation.started_at)
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.new_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        span.set_attribute("kvkeeper.num_preemptions", usage.num_preemptions)
        span.set_attribute("gen_ai.response.finish_reasons", [reason.name.lower() for reason in generation.finish_reasons])
        if generation.refusal is not None:
            tracing.fail(span, generation.refusal.reason)
        span.end(traced.clock.ns())

    def within_request(self, *requests: Request) -> AbstractContextManager[object]:
        """Calls made within it are part of the trace of the first of the requests that is traced."""
        if not self._requests:
            return nullcontext()
        traced = next((self._requests[request] for request in requests if request in self._requests), None)
        return nullcontext() if traced is None else tracing.within(traced.span)

    @tracing.harmless(str)
    def begin_step(self, step_id: int, plan: Plan, running: RunningSequences) -> str:
        """A plan is about to be sent. The trace context to send with it; empty where the step is not traced."""
        if not self._requests:
            return ""
        self._num_steps += 1
        starting = [sequence for sequence in plan.started if self._is_new(sequence)]
        if not starting and self._num_steps % _EVERY:
            return ""
        traced = [self._requests[request].span for request in self._list_requests((*starting, *running.at(plan.reserve_rows)))]
        if not traced or self._tracer is None:
            return ""
        links = [tracing.link_to(span) for span in traced[1 : 1 + _MOST_LINKS]]
        clock = tracing.Clock()
        span = self._tracer.start_span("step", tracing.context_with(traced[0]), links=links, start_time=clock.began_ns)
        span.set_attribute("kvkeeper.step_id", step_id)
        self._steps[step_id] = span, clock
        return tracing.make_traceparent(span)

    def note_computing(self, sequences: SequenceOf[Sequence]) -> None:
        """These sequences compute now; a few may do so for the first time."""
        if not self._num_waiting:
            return
        for sequence in sequences:
            traced = self._requests.get(sequence.request)
            if traced is not None and traced.started_at is None:
                traced.started_at = time.monotonic()
                self._num_waiting -= 1

    @tracing.harmless(tracing.nothing)
    def end_step(self, flight: InFlight) -> None:
        """A step's work was computed."""
        if flight.step_id not in self._steps:
            return
        (span, clock), work = self._steps.pop(flight.step_id), flight.work
        span.set_attribute("kvkeeper.num_sequences", len(work.rows))
        span.set_attribute("kvkeeper.num_tokens", work.num_tokens)
        span.set_attribute("kvkeeper.num_prompt_tokens", work.num_prompt_tokens)
        span.set_attribute("kvkeeper.num_preempted", len(work.changes.preempted))
        span.set_attribute("kvkeeper.compute_seconds", flight.seconds)
        span.set_attribute("kvkeeper.cache_wait_seconds", flight.cache_wait_seconds)
        span.end(clock.ns())

    @tracing.harmless(tracing.nothing)
    def drop_steps(self) -> None:
        """The session is lost, and with it what was computed on it."""
        steps, self._steps = self._steps, {}
        for span, clock in steps.values():
            tracing.fail(span, "SESSION_LOST")
            span.end(clock.ns())

    def _is_new(self, sequence: Sequence) -> bool:
        traced = self._requests.get(sequence.request)
        return traced is not None and traced.started_at is None

    def _list_requests(self, sequences: SequenceOf[Sequence]) -> list[Request]:
        """The traced requests of the sequences, each once."""
        return list({sequence.request: None for sequence in sequences if sequence.request in self._requests})
