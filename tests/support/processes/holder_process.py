"""`kvkeeper hold` as a process of its own, for tests that talk with it."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvkeeper.common.hold.client import HolderClient
from tests.support.processes.services import environment


@dataclass(frozen=True, slots=True)
class Running:
    """A holder that serves."""

    process: "subprocess.Popen[str]"
    path: Path

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def connect(self) -> HolderClient:
        return HolderClient(self.address)

    def event(self) -> dict[str, object]:
        """The next line of its log."""
        assert self.process.stderr is not None
        return json.loads(self.process.stderr.readline())

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(30)

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextlib.contextmanager
def holding(folder: Path, *flags: str) -> Iterator[Running]:
    path = folder / "hold" / "sock"
    command = [sys.executable, "-m", "kvkeeper.cli", "hold", "--listen", f"unix:{path}", *flags]
    process = subprocess.Popen(command, env=environment(folder), stderr=subprocess.PIPE, text=True)
    try:
        running = Running(process, path)
        assert running.event()["event"] == "ready"
        yield running
    finally:
        process.kill()
        process.communicate()
