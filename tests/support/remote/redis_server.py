"""RedisServer: Debian's redis-server on a free port of this machine, with nothing on disk."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

PASSWORD = "a password of a test"
KEY = "a key that two services share"


class RedisServer:
    """Running until `close`. It asks for a user and a password."""

    def __init__(self, folder: Path, *flags: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        self.port = free_port()
        self.folder = folder
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._command += ["--requirepass", PASSWORD, *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def secret(self, key: str = KEY, password: str = PASSWORD) -> Path:
        """A file for --remote-secret."""
        path = self.folder / f"secret-{hash((key, password)) & 0xFFFF:x}"
        path.write_text(f"key = {key}\nuser = default\npassword = {password}\n")
        path.chmod(0o600)
        return path

    def client(self) -> Any:
        return redis.Redis(port=self.port, password=PASSWORD, socket_timeout=10)

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"Ready to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def kill(self) -> None:
        """With all that it had."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.is_running:
            self.kill()

    def blocks(self) -> list[bytes]:
        """The keys of blocks."""
        return [key for key in self.client().scan_iter(b"kvkeeper:1:*", count=1000) if not key.startswith(b"kvkeeper:1:era:")]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
