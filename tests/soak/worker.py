"""A process that runs units of rows, one after the other, so that a unit that hangs or crashes ends nothing but itself."""

import logging
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import structlog

from tests.soak.row import Counts, Row

_START_S = 120.0  # that a process may take until it runs its first unit
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one unit ended. error is its traceback, or None where the promise held."""

    row: Row
    seed: int
    seconds: float
    counts: Counts | None
    error: str | None


class Worker:
    """One process, with at most one unit in it. It is started when it is first needed, and again after a unit killed it."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self.connection: Connection | None = None
        self.row: Row | None = None
        self._seed = 0
        self._started = 0.0
        self._is_under_way = False

    def start(self, row: Row, seed: int) -> None:
        if self._process is None:
            self.connection, theirs = _context.Pipe()
            self._process = _context.Process(target=_work, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        assert self.connection is not None
        self.row, self._seed, self._started, self._is_under_way = row, seed, time.monotonic(), False
        self.connection.send((row.run, seed))

    def outcome(self) -> Outcome | None:
        """Of the unit, when it has ended or hangs."""
        assert self.connection is not None
        assert self.row is not None
        row, seconds = self.row, time.monotonic() - self._started
        most_seconds = row.most_seconds if self._is_under_way else _START_S
        if self.connection.poll():
            try:
                answer = self.connection.recv()
            except EOFError:
                answer = None, "the process that ran it died"
                self.stop()
            if answer is None:
                self._is_under_way, self._started = True, time.monotonic()
                return None
            counts, error = answer
        elif seconds > most_seconds:
            counts, error = None, f"it did not end within {most_seconds:.1f} s"
            self.stop()
        else:
            return None
        self.row = None
        return Outcome(row, self._seed, seconds, counts, error)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self.connection = None


def quiet() -> None:
    """Services that a unit starts say nothing of what is as usual."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _work(connection: Connection) -> None:
    quiet()
    while True:
        try:
            run, seed = connection.recv()
        except EOFError:
            return
        connection.send(None)  # under way
        connection.send(attempt(run, seed))


def attempt(run: Callable[[int], Counts], seed: int) -> tuple[Counts | None, str | None]:
    """A unit's counts, or what it broke."""
    try:
        return run(seed), None
    except Exception:
        return None, traceback.format_exc()
