"""Metrics for Prometheus, on an HTTP port of a service: the service's own, and those of its process.

Nothing is counted twice: each scrape asks the service for its metrics on the event loop that owns the state. HTTP is spoken by
the standard library and prometheus_client, in one thread, once a whole request is there. Until then a connection takes no
thread: it is one of few, is closed where its request does not come in time, and makes room for newer ones. A scrape without an
answer in time fails, and nothing else does.
"""

import asyncio
import platform
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import InfoMetricFamily
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from kvkeeper.common.service import VERSION
from kvkeeper.common.service.process import StartError

MAX_CONNECTIONS = 32
_PATH = "/metrics"
_TIMEOUT_S = 5.0  # for a request to come, for the service's answer, and for the client to take it
_MAX_HEAD_BYTES = 8 << 10  # of a request
_HEAD_ENDS = b"\r\n\r\n", b"\n\n"

Collect = Callable[[], Iterable[Metric]]


class MetricsServer:
    """Serves /metrics at host:port; address shows the port where 0 was asked for. Made by open."""

    def __init__(self, host: str, http: WSGIServer) -> None:
        self.address = f"{host}:{http.server_port}"
        self._http = http
        self._answering = ThreadPoolExecutor(1, "metrics")
        # Connections whose client is to go on, the oldest first, and whether its request is there.
        self._waited_for: dict[asyncio.StreamWriter, bool] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection
        self._listener: asyncio.Server

    @classmethod
    async def open(cls, listen: str, collect: Collect) -> "MetricsServer":
        """collect is called on the running loop. Raises StartError."""
        host, _, port = listen.rpartition(":")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(asyncio.get_running_loop(), collect))
        ProcessCollector(registry=registry)
        try:
            server_class = _Server6 if host.startswith("[") else WSGIServer
            http = make_server(host.strip("[]"), int(port), _only_metrics(registry), server_class, _Exchange)
        except OSError as error:
            raise StartError(f"--metrics-listen {listen}: {error.strerror}") from None
        server = cls(host, http)
        server._listener = await asyncio.start_server(server._accept, sock=http.socket, limit=_MAX_HEAD_BYTES)
        return server

    async def stop(self) -> None:
        """Ends the serving of scrapes. A scrape under way still gets its answer, for which the loop must run."""
        self._listener.close()
        for writer, has_asked in self._waited_for.items():
            if not has_asked:
                writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._answering.shutdown()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            oldest = next(iter(self._waited_for), writer)
            self._waited_for.pop(oldest, None)
            oldest.transport.abort()
            if oldest is writer:
                return
        self._waited_for[writer] = False
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await _read_head(reader)
            self._waited_for.pop(writer, None)
            answer = await asyncio.get_running_loop().run_in_executor(self._answering, self._answer, head)
            self._waited_for[writer] = True
            writer.transport.set_write_buffer_limits(0)  # so that drain waits until the client has taken it
            writer.write(answer)
            async with asyncio.timeout(_TIMEOUT_S):
                await writer.drain()
            writer.close()
        # A request that does not end, or is too long; a client that left; a host without a thread for the answer.
        except (TimeoutError, EOFError, ValueError, OSError, RuntimeError):
            writer.transport.abort()
        finally:
            self._waited_for.pop(writer, None)

    def _answer(self, head: bytes) -> bytes:
        """What the standard library and prometheus_client reply to a request."""
        answer = BytesIO()
        _Exchange((BytesIO(head), answer), ("", 0), self._http)  # type: ignore[arg-type]  # it reads and writes at once
        return answer.getvalue()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """A request without its body, of which scrapes have none. Raises EOFError, ValueError, OSError."""
    head = b""
    while not head.endswith(_HEAD_ENDS):
        line = await reader.readline()
        head += line
        if not line.endswith(b"\n"):
            raise EOFError
        if len(head) > _MAX_HEAD_BYTES:
            raise ValueError("the request is too long")
    return head


def build_info(prefix: str) -> Metric:
    """The metric that names the build."""
    return InfoMetricFamily(
        prefix + "build", "Version of the service.", {"version": VERSION, "python": platform.python_version()}
    )


def _only_metrics(registry: CollectorRegistry) -> Callable[..., Any]:
    """Metrics at one path. The library's app responds at any path, so a probe with a wrong path would be misled."""
    serve_metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] == _PATH:
            return serve_metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"metrics are at {_PATH}\n".encode()]

    return app


class _Server6(WSGIServer):
    address_family = socket.AF_INET6


class _Exchange(WSGIRequestHandler):
    """A request that is there as a whole, and its answer: two streams of bytes in place of a connection."""

    def setup(self) -> None:
        self.rfile, self.wfile = self.request

    def finish(self) -> None:
        """Nothing is buffered."""

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


class _OnLoop(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop, collect: Collect) -> None:
        self._loop = loop
        self._collect = collect

    def collect(self) -> list[Metric]:
        async def run() -> list[Metric]:
            return list(self._collect())

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_TIMEOUT_S)
