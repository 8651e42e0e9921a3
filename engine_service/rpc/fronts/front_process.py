"""FrontProcess: one front as the engine has it, its process, its lane, and what it has told of itself.

A front that dies before it serves is a start that failed; one that dies later is started again by its owner. One that hangs is
killed: the kernel would go on giving it connections.
"""

import asyncio
import json
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from contextlib import suppress
from pathlib import Path

import structlog

from kvkeeper.common.service.log import passing_on

from .calls import FrontCalls, FrontServices
from .frames import Kind
from .lane import Lane, open_lane
from .told import FrontSetUp, FrontState

log = structlog.get_logger()

_MODULE = "kvkeeper.engine_service.rpc.front"
_END_S = 5.0  # from the end of its lane until the end of its process, also on a busy machine
# A front is asked whether its loop goes round. Its pieces of work are one message or one round of tokens; the time is for a
# machine that lets it wait. A question counts once this loop has slept, so what stops both processes counts as one.
_PING_S = 1.0
_MOST_SILENT = 10  # questions in a row
_MOST_SILENT_LOADING = 60  # before it serves: it loads its modules and a tokenizer, and hears nothing meanwhile
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class FrontFailed(Exception):
    """It cannot serve. One line."""


class FrontProcess:
    """A running front. Made by start_front."""

    def __init__(self) -> None:
        self.process: Process
        self.refused: Counter[str] = Counter()  # calls that it did not let in, by reason
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._lane: Lane
        self._calls: FrontCalls | None = None
        self._spent_s = 0.0  # by its process, as far as is known
        self._num_silent = 0  # questions since it said something
        self._watching: asyncio.Task[None] | None = None

    def set_up(self, set_up: FrontSetUp, state: FrontState, services: FrontServices) -> None:
        """Let it serve: ready is set once it does, to FrontFailed where it cannot."""
        if self.lost.is_set():
            return
        self._calls = FrontCalls(services, self._lane)
        self._lane.send(Kind.SET_UP, body=set_up.to_bytes())
        self.tell_state(state)
        self._watching = asyncio.create_task(self._watch())

    def tell_state(self, state: FrontState) -> None:
        self._lane.send(Kind.STATE, body=state.to_bytes())

    def ask_stop(self, seconds: float) -> None:
        """It ends its calls after so many seconds at most, then itself."""
        self._lane.send(Kind.STOP, body=str(seconds).encode())

    @property
    def num_calls(self) -> int:
        """Calls of clients that it has asked for here, and that are not over."""
        return 0 if self._calls is None else self._calls.num_open

    @property
    def processor_s(self) -> float:
        """Processor seconds that it has spent, until its lane was lost. Never less than before."""
        if not self.lost.is_set():
            self._note_spent()
        return self._spent_s

    def _note_spent(self) -> None:
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            self._spent_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND

    async def wait_end(self) -> int:
        """Until its process has ended, which is killed if it lingers once its lane is lost. The exit code."""
        await self.lost.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                return await self.process.wait()
        self._kill()
        return await self.process.wait()

    async def close(self) -> None:
        """End it now."""
        self._lane.close()
        self.note_loss()
        await self.wait_end()

    def take(self, kind: Kind, number: int, body: bytes) -> None:
        """A frame of the front."""
        self._num_silent = 0
        if kind is Kind.READY:
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind is Kind.FAILED:
            self._fail(body.decode())
        elif kind is Kind.REFUSED:
            self.refused = Counter(json.loads(body))
        elif kind is Kind.PING:
            self._lane.send(Kind.PONG, number)
        elif kind is not Kind.PONG and self._calls is not None:
            self._calls.take(kind, number, body)

    def note_loss(self) -> None:
        self.lost.set()
        self._fail("a front process ended before it served")
        if self._calls is not None:
            self._calls.end()
            self._calls = None
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        """Kill it once it hangs."""
        while self._num_silent < (_MOST_SILENT if self.ready.done() else _MOST_SILENT_LOADING):
            self._num_silent += 1
            self._note_spent()
            self._lane.send(Kind.PING)
            await asyncio.sleep(_PING_S)
        log.warning("front_hangs", process=self.process.pid, seconds=self._num_silent * _PING_S)
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    def _fail(self, text: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(FrontFailed(text))
            self.ready.exception()  # its owner may be gone

    async def open(self, own: socket.socket) -> None:
        """Take the engine's end of the lane."""
        self._lane = await open_lane(own, self.take, self.note_loss)

    def abandon(self) -> None:
        """No process came of it. The loop lets go of its end of the lane, whose number the next one may get."""
        self._lane.close()


async def start_front() -> FrontProcess:
    """A new front, which waits for set_up."""
    own, other = socket.socketpair()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",
    }
    front = FrontProcess()
    with other:
        try:
            await front.open(own)
        except BaseException:
            own.close()
            raise
        try:
            with passing_on("front") as log_end:
                front.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", _MODULE, str(other.fileno())),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=log_end,
                    env=environment,
                    pass_fds=(other.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            front.abandon()
            raise
    return front
