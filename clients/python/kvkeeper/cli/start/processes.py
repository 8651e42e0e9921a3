"""A service as a child process that never outlives its parent.

It has a session of its own, so that Ctrl-C reaches the parent alone. The child asks the kernel for SIGTERM when its parent has
ended (services.py); the parent ends it with SIGTERM, and after a grace with SIGKILL.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from kvkeeper.cli.start.services import PARENT_VARIABLE
from kvkeeper.common.service.output import passing_on

GATEWAY = "kvkeeper.cli.start.gateway"  # the module that runs it


class ServiceProcess:
    """One running service. name is "cache", "engine", "http" or "gateway"."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self.ended = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, name: str, argv: Sequence[str]) -> "ServiceProcess":
        module = [GATEWAY] if name == "gateway" else ["kvkeeper.cli", name]
        start = partial(
            asyncio.create_subprocess_exec,
            *(sys.executable, "-P", "-m", *module, *argv),
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        if name != "gateway":
            return cls(name, await start(stdout=sys.__stderr__))  # our stdout holds what `up` prints and nothing else
        with passing_on(name, _say) as end:  # a program of others, which an output that is not read would stop
            return cls(name, await start(stdout=end, stderr=end))

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def how_it_ended(self) -> str:
        code = self._process.returncode or 0
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        from kvkeeper.common.service.process import LOST

        return f"ended with exit code {code}" + (", because its device was lost to it" if code == LOST else "")

    async def end(self, grace_s: float) -> None:
        """Ask it to stop, and kill it after the grace. Returns when it has ended."""
        self._send(signal.SIGTERM)
        await asyncio.wait({self.ended}, timeout=grace_s)
        self.kill()
        await self.ended

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        if self.exit_code is None:
            self._process.send_signal(signum)


def _say(line: bytes) -> None:
    sys.stderr.write(line.decode(errors="replace"))
