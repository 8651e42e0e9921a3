"""Child processes that map an arena, started and ended by a test in the loop of the service they attach to."""

import asyncio
import sys
from pathlib import Path

from tests.support.processes import attached_process
from tests.support.worlds.cache_api import DEADLINE, Session


class Attached:
    """A child process on a session's arena."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, word: str) -> None:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE)
        assert line.decode().strip() == word

    async def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        await self.process.stdin.drain()


class Processes:
    """Starts them, and ends those that a test left."""

    def __init__(self) -> None:
        self._all: list[asyncio.subprocess.Process] = []

    async def attach(self, session: Session) -> Attached:
        child = await self.start(session.opened.attach_socket_path, session.opened.attach_token)
        await child.says("attached")
        return child

    async def start(self, path: str, token: str) -> Attached:
        pipe = asyncio.subprocess.PIPE
        script = Path(attached_process.__file__)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", str(script), path, token, stdin=pipe, stdout=pipe, stderr=pipe
        )
        self._all.append(process)
        return Attached(process)

    async def end(self) -> None:
        for process in self._all:
            if process.returncode is None:
                process.kill()
            await process.communicate()
