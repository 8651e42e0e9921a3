"""Metrics for Prometheus, on an HTTP port of a service.

Nothing is counted twice: a scrape asks the service for its metrics then and there, on the event loop that owns the state, while
the HTTP server of prometheus_client waits in a thread of its own. A scrape that gets no answer in time fails alone.
"""

import asyncio
from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from kvkeeper.service.process import StartError

_TIMEOUT_S = 5.0

Collect = Callable[[], Iterable[Metric]]


class MetricsServer:
    """Serves /metrics at host:port; address tells the port where 0 was asked for. Raises StartError."""

    def __init__(self, listen: str, collect: Collect) -> None:
        """Must be made on the running loop, which collect is called on."""
        host, _, port = listen.rpartition(":")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(asyncio.get_running_loop(), collect))
        try:
            self._server: WSGIServer
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise StartError(f"--metrics-listen {listen}: {error.strerror}") from None
        self.address = f"{host}:{self._server.server_port}"

    async def stop(self) -> None:
        """No more scrapes. One that is under way still gets its answer, so the loop goes on meanwhile."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)


class _OnLoop(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop, collect: Collect) -> None:
        self._loop = loop
        self._collect = collect

    def collect(self) -> list[Metric]:
        async def run() -> list[Metric]:
            return list(self._collect())

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_TIMEOUT_S)
