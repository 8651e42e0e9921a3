"""Spans for tests: kept in memory while both services run in this process, or sent to a collector made here."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer


class Spans:
    """What ended, in order."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def tracer(self) -> Tracer:
        return self._provider.get_tracer("test")

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._kept.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def text(self) -> str:
        """Everything that they tell."""
        return "\n".join(span.to_json() for span in self.all)


@dataclass(frozen=True)
class Sent:
    """A span as it came to a collector."""

    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes


@dataclass
class Collector:
    """url takes OTLP over HTTP."""

    url: str = ""
    spans: list[Sent] = field(default_factory=list)
    text: str = ""

    def take(self, raw: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(raw)
        self.text += str(request)
        for resource in request.resource_spans:
            (service,) = (item.value.string_value for item in resource.resource.attributes if item.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(Sent(service, span.name, span.trace_id, span.span_id, span.parent_span_id))


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
