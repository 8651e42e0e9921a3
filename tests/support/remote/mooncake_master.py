"""MooncakeMaster: the master of a Mooncake store on free ports of this machine, as its package brings it."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

KEY = "a key that two services share"


class MooncakeMaster:
    """Running until `close`."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip(
            "mooncake.store", reason="kvkeeper[mooncake] or the system's libibverbs1 is missing", exc_type=ImportError
        )
        program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
        if program is None:
            pytest.skip("mooncake_master is not installed")
        self.folder, self.port = folder, _free_port()
        self._command = [program, "-rpc_address=127.0.0.1", f"-rpc_port={self.port}", f"-metrics_port={_free_port()}"]
        self._process: subprocess.Popen[bytes]
        self.start()

    @property
    def address(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def secret(self) -> Path:
        path = self.folder / "secret"
        path.write_text(f"key = {KEY}\n")
        path.chmod(0o600)
        return path

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while self._process.poll() is None:  # each turn is an attempt to connect
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    return
            except ConnectionRefusedError:
                continue
        raise AssertionError("mooncake_master did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
