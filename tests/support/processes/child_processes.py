"""Child processes with an arena or a step lane, started and ended by a test in the loop of the service they attach to."""

import asyncio
import contextlib
import os
import sys

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

    def block_until_dead(self) -> None:
        """Holds the loop up, which then finds at once all that the process did."""
        with contextlib.suppress(ChildProcessError):  # the thread that asyncio waits with was first
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


class Processes:
    """Starts them, and ends those that a test left."""

    def __init__(self) -> None:
        self._all: list[asyncio.subprocess.Process] = []

    async def attach(self, session: Session) -> Attached:
        child = await self.start(session.opened.attach_socket_path, session.opened.attach_token)
        await child.says("attached")
        return child

    async def with_lane(self, session: Session, raw: bytes, *parts: str) -> Attached:
        """A process with a lane for one step, and with these parts of what the attach socket has."""
        opened = session.opened
        child = await self.start(opened.attach_socket_path, opened.attach_token, raw.hex(), *(parts or ("step-lane",)))
        await child.says("attached")
        return child

    async def start(self, *args: str) -> Attached:
        """args: of attached_process."""
        command, pipe = (sys.executable, "-S", attached_process.__file__), asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, *args, stdin=pipe, stdout=pipe, stderr=pipe)
        self._all.append(process)
        return Attached(process)

    async def end(self) -> None:
        for process in self._all:
            if process.returncode is None:
                process.kill()
            await process.communicate()
