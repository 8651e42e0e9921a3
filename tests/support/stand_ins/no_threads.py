"""A host that gives a process no more threads, as one whose limit of tasks is reached."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def no_threads() -> Iterator[list[str]]:
    """No thread can be started in the block. Yields the names of those that were refused."""
    refused: list[str] = []

    def start(thread: threading.Thread) -> None:
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    with patch.object(threading.Thread, "start", start):
        yield refused
