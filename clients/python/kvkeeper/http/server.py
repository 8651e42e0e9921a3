"""The server of the application: uvicorn on one address, with bounds on what a connection takes before it asks.

A connection has so many seconds for the head of each request, which is bounded in bytes. Worker processes share the address.
"""

import asyncio
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvkeeper.http.figures import WORKERS_VARIABLE

MOST_HEAD_BYTES = 64 << 10
HEAD_S = 10.0
_KEEP_ALIVE_S = 30
_GRACE_S = 10
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed where the head of a request is too long, or too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._await_head()  # of a further request; what waits for it is uvicorn's timer
        super().data_received(data)
        if self._timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MOST_HEAD_BYTES:
                self._refuse()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._timer = self.loop.call_later(HEAD_S, self._refuse)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self.transport.write(_REFUSAL)
            self.transport.close()


def serve(app: Any, listen: str, *, num_workers: int = 1, tls: tuple[Path, Path] | None = None) -> None:
    """Serves until a signal.

    app: an application, or the name of what makes it, as several processes need it.
    tls: certificate and key, in PEM, which are read once.
    """
    host, _, port = listen.rpartition(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # each connection has a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings: dict[str, Any] = {
        "host": host.strip("[]"), "port": int(port), "http": BoundedProtocol, "ws": "none", "lifespan": "on",
        "log_config": None, "access_log": False, "server_header": False, "proxy_headers": False,
        "timeout_keep_alive": _KEEP_ALIVE_S, "timeout_graceful_shutdown": _GRACE_S, "factory": isinstance(app, str),
    }  # fmt: skip
    if tls is not None:
        settings["ssl_certfile"], settings["ssl_keyfile"] = tls
    if num_workers == 1:
        uvicorn.run(app, **settings)
        return
    with tempfile.TemporaryDirectory(prefix="kvkeeper-http-") as folder:
        os.environ[WORKERS_VARIABLE] = folder
        uvicorn.run(app, workers=num_workers, **settings)
