"""Hub: a stand-in for a hub of models on loopback. It has no model, and notes what it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Hub:
    """asked: the paths, in order. environment: by which programs find it in place of the real one."""

    def __init__(self, address: str, folder: str) -> None:
        self.asked: list[str] = []
        self.url = f"http://{address}"
        self.environment = {"HF_ENDPOINT": self.url, "HF_HOME": folder}


@contextmanager
def hub(folder: str) -> Iterator[Hub]:
    """folder: where a program keeps what it gets."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing of a test is told."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Hub(f"127.0.0.1:{server.server_port}", folder)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
