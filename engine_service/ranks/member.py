"""Member: another rank as the first one sees it: its process, the pipe to it, and what it reported about its end.

A pipe is read by the thread that computes and, once a rank is lost, by the thread that looks for the cause: one at a time. What
a rank reports before it ends is kept, whichever of them reads it.
"""

import json
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass

from ..compute.device.device_errors import DeviceFault
from .failures import PipeEnded, RankRefused
from .messages import Answer, Pipe, decode_fault


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why a rank ends. is_lost: no process can serve on its device now, so that the engine ends, too."""

    fault: DeviceFault
    is_lost: bool


class Member:
    """Not for several threads at once, but for hear_out."""

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
