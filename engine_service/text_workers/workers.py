"""Workers: a few processes for text and constraints, each started when there is a job for it.

Owns which job is next, by turns of the clients, and that every job ends: with its answer, refused by its worker, because it
took more than it may, which ends its worker and leaves the other jobs alone, or because the host gives no worker. What a job
does is in text_worker.py. A job whose caller has gone away still takes its client's turn.
"""

import asyncio
import json
import signal
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from kvkeeper.common.service.child_process import start_child, wait_end
from kvkeeper.common.service.fair_queue import FairQueue, TooManyWaiting
from kvkeeper.common.service.threads import find_shortage

from ..values.errors import BrokenInvariant, Draining, EngineError, HostExhausted, QueueFull
from . import text_worker
from .text_worker import ANSWER_HEAD, JOB_HEAD, Kind, Outcome, SetUp

log = structlog.get_logger()

_NUM_CLIENTS = 4  # clients whose queues may be full before other clients are refused too
_PATIENCE = 20  # times its processor time: a job may take so long on a busy machine before its worker counts as stuck
_END_S = 5.0  # from closing its pipe until the end of a process, also on a busy machine
_SET_UP_S = 120.0  # from the start of a process until it is ready for jobs, also on a busy machine
_NUM_STARTS = 2  # of a worker: the kernel kills when memory is short, and people do
_READ_BYTES = 1 << 20
_ENDS = (EOFError, ConnectionError, TimeoutError)  # of a worker, or it is stuck


class JobRefused(Exception):
    """The input of the job is wrong: bad text, a bad chat, a bad grammar. One line.

    metadata: limit, where it exceeds one; field, where a part of a chat is wrong.
    """

    def __init__(self, text: str, **metadata: str) -> None:
        super().__init__(text)
        self.metadata = metadata


class JobTooMuch(Exception):
    """The job took more time, memory or states than it may. One line; metadata: exceeded (time, memory, states, depth)."""

    def __init__(self, text: str, **metadata: str) -> None:
        super().__init__(text)
        self.metadata = metadata


