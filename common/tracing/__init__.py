"""Tracing by OpenTelemetry: the calls between processes, and how long each part of them took.

Only OpenTelemetry's API is used, and only in a process that has loaded it and set a provider; otherwise tracer() gives None,
and callers skip tracing. Spans pass between processes as W3C trace context: in gRPC metadata, and as `traceparent` in the long
stream of steps. Rule: a span shows counts, times, states and the ids of its own request; never text, tokens, metadata, tenants,
paths or handles. What fails in OpenTelemetry fails nothing here: `harmless` says so where the spans of what is already done are
written. exporting.py sends spans to a collector.

Owns all use of OpenTelemetry. May import kvkeeper.common.service.extras and OpenTelemetry, inside a function; no service and no
client.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

P = ParamSpec("P")
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

MAX_TRACEPARENT_CHARS = 64  # version 00 has 55


class Clock:
    """Wall-clock time read once, then advanced by time.monotonic, so that no span ends before it began."""

    def __init__(self) -> None:
        self.began_ns = time.time_ns()
        self._began_at = time.monotonic()

    def ns(self, at: float | None = None) -> int:
        """Nanoseconds since the epoch at a time of time.monotonic; None: now."""
        return self.began_ns + max(0, int(((time.monotonic() if at is None else at) - self._began_at) * 1e9))


def harmless(otherwise: Callable[[], T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function that writes spans one that raises nothing. Where it fails, that is logged; the result is otherwise()."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                logging.getLogger("opentelemetry").warning("a span could not be written: %s", type(error).__name__)
                return otherwise()

        return call

    return decorate


def nothing() -> None:
    """What a function results in that has no result."""


def tracer() -> "Tracer | None":
    """The tracer of the process's provider; None without a provider."""
    if "opentelemetry.trace" not in sys.modules:  # a process with a provider has loaded it; others do not wait for the import
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    has_none = isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))
    return None if has_none else provider.get_tracer("kvkeeper")


def outgoing(span: "Span | None" = None) -> Metadata | None:
    """gRPC metadata that makes a call part of the trace of this span or of the current one; None without a tracer."""
    if tracer() is None:
        return None
    from opentelemetry import propagate, trace

    carrier: dict[str, str] = {}
    propagate.inject(carrier, None if span is None else trace.set_span_in_context(span))
    return tuple(carrier.items()) or None


def make_traceparent(span: "Span") -> str:
    """The span as a field of a message."""
    from opentelemetry import trace

    carrier: dict[str, str] = {}
    _w3c().inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def serving(name: str, metadata: Any) -> "AbstractContextManager[Span | None]":
    """The current span of an incoming call; none where its caller is not traced. metadata: the call's, as from gRPC."""
    ours = tracer()
    if ours is None:
        return nullcontext()
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    return _continued(ours, name, carrier)


def serving_step(ours: "Tracer", name: str, traceparent: str, attributes: Mapping[str, int]) -> Any:
    """The same for a message that names the caller's span."""
    return _continued(ours, name, {"traceparent": traceparent}, attributes)


def _no_span() -> "AbstractContextManager[Span | None]":
    return nullcontext()


@harmless(_no_span)
def _continued(
    ours: "Tracer", name: str, carrier: Mapping[str, str], attributes: Mapping[str, int] | None = None
) -> "AbstractContextManager[Span | None]":
    from opentelemetry import propagate, trace

    context = propagate.extract(carrier) if attributes is None else _w3c().extract(carrier)
    if not trace.get_current_span(context).get_span_context().is_valid:
        return nullcontext()
    service, _, method = name.rpartition("/")
    span_attributes: dict[str, str | int] = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        **(attributes or {}),
    }
    return _current(ours.start_span(name, context, trace.SpanKind.SERVER, span_attributes))


@contextmanager
def _current(span: "Span") -> "Iterator[Span]":
    """Exceptions are not recorded: their text is for the caller alone."""
    from opentelemetry import trace

    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
    finally:
        harmless(nothing)(span.end)()


def within(span: "Span") -> "AbstractContextManager[Span]":
    """Makes the span current for a block, without ending it: calls made in the block are part of it."""
    from opentelemetry import trace

    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


@harmless(nothing)
def fail(span: "Span | None", reason: str) -> None:
    """Marks the span as ended with an error of this reason."""
    if span is not None:
        from opentelemetry import trace

        span.set_attribute("error.type", reason)
        span.set_status(trace.StatusCode.ERROR)


def client() -> "SpanKind":
    """The kind of a span that stands for a call to another process."""
    from opentelemetry import trace

    return trace.SpanKind.CLIENT


def link_to(span: "Span") -> "Link":
    """A link to a span of another trace."""
    from opentelemetry import trace

    return trace.Link(span.get_span_context())


def context_with(span: "Span") -> "Context":
    """The context of children of a span that is not the current one."""
    from opentelemetry import trace

    return trace.set_span_in_context(span)


def _w3c() -> "TraceContextTextMapPropagator":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
