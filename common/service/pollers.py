"""Pollers: threads that read and write for gRPC beside its own one, where a connection would keep others waiting.

Without gRPC's event engine (grpc_runtime.py), a thread that reads from a connection stays with it for as long as more bytes are
there, and gRPC for asyncio has one thread for all connections: a client that sends control frames without a pause would stop
all others. Then more threads take over. There are none before, because each costs every message some of the processor. gRPC has
no call for it, so its own thread's work is found, and done by more: it takes what is complete from one queue, and hands it on
under a lock. A gRPC that is built otherwise serves without them.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]

NUM_POLLERS = 16  # further ones at most: connections that may send without a pause while others have their turn
_LOOK_S = 0.05  # from one look at the threads to the next
_BUSY = 0.05  # of that time, the least on a processor of a thread that never rests, however many want the processor

log = structlog.get_logger()


def add_pollers() -> None:
    """Look after gRPC's thread until the process ends. Call it on the loop that serves."""
    cygrpc.init_grpc_aio()  # as a server or a channel does, and never taken back: the threads use what it makes
    queue = getattr(cygrpc, "PollerCompletionQueue", ())
    for thread in threading.enumerate():
        if isinstance(getattr(poll := getattr(thread, "_target", None), "__self__", None), queue):
            _Pollers(thread, poll).look()  # type: ignore[arg-type]  # it has a target
            return
    log.warning("no_pollers", message="this gRPC is built otherwise: a connection that never pauses keeps others waiting")


class _Pollers:
    """The threads. Those that were added live until the process ends."""

    def __init__(self, own: threading.Thread, poll: Callable[[], None]) -> None:
        self._threads, self._poll = [own], poll
        self._marks: dict[threading.Thread, tuple[float, int]] = {}  # seconds on a processor, and rests, at the last look

    def look(self) -> None:
        """Doubles the threads where none of them has rested since the last look."""
        asyncio.get_running_loop().call_later(_LOOK_S, self.look)
        never_rest = [self._never_rests(thread) for thread in self._threads]
        if all(never_rest):
            for _ in range(min(len(self._threads), 1 + NUM_POLLERS - len(self._threads))):
                self._add()

    def _never_rests(self, thread: threading.Thread) -> bool:
        """Whether it was on a processor since the last look, and waited for nothing."""
        before = self._marks.get(thread)
        with contextlib.suppress(OSError):  # without /proc there is no knowing
            self._marks[thread] = now = _mark(thread)
            return before is not None and now[0] - before[0] >= _BUSY * _LOOK_S and now[1] == before[1]
        return False

    def _add(self) -> None:
        thread = threading.Thread(target=self._poll, name=f"grpc-poller-{len(self._threads)}", daemon=True)
        with contextlib.suppress(RuntimeError):  # the host has no thread to give: the next look tries again
            thread.start()
            self._threads.append(thread)


def _mark(thread: threading.Thread) -> tuple[float, int]:
    """Seconds that the thread was on a processor, and how often it waited for something. Raises OSError."""
    assert thread.ident is not None
    seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return seconds, int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
