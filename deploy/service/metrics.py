"""Metrics for Prometheus, on an HTTP port of a service: the service's own, and those of its process.

Nothing is counted twice: each scrape asks the service for its metrics on the event loop that owns the state, while the HTTP
server of prometheus_client waits in a thread of its own. A scrape that gets no answer in time fails, and nothing else does.
"""

import asyncio
import platform
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import InfoMetricFamily
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from kvkeeper.service import VERSION
from kvkeeper.service.process import StartError

_PATH = "/metrics"
_TIMEOUT_S = 5.0

Collect = Callable[[], Iterable[Metric]]


class MetricsServer:
    """Serves /metrics at host:port; address tells the port where 0 was asked for. Raises StartError."""

    def __init__(self, listen: str, collect: Collect) -> None:
        """Must be made on the running loop: collect is called on it."""
        host, _, port = listen.rpartition(":")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(asyncio.get_running_loop(), collect))
        ProcessCollector(registry=registry)
        try:
            server_class = _Server6 if host.startswith("[") else _Server
            self._server = make_server(host.strip("[]"), int(port), _only_metrics(registry), server_class, _SilentHandler)
        except OSError as error:
            raise StartError(f"--metrics-listen {listen}: {error.strerror}") from None
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Ends the serving of scrapes. A scrape under way still gets its answer, for which the loop must run."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)


def build_info(prefix: str) -> Metric:
    """The metric that names the build."""
    return InfoMetricFamily(
        prefix + "build", "Version of the service.", {"version": VERSION, "python": platform.python_version()}
    )


def _only_metrics(registry: CollectorRegistry) -> Callable[..., Any]:
    """Metrics at one path. The library's app answers at any path, so a probe with a wrong path would be misled."""
    tell = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] == _PATH:
            return tell(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"metrics are at {_PATH}\n".encode()]

    return app


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each scrape."""

    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
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
