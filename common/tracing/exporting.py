"""Sending this process's spans to a collector, by OTLP over HTTP. For a program's main; needs the extra `tracing`.

OpenTelemetry's own variables take effect: OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES and so on.
"""

import logging
from collections.abc import Callable

from kvkeeper.common.service.extras import install_command, missing

_TIMEOUT_S = 2.0  # of one export; a process that ends waits no longer for a collector that does not answer
_MAX_WARNING_CHARS = 200
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class TracingUnavailable(Exception):
    """The packages that send spans are not installed. One line."""


def export_spans(endpoint: str, service_name: str, version: str, warn: Callable[[str], None]) -> Callable[[], None]:
    """Sends spans to endpoint, a URL such as http://127.0.0.1:4318/v1/traces. Returns the function that flushes and stops.

    warn gets the exporter's errors, which stop nothing else. Raises TracingUnavailable.
    """
    if missing(*_NEEDED):
        raise TracingUnavailable(f"the packages that send traces are not installed: {install_command('tracing')}")
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    of_exporter = logging.getLogger("opentelemetry")
    of_exporter.addHandler(_Forwarding(warn))
    of_exporter.propagate = False
    resource = Resource.create({"service.name": service_name, "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)))
    trace.set_tracer_provider(provider)
    return provider.shutdown


class _Forwarding(logging.Handler):
    """Passes the exporter's messages to warn."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(record.getMessage()[:_MAX_WARNING_CHARS])
