"""One front as the engine has it, and what it runs in: a process of its own, or a task of the engine's loop.

A front that ends before it serves is a start that failed; one that ends later is started again by its owner. One that hangs is
killed: the kernel would go on giving it connections.
"""

import asyncio
import os
import socket
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from kvkeeper.common.service.child_process import start_child, wait_end

from ..outputs.model_text import ModelText
from .calls import FrontCalls, FrontServices
from .frames import FrontConfig, FrontSetUp, FrontState, Kind
from .front import Front
from .lane import Lane, join_by_socket, join_in_memory

log = structlog.get_logger()

_END_S = 5.0  # from the end of its lane until its own end, also on a busy machine
# A front is asked whether its loop goes round. Its pieces of work are one message or one round of tokens; the time is for a
# machine that lets it wait. A question counts once this loop has slept, so what stops both processes counts as one.
_PING_S = 1.0
_MOST_SILENT = 10  # questions in a row
_MOST_SILENT_LOADING = 60  # before it serves: it loads its modules and a tokenizer, and hears nothing meanwhile


class FrontFailed(Exception):
    """It cannot serve. One line."""


_MODULE = "kvkeeper.engine_service.serving.front_main"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class FrontProcess:
    """What a front runs in: a process of its own. Its time is known as far as it was read while it ran."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid
        self._spent_s = 0.0

    @property
    def processor_s(self) -> float:
        """Processor seconds that it has spent. Never less than before."""
        if self._process.returncode is None:
            with suppress(OSError):  # it has just ended
                fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
                self._spent_s = max(self._spent_s, (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND)
        return self._spent_s

    def share(self, text: ModelText) -> dict[str, Any] | None:
        """Let the front make text; the state of the tokenizer that it is to be sent, if it needs one."""
        return None if text.tokenizer is None else text.tokenizer.state()

    async def wait_end(self, seconds: float) -> int:
        """The exit code, once it has ended; after so many seconds it is killed."""
        return await wait_end(self._process, seconds)

    def kill(self) -> None:
        """End it now. Idempotent."""
        with suppress(ProcessLookupError):
            self._process.kill()


class FrontTask:
    """The same in the engine's process."""

    pid, processor_s = None, 0.0

    def __init__(self, lane: Lane) -> None:
        """lane: the engine's end."""
        self._front = Front()
        join_in_memory(lane, self._front.lane)
        self._task = asyncio.create_task(self._front.run())

    def share(self, text: ModelText) -> None:
        self._front.text = text

    async def wait_end(self, seconds: float) -> int:
        await asyncio.wait((self._task,), timeout=seconds)
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.error("broken_invariant", exc_info=error)
        return 0

    def kill(self) -> None:
        self._task.cancel()


class FrontHandle:
    """A running front. Its lane is joined to the front's before it is set up."""

    def __init__(self) -> None:
        self.lane = Lane(self._take, self._note_loss)
        self.runner: FrontProcess | FrontTask
        self.refused: Counter[str] = Counter()  # calls that it did not let in, by reason
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._calls: FrontCalls | None = None
        self._num_silent = 0  # questions since it said something
        self._watching: asyncio.Task[None] | None = None

    def set_up(self, config: FrontConfig, state: FrontState, services: FrontServices) -> None:
        """Let it serve: ready is set once it does, to FrontFailed where it cannot."""
        if self.lost.is_set():
            return
        self._calls = FrontCalls(services, self.lane)
        set_up = FrontSetUp(config.to_json(), self.runner.share(services.text))
        self.lane.send(Kind.SET_UP, body=set_up)
        self.send_state(state)
        self._watching = asyncio.create_task(self._watch())

    def send_state(self, state: FrontState) -> None:
        self.lane.send(Kind.STATE, body=state)

    def ask_stop(self, seconds: float) -> None:
        """It ends its calls after so many seconds at most, then itself."""
        self.lane.send(Kind.STOP, body=seconds)

    @property
    def num_calls(self) -> int:
        """Calls of clients that it has asked for here, and that are not over."""
        return 0 if self._calls is None else self._calls.num_open

    @property
    def processor_s(self) -> float:
        return self.runner.processor_s

    async def wait_end(self) -> int:
        """Wait until it has ended; it is killed if it lingers once its lane is lost. Returns the exit code."""
        await self.lost.wait()
        return await self.runner.wait_end(_END_S)

    async def close(self) -> None:
        """End it now."""
        self.lane.close()
        self._note_loss()
        await self.wait_end()

    def _take(self, kind: Kind, number: int, body: Any) -> None:
        """A frame of the front."""
        self._num_silent = 0
        if kind is Kind.READY:
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind is Kind.FAILED:
            self._fail(body)
        elif kind is Kind.REFUSED:
            self.refused = Counter(body)
        elif kind is Kind.PING:
            self.lane.send(Kind.PONG, number)
        elif kind is not Kind.PONG and self._calls is not None:
            self._calls.take(kind, number, body)

    def _note_loss(self) -> None:
        self.lost.set()
        self._fail("a front ended before it served")
        if self._calls is not None:
            self._calls.end()
            self._calls = None
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        """Kill it once it hangs."""
        while self._num_silent < (_MOST_SILENT if self.ready.done() else _MOST_SILENT_LOADING):
            self._num_silent += 1
            _ = self.processor_s  # what was read last counts once there is no process
            self.lane.send(Kind.PING)
            await asyncio.sleep(_PING_S)
        log.warning("front_hangs", process=self.runner.pid, seconds=self._num_silent * _PING_S)
        self.runner.kill()

    def _fail(self, text: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(FrontFailed(text))
            self.ready.exception()  # its owner may be gone


async def start_front_task() -> FrontHandle:
    """A new front in this process, which waits to be set up."""
    front = FrontHandle()
    front.runner = FrontTask(front.lane)
    return front


async def start_front_process(log_level: str) -> FrontHandle:
    """A new front in a process of its own, which waits to be set up. Raises OSError, RuntimeError."""
    own, other = socket.socketpair()
    front = FrontHandle()
    with other:
        try:
            await join_by_socket(front.lane, own)
        except BaseException:
            own.close()
            raise
        try:
            arguments, streams = (str(other.fileno()), log_level), {"stdin": DEVNULL, "stdout": DEVNULL}
            process = await start_child("front", _MODULE, *arguments, **streams, pass_fds=(other.fileno(),))
        except BaseException:
            front.lane.close()  # the loop lets go of this end, whose number the next one may get
            raise
    front.runner = FrontProcess(process)
    return front