@dataclass(slots=True, eq=False)
class _Job:
    kind: Kind
    body: bytes
    answer: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Workers:
    """Runs jobs of many clients on num_workers processes. To be closed."""

    def __init__(self, num_workers: int, set_up: SetUp, max_waiting: int) -> None:
        """max_waiting: jobs of one client that may wait."""
        self._num_workers, self._set_up = num_workers, set_up
        self._queue = FairQueue[_Job](
            max_waiting=_NUM_CLIENTS * max_waiting, max_waiting_each=max_waiting, max_busy_each=max(1, num_workers - 1)
        )
        self._idle: list[Process] = []
        self._tasks = set[asyncio.Task[None]]()
        self._is_closed = False

    async def run(self, client: str, kind: Kind, body: bytes) -> bytes:
        """The job's answer. Raises JobRefused, JobTooMuch, QueueFull, Draining, HostExhausted."""
        if self._is_closed:
            raise Draining("the service is stopping")
        job = _Job(kind, body)
        try:
            self._queue.put(client, job)
        except TooManyWaiting as error:
            raise QueueFull(
                f"{error.limit} texts, chats or constraints are waiting, the most that may", limit=error.limit
            ) from None
        self._proceed()
        try:
            return await job.answer
        finally:
            self._queue.remove(client, job)

    async def close(self) -> None:
        """End the processes; jobs under way are refused."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._idle:
            await _end(process)
        self._idle.clear()
        while (taken := self._queue.take_job()) is not None:
            client, job = taken
            self._queue.end_job(client)
            _answer(job, Draining("the service is stopping"))

    def _proceed(self) -> None:
        while not self._is_closed and len(self._tasks) < self._num_workers and (taken := self._queue.take_job()) is not None:
            client, job = taken
            task = asyncio.create_task(self._serve(job))
            self._tasks.add(task)
            task.add_done_callback(partial(self._note_end, client, job))

    def _note_end(self, client: str, job: _Job, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._queue.end_job(client)
        _answer(job, Draining("the service is stopping"))  # if it was cancelled, perhaps before it began
        self._proceed()

    async def _serve(self, job: _Job) -> None:
        """Do one job on one process, which serves the next job unless this one has ended it."""
        if job.answer.cancelled():
            return
        try:
            _answer(job, await self._do(job))
        except (JobRefused, JobTooMuch, EngineError) as error:
            _answer(job, error)
        except Exception as error:
            log.exception("broken_invariant")
            _answer(job, error)

    async def _do(self, job: _Job) -> bytes:
        is_second = False
        while True:
            process = await self._process()
            is_kept = False
            try:
                async with asyncio.timeout(_PATIENCE * self._set_up.limits["cpu_s"]):
                    outcome, is_last, body = await _exchange(process, job.kind, job.body)
                is_kept = not is_last
                break
            except _ENDS as error:
                code = await _code_of_end(process, error, job.kind)
                # SIGKILL may be no fault of the job: the kernel kills when memory is short, and people do.
                if code != -signal.SIGKILL or isinstance(error, TimeoutError) or is_second:
                    is_late = code == -signal.SIGPROF or isinstance(error, TimeoutError)
                    exceeded = "time" if is_late else "memory"
                    raise JobTooMuch(f"takes too much {exceeded}", exceeded=exceeded) from None
                is_second = True
            finally:
                if is_kept:
                    self._idle.append(process)
                else:
                    await _end(process)
        if outcome is Outcome.DONE:
            return body
        if outcome is Outcome.BROKEN:
            log.error("broken_invariant", exception=body.decode())
            raise BrokenInvariant("the service found itself inconsistent; its log says more")
        text, metadata = json.loads(body)
        raise (JobTooMuch if outcome is Outcome.TOO_MUCH else JobRefused)(text, **metadata)

    async def _process(self) -> Process:
        """An idle process, or a new one. One that ends before it is set up is followed by another.

        Raises HostExhausted where the host gives none, or ends both, as it does where memory is short; else BrokenInvariant, as
        where they are stuck.
        """
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            await _end(process)
        code, is_stuck = 0, False
        for _ in range(_NUM_STARTS):
            process = await _start()
            try:
                async with asyncio.timeout(_SET_UP_S):
                    await _exchange(process, Kind.SET_UP, self._set_up.to_bytes())
                return process
            except _ENDS as error:
                code = await _code_of_end(process, error, Kind.SET_UP)
                is_stuck = isinstance(error, TimeoutError)
            except BaseException:
                await _end(process)
                raise
        if code < 0 and not is_stuck:  # it was not this service that ended them
            raise HostExhausted("the host ends each process for text before it is set up", resource="memory")
        raise BrokenInvariant("the service found itself inconsistent; its log says more")


async def _start() -> Process:
    """A process that waits for its set-up. Raises HostExhausted."""
    try:
        return await start_child("text_worker", text_worker.__name__, stdin=PIPE, stdout=PIPE, limit=_READ_BYTES)
    except (OSError, RuntimeError) as error:
        short = find_shortage(error)
        if short is None and not isinstance(error, OSError):
            raise
        log.warning("text_worker_not_started", why=str(error))
        resource = "processes" if short is None else short.resource
        raise HostExhausted(f"the host gives no process for text: no more {resource} now", resource=resource) from None


def _answer(job: _Job, answer: bytes | Exception) -> None:
    if job.answer.done():
        return
    if isinstance(answer, Exception):
        job.answer.set_exception(answer)
        job.answer.exception()  # its caller may be gone
    else:
        job.answer.set_result(answer)


async def _exchange(process: Process, kind: Kind, body: bytes) -> tuple[Outcome, bool, bytes]:
    """The outcome, whether the worker ends, and the body of its answer. Raises EOFError, ConnectionError."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(JOB_HEAD.pack(kind, len(body)))
    process.stdin.write(body)
    await process.stdin.drain()
    outcome, is_last, length = ANSWER_HEAD.unpack(await process.stdout.readexactly(ANSWER_HEAD.size))
    return Outcome(outcome), is_last, await process.stdout.readexactly(length)


async def _code_of_end(process: Process, error: BaseException, kind: Kind) -> int:
    """The exit code of a worker that ended in a job of this kind, or is ended because it is stuck; logged."""
    code = await (_end(process) if isinstance(error, TimeoutError) else wait_end(process, _END_S))
    log.warning("text_worker_ended", code=code, kind=kind.name.lower())
    return code


async def _end(process: Process) -> int:
    """End the process, by SIGKILL if it has not ended by itself. Its exit code."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()
