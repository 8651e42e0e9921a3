"""Output: what a process writes to stdout and stderr waits in bounded queues, so that writing neither fails nor waits.

A disk may be full, a reader gone or at rest: that costs lines, and nothing else. A thread for each stream writes what waits, in
its order. A line that finds no room, or that cannot be written, is dropped and counted; in the place of those that were dropped
a line reports how many, once there is room again. What native code writes does not wait here, but goes to the descriptor at
once.
"""

import io
import os
import queue
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_MAX_WAITING_BYTES = 1 << 20
_AGAIN_S = 1.0  # until it is tried again to report what was dropped
_LAST_WORDS_S = 2.0  # for what waits when a process ends
_LONGEST_LINE = 1 << 16  # bytes of another process's line that are taken as one


class QueuedStream(io.TextIOBase):
    """A stream of text on the descriptor of another one. Whatever calls write gets on at once, with no error."""

    def __init__(self, stream: TextIO) -> None:
        """stream: has a descriptor, which stays its own. Raises RuntimeError where there is no thread to be had."""
        self.num_dropped = 0  # lines
        self.dropped_line: Callable[[int], str] = _dropped_line  # reports how many they are; a log sets its own
        self._stream = stream
        self._descriptor = stream.fileno()
        self._num_reported = 0  # of the dropped lines
        # Lines, places where some are missing, and what asks whether all before it is done. A put may interrupt another put.
        self._waiting: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._num_waiting_bytes = 0
        self._is_full = False  # since the last line that found room, others did not
        self._counting = threading.RLock()  # held for a few sums; the collector of garbage may write while it is held
        self._begun = threading.local()  # text of a line without its end, of each thread
        self._has_failed = self._is_torn = False  # the last line could not be written, or in part
        threading.Thread(target=self._write_all, name="output", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has a variable
        return self._stream.encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Lines wait once they are whole. The number of characters."""
        lines, end, begun = (getattr(self._begun, "text", "") + text).rpartition("\n")
        self._begun.text = begun
        if end:
            self._put(lines + end)
        return len(text)

    def flush(self) -> None:
        """What was written waits as it is, also a line without its end."""
        begun, self._begun.text = getattr(self._begun, "text", ""), ""
        if begun:
            self._put(begun)

    def drain(self, timeout_s: float) -> bool:
        """Waits until all that waits now is written or dropped. Whether that took no longer than it may."""
        self.flush()
        done = threading.Event()
        self._waiting.put(done)
        return done.wait(timeout_s)

    def _put(self, text: str) -> None:
        data = text.encode(self.encoding, "backslashreplace")
        with self._counting:
            was_full, self._is_full = self._is_full, self._num_waiting_bytes >= _MAX_WAITING_BYTES
            if not self._is_full:
                self._num_waiting_bytes += len(data)
                self._waiting.put(data)
                return
            self.num_dropped += _num_lines(data)
            if not was_full:
                self._waiting.put(None)

    def _write_all(self) -> None:
        while True:
            has_unreported = self._num_reported < self.num_dropped
            try:
                item = self._waiting.get(timeout=_AGAIN_S if has_unreported else None)
            except queue.Empty:
                item = None
            if not isinstance(item, bytes):
                self._report_dropped()
                if item is not None:
                    item.set()
                continue
            if self._has_failed:
                self._report_dropped()
            is_written = not self._has_failed and self._write(item)
            with self._counting:
                self._num_waiting_bytes -= len(item)
                self.num_dropped += 0 if is_written else _num_lines(item)

    def _report_dropped(self) -> None:
        num_lines = self.num_dropped - self._num_reported
        if num_lines and self._write(self.dropped_line(num_lines).encode(self.encoding, "backslashreplace")):
            self._num_reported += num_lines

    def _write(self, data: bytes) -> bool:
        """Whether all of it is written."""
        rest = memoryview(b"\n" + data if self._is_torn else data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process that has the same terminal or pipe made it so
                select.select([], [self._descriptor], [])
            except OSError:
                self._has_failed, self._is_torn = True, self._is_torn or len(rest) < len(data)
                return False
        self._has_failed = self._is_torn = False
        return True


@contextmanager
def queued() -> Iterator[None]:
    """sys.stdout and sys.stderr are queued streams meanwhile, and what waits at the end is written, if that takes no time.

    One that is still held up then stays, so that what the interpreter says at its own end is not held up either. A stream
    without a descriptor, as tests have, stays as it is; one that was closed before the start drops everything.
    """
    before = {name: getattr(sys, name) or Path(os.devnull).open("w") for name in ("stdout", "stderr")}  # noqa: SIM115
    for name, stream in before.items():
        setattr(sys, name, _on_queue(stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            ours = getattr(sys, name)
            if not isinstance(ours, QueuedStream) or ours.drain(_LAST_WORDS_S):
                setattr(sys, name, stream)


def num_dropped_lines() -> int:
    """Lines of this process that were dropped."""
    return sum(stream.num_dropped for stream in (sys.stdout, sys.stderr) if isinstance(stream, QueuedStream))


def _on_queue(stream: TextIO) -> TextIO:
    try:
        return QueuedStream(stream)  # type: ignore[return-value]  # it has what text is written with
    except (io.UnsupportedOperation, RuntimeError):  # it has no descriptor, or the host has no thread for it
        return stream


def _dropped_line(num_lines: int) -> str:
    return f"{num_lines} lines were dropped here, which could not be written or were not read\n"


def _num_lines(data: bytes) -> int:
    return data.count(b"\n") or 1


@contextmanager
def passing_on(name: str, take: Callable[[bytes], object]) -> Iterator[int]:
    """A descriptor for another process to write to, which is closed here afterwards.

    A thread of this name hands on what comes, line by line, until that process has ended.

    Raises OSError, RuntimeError: there is no descriptor or no thread to be had.
    """
    reading, writing = os.pipe()
    try:
        try:
            threading.Thread(target=_pass_all_on, args=(reading, take), name=name, daemon=True).start()
        except RuntimeError:
            os.close(reading)
            raise
        yield writing
    finally:
        os.close(writing)


def _pass_all_on(reading: int, take: Callable[[bytes], object]) -> None:
    with open(reading, "rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            take(line)
