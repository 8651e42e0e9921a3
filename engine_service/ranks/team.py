"""Team: the processes of all ranks but the first, from one start of them to their end.

Owns the processes, the pipes to them, their logs, and the sums with them. A team that has lost one rank is of no use any more:
sums need all. So the first loss ends the team, which says which rank it was and why, and another one is started in its place;
none is where that rank has lost its device, because the next team would have the same one.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from kvkeeper.common.service.child_process import child_environment
from kvkeeper.common.service.log import pass_on
from kvkeeper.common.service.threads import NoThread, start_thread

from ..compute.device.device_errors import DeviceFault, ReportedFault, find_fault
from . import rank_process
from .meeting import Meeting
from .messages import Answer, Kind, Pipe, PipeEnded, RankLost, RankRefused, decode_fault


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why a rank ends. is_lost: no process can serve on its device now, so that the engine ends, too."""

    fault: DeviceFault
    is_lost: bool


class Member:
    """Another rank as the first one sees it: its process, the pipe to it, and what it reported about its end.

    Its pipe is read by the thread that computes and, once the rank is lost, by the thread that looks for the cause: one at a
    time. What it reports before it ends is kept, whichever of them reads it. Not for several threads at once, but for hear_out.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes], pipe: Pipe) -> None:
        self.rank, self.process = rank, process
        self.last_words: LastWords | None = None
        self._pipe, self._reading = pipe, threading.Lock()

    def send(self, kind: int, body: bytes, timeout_s: float) -> None:
        """Raises PipeEnded."""
        self._pipe.send(kind, body, timeout_s)

    def hear(self, timeout_s: float | None) -> bytearray:
        """The body of its next answer. Raises PipeEnded, also where it reports why it ends; RankRefused."""
        with self._reading:
            return self._receive(timeout_s)

    def hear_out(self, timeout_s: float) -> None:
        """Read what it has said up to now, which may be why it ends. Its answers are dropped.

        timeout_s: for the thread that reads already.
        """
        if not self._reading.acquire(timeout=timeout_s):
            return
        try:
            with suppress(PipeEnded):
                while self.last_words is None:
                    with suppress(RankRefused):
                        self._receive(0)
        finally:
            self._reading.release()

    def close(self) -> None:
        self._pipe.close()

    def _receive(self, timeout_s: float | None) -> bytearray:
        kind, body = self._pipe.receive(timeout_s)
        if kind in (Answer.LOST, Answer.FAILED):
            name, sizes, device = decode_fault(body)
            self.last_words = LastWords(DeviceFault(name, sizes, f"rank {self.rank} on {device}"), kind == Answer.LOST)
            raise PipeEnded("it has told why it ends")
        if kind == Answer.REFUSED:
            fields = json.loads(body)
            raise RankRefused(fields | {"message": f"rank {self.rank}: {fields['message']}"})
        return body


log = structlog.get_logger()

_END_S = 10.0  # until all killed processes are gone
_LAST_WORDS_S = 2.0  # for a rank whose end another one noticed first


class Team:
    """Ranks 1 to num_ranks - 1. All methods may block, and none is for two threads at once but stop and the properties."""

    def __init__(
        self, configs: Sequence[dict[str, Any]], meeting: Meeting, timeout_s: float, on_lost: Callable[[], None]
    ) -> None:
        """Starts them. configs: of each rank but the first, fields of its EngineConfig. on_lost: called from any thread.

        Raises RankLost where the host gives no process or thread.
        """
        self.lost = ""  # which rank was lost, and how
        self.fault: DeviceFault | None = None  # of its device, where that was lost to it
        self._num_ranks, self._meeting, self._timeout_s, self._on_lost = len(configs) + 1, meeting, timeout_s, on_lost
        self._is_stopping, self._have_ended = False, True
        self._losing = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="kvkeeper-ranks-"))
        self._members: list[Member] = []
        try:
            for rank, config in enumerate(configs, 1):
                self._start(rank, config)
        except BaseException:
            self.stop()
            raise

    @property
    def processes(self) -> list[int]:
        """Their process ids, by rank."""
        return [member.process.pid for member in self._members]

    def join(self, device: torch.device) -> None:
        """Returns once all have loaded and met. Raises RankLost, ReportedFault; an error of the first rank's device."""
        for member in self._members:
            self._hear_one(member, None)  # for as long as a model may take to load; a process that ends is noticed
        path = self._folder / "store"
        self.send_all(Kind.JOIN, json.dumps({"path": str(path)}).encode())
        try:
            self._meeting.join(path, 0, device, self._timeout_s)
        except RuntimeError as error:
            if find_fault(error) is not None:
                raise
            raise self.lose(f"the ranks have not met: {error}") from None
        self.hear()

    def send_all(self, kind: Kind, body: bytes = b"") -> None:
        """Send a message to each. Raises RankLost, ReportedFault."""
        if self.lost:
            raise self._error()
        for member in self._members:
            try:
                member.send(kind, body, self._timeout_s)
            except PipeEnded as error:
                raise self.lose(str(error), member) from None

    def hear(self) -> list[bytearray]:
        """The answer of each, by rank. Raises RankLost, ReportedFault; RankRefused, which leaves no answer behind."""
        replies, refusals = [], []
        for member in self._members:
            try:
                replies.append(self._hear_one(member, self._timeout_s))
            except RankRefused as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]
        return replies

    def lose(self, why: str, suspect: Member | None = None, *, is_ours: bool = False) -> RankLost | ReportedFault:
        """Note that the team is of no use any more; the error for it. Only the first reason counts.

        A lost device is not logged here: the engine ends because of it, and reports it.

        suspect: which rank did not answer, or has ended; None: any of them, unless is_ours says that it is the first rank.
        """
        with self._losing:
            if self.lost or self._is_stopping:
                return self._error(why)
            if not is_ours:
                suspect, why = self._culprit(suspect, why)
            if suspect is not None and (said := suspect.last_words) is not None:
                why, self.fault = said.fault.text(), said.fault if said.is_lost else None
                self.lost = why
            else:
                self.lost = why if suspect is None else f"rank {suspect.rank}: {why}"
            if self.fault is None:
                log.error("rank_lost", rank=None if suspect is None else suspect.rank, why=why)
        self._meeting.leave()
        self._on_lost()
        return self._error()

    def _error(self, why: str = "") -> RankLost | ReportedFault:
        return RankLost(self.lost or why) if self.fault is None else ReportedFault(self.fault)

    def _culprit(self, suspect: Member | None, why: str) -> tuple[Member | None, str]:
        """Which rank is the cause, and what happened to it.

        It is a rank that has reported why it ends. Of the others, a rank that cannot go on without another ends by itself, and
        says so by its code. So it is the first that has ended with another code, else one that neither ends nor answers.
        """
        members = self._members if suspect is None else [suspect, *(each for each in self._members if each is not suspect)]
        for member in members:
            member.hear_out(0)
            if member.last_words is not None:
                return member, why
        deadline = time.monotonic() + _LAST_WORDS_S
        for member in members:
            with suppress(subprocess.TimeoutExpired):
                code = member.process.wait(max(deadline - time.monotonic(), 0))
                if code != rank_process.PARTED:
                    member.hear_out(_LAST_WORDS_S)
                    return member, _ended(code)
        for member in members:
            member.hear_out(0)
            if member.last_words is not None:  # in the meantime
                return member, why
        for member in members:
            if member.process.returncode is None:
                return member, why if member is suspect else "it does not answer"
        return suspect, why

    def stop(self) -> bool:
        """End all of them. Whether they have, so that they map nothing: one may depend on a lost device. Idempotent."""
        self._is_stopping = True
        self._meeting.leave()
        for member in self._members:
            member.process.kill()
        deadline = time.monotonic() + _END_S
        for member in self._members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(max(deadline - time.monotonic(), 0))
            member.close()
        self._have_ended = self._have_ended and all(member.process.poll() is not None for member in self._members)
        self._members = []
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._have_ended

    def _start(self, rank: int, config: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            command = (sys.executable, "-m", rank_process.__name__, str(theirs.fileno()), str(os.getpid()), str(self._folder))
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=child_environment(),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise RankLost(f"rank {rank}: no process can be started: {error.strerror}") from None
        member = Member(rank, process, Pipe(ours))
        self._members.append(member)
        try:
            start_thread(threading.Thread(target=self._listen, args=(member,), name=f"rank-{rank}", daemon=True))
        except NoThread as error:
            raise RankLost(f"rank {rank}: {error}") from None
        set_up = {"config": config, "rank": rank, "num_ranks": self._num_ranks, "timeout_s": self._timeout_s}
        member.send(Kind.SET_UP, json.dumps(set_up).encode(), self._timeout_s)

    def _hear_one(self, member: Member, timeout_s: float | None) -> bytearray:
        try:
            return member.hear(timeout_s)
        except PipeEnded as error:
            raise self.lose(str(error), member) from None

    def _listen(self, member: Member) -> None:
        """Runs in a thread of its own: what the rank logs goes through this process's log, and the end of it is noticed."""
        assert member.process.stdout is not None
        with member.process.stdout as lines:
            for line in lines:
                pass_on(line, "rank", rank=member.rank)
        member.process.wait()
        if not self._is_stopping:
            self.lose(_ended(member.process.returncode), member)


def _ended(code: int) -> str:
    return f"its process ended with {code}"
