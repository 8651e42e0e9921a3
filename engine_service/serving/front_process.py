"""What fronts run in: a process of their own, or a task of the engine's loop."""

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from kvkeeper.service.log import passing_on

from ..outputs.model_text import ModelText
from .front import Front
from .front_handle import FrontHandle
from .lane import Lane, join_by_socket, join_in_memory

log = structlog.get_logger()

_MODULE = "kvkeeper.engine_service.serving.front_main"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class FrontProcess:
    """A process of a front. Its time is known as far as it was read while it ran."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid
        self._spent_s = 0.0

    @property
    def processor_s(self) -> float:
        if self._process.returncode is None:
            with suppress(OSError):  # it has just ended
                fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
                self._spent_s = max(self._spent_s, (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND)
        return self._spent_s

    def share(self, text: ModelText) -> dict[str, Any] | None:
        return None if text.tokenizer is None else text.tokenizer.state()

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()


class FrontTask:
    """A front in the engine's process."""

    pid, processor_s = None, 0.0

    def __init__(self, lane: Lane) -> None:
        """lane: the engine's end."""
        self._front = Front()
        join_in_memory(lane, self._front.lane)
        self._task = asyncio.create_task(self._front.run())

    def share(self, text: ModelText) -> None:
        self._front.text = text

    async def wait(self) -> int:
        await asyncio.wait((self._task,))
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.error("broken_invariant", exc_info=error)
        return 0

    def kill(self) -> None:
        self._task.cancel()


async def start_front_task() -> FrontHandle:
    """A new front in this process, which waits to be set up."""
    front = FrontHandle()
    front.runner = FrontTask(front.lane)
    return front


async def start_front_process(log_level: str) -> FrontHandle:
    """A new front in a process of its own, which waits to be set up. Raises OSError, RuntimeError."""
    own, other = socket.socketpair()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",
    }
    front = FrontHandle()
    with other:
        try:
            await join_by_socket(front.lane, own)
        except BaseException:
            own.close()
            raise
        try:
            with passing_on("front") as log_end:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", _MODULE, str(other.fileno()), log_level),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=log_end,
                    env=environment,
                    pass_fds=(other.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            front.lane.close()  # the loop lets go of this end, whose number the next one may get
            raise
    front.runner = FrontProcess(process)
    return front
