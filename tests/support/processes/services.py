"""Both services as `kvkeeper up` runs them, for tests that need them from outside."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Services:
    """Where they are, and what `up` said when they were ready."""

    cache: str
    engine: str
    ready: dict[str, object]
    process: "subprocess.Popen[str]"
    log_path: Path


def environment(folder: Path) -> dict[str, str]:
    """Of a command that finds what pytest found, keeps its sockets in the folder, and leaves the cores to others.

    Where native code ends it, it says where.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_RUNTIME_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def up_command(*flags: str) -> list[str]:
    """`kvkeeper up` with a small pool."""
    return [sys.executable, "-m", "kvkeeper.cli", "up", "--json", "--pool-memory", "32MiB", *flags]


@contextmanager
def services_up(folder: Path, cache: str, engine: str, *flags: str, before: Sequence[str] = ()) -> Iterator[Services]:
    """Both services until the end of the block. Raises AssertionError with their log when they do not start.

    before: words before the command.
    """
    command = list(before) + up_command("--cache-listen", cache, "--engine-listen", engine, *flags)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment(folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        line = process.stdout.readline() if process.stdout else ""
        assert line, (folder / "log").read_text()
        yield Services(cache, engine, json.loads(line), process, folder / "log")
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_END_S)
        finally:
            process.kill()


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket's name, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="kvk-") as name:
        yield Path(name)


def sockets_in(folder: Path) -> tuple[str, str]:
    """Addresses of the cache service and of the engine service as Unix sockets."""
    return f"unix:{folder}/cache.sock", f"unix:{folder}/engine.sock"


def free_ports(count: int = 2) -> tuple[str, ...]:
    """Loopback addresses without a listener."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return tuple(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)
