"""MooncakeServer: values in a Mooncake store: a master that knows where each is, and the memory that its clients give.

Values live until the store makes room for others; there is no time to live. The era is asked before each batch, in a call
of its own. The calls run in another process, each with a deadline; one that takes too long is no answer.

MooncakeLink owns that process and the memory that values are moved through. Rules: a part of that memory is lent to one call,
and lent again only once its answer has come or the process is gone, so that a call that outlives its deadline writes into
nothing that is read; while such calls have all parts, nothing is begun. A process that reads no requests is killed; one that
ended is started again with the next call.
"""

import contextlib
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from kvkeeper.common.service.threads import NoThread, start_thread

from ...core.values.copies import TierResult
from .remote_address import RemoteAddress
from .remote_store import ServerError

NUM_PARTS = 6  # the tier has four threads
_CLOSE_SECONDS = 5.0
_TIMEVAL = struct.Struct("@ll")  # seconds and microseconds
_MODULE = f"{__package__}.mooncake_process"

Request = dict[str, Any]


class _Child:
    """One process, and what it was asked."""

    def __init__(self, address: RemoteAddress, part_bytes: int, memory: int, timeout: float, module: str) -> None:
        """Raises OSError, and leaves no descriptor then."""
        with ExitStack() as after, ExitStack() as on_failure:
            staging = os.memfd_create("kvkeeper-mooncake", os.MFD_CLOEXEC)
            after.callback(os.close, staging)
            os.ftruncate(staging, NUM_PARTS * part_bytes)
            self.shared = mmap.mmap(staging, 0)
            ours, theirs = socket.socketpair()
            after.callback(theirs.close)
            on_failure.callback(ours.close)
            self.link = ours
            # A message to a process that does not read waits twice: for its first bytes that do not fit, and for the rest.
            seconds, fraction = divmod(timeout / 2, 1)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(seconds), max(int(fraction * 1e6), 1)))
            self.connection = Connection(os.dup(ours.fileno()))
            on_failure.callback(self.connection.close)
            words = [staging, theirs.fileno(), address.host, address.port, memory]
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *(str(word) for word in words)],
                pass_fds=(staging, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the library prints addresses and keys
            )
            on_failure.pop_all()
        self.sending = threading.Lock()  # held while bytes go to the connection, and to close that
        self.parts = list(range(NUM_PARTS))
        self.waiting: dict[int, Callable[[Any], None]] = {}
        self.num_asked = 0
        self.is_gone = False

    def end(self) -> None:
        """Ends a process that was asked nothing."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.link.close()


class MooncakeLink:
    """The link to one store. Methods may be called in any thread."""

    def __init__(self, address: RemoteAddress, part_bytes: int, *, memory: int, timeout: float, module: str = _MODULE) -> None:
        """part_bytes: that one call can move. memory: bytes that the process gives to the store. timeout: seconds of a call.

        module: what the process runs.
        """
        self._address, self._memory, self._timeout, self._module = address, memory, timeout, module
        self.part_bytes = -(-part_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._is_closed = False

    @contextmanager
    def part(self) -> Iterator["Part"]:
        """A part of the memory, for one call. Raises ServerError where calls that take too long have all."""
        with self._lock:
            child = self._started()
            if not child.parts:
                raise ServerError("calls that take too long have all the memory")
            part = Part(self, child, child.parts.pop())
        try:
            yield part
        finally:
            part.end()

    def ask(self, **request: Any) -> Any:
        """The answer to a request that moves no value. Raises ServerError."""
        with self._lock:
            child = self._started()
        return self.exchange(child, request, lambda: None)

    def exchange(self, child: _Child, request: Request, on_answer: Callable[[], None]) -> Any:
        """The answer. on_answer: called once it has come, however late, or never will. Raises ServerError."""
        replies: list[Any] = []
        has_come, deadline = threading.Event(), time.monotonic() + self._timeout

        def take(answer: Any) -> None:
            replies.append(answer)
            on_answer()
            has_come.set()

        with self._lock:
            if child.is_gone:
                raise ServerError("the process is gone")
            child.num_asked += 1
            number = child.num_asked
            child.waiting[number] = take
        if not self._send(child, json.dumps({"id": number, **request}).encode()):
            with self._lock:
                never_asked = child.waiting.pop(number, None)
            if never_asked is not None:
                take(None)
        if not has_come.wait(max(deadline - time.monotonic(), 0)) or replies[0] is None:
            raise ServerError("no answer in time")
        return replies[0]

    def _send(self, child: _Child, message: bytes) -> bool:
        """Whether its turn to be sent has come in time.

        A process that does not read in time is killed, and reported as gone: half a message may have reached it.
        """
        if not child.sending.acquire(timeout=self._timeout):
            return False
        try:
            child.connection.send_bytes(message)
        except OSError:  # its end is reported to all that wait
            with self._lock:
                child.is_gone = True
            child.process.kill()
        finally:
            child.sending.release()
        return True

    def close(self) -> None:
        """The process ends by itself: its socket has."""
        with self._lock:
            self._is_closed, child, self._child = True, self._child, None
        if child is not None:
            with contextlib.suppress(OSError):  # it has ended already
                child.link.shutdown(socket.SHUT_RDWR)
            try:
                child.process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def _started(self) -> _Child:
        """Raises ServerError, also where the system has no process, thread or descriptor left."""
        if self._is_closed:
            raise ServerError("closed")
        if self._child is None:
            try:
                child = _Child(self._address, self.part_bytes, self._memory, self._timeout, self._module)
            except OSError as error:
                raise ServerError(f"no process can be started: {error}") from None
            try:
                start_thread(threading.Thread(target=self._listen, args=(child,), daemon=True))
            except NoThread as error:
                child.end()
                raise ServerError(f"no process can be listened to: {error}") from None
            self._child = child
        return self._child

    def _listen(self, child: _Child) -> None:
        """In a thread of its own, until the process ends."""
        try:
            while True:
                answer = json.loads(child.connection.recv_bytes())
                with self._lock:
                    take = child.waiting.pop(answer["id"])
                take(answer["answer"])
        except (EOFError, OSError, ValueError, KeyError):
            pass
        with self._lock:
            child.is_gone = True
            left = list(child.waiting.values())
            child.waiting.clear()
            is_ours = self._child is child
            if is_ours:
                self._child = None
                child.process.kill()
        for take in left:
            take(None)
        with child.sending:
            child.connection.close()
        child.link.close()
        if is_ours:
            child.process.wait()


class Part:
    """Memory for the values of one call."""

    def __init__(self, link: MooncakeLink, child: _Child, number: int) -> None:
        self._link, self._child, self._number = link, child, number
        self.at = number * link.part_bytes
        self.memory = memoryview(child.shared)[self.at : self.at + link.part_bytes]
        self._num_left = 1  # the caller, and a call whose answer has not come
        self._lock = threading.Lock()

    def ask(self, **request: Any) -> Any:
        """The answer to a request about values in this part. Raises ServerError."""
        with self._lock:
            self._num_left += 1
        return self._link.exchange(self._child, {"at": self.at, **request}, self.end)

    def end(self) -> None:
        """One of its users is done with it."""
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self._child.parts.append(self._number)


_PART_BYTES = 8 << 20
_MISSING, _LARGER = -704, -600  # the library's codes for a key that is not there, and for a value longer than its buffer


class MooncakeServer:
    """A client of one store, which is connected when it is first needed."""

    def __init__(self, address: RemoteAddress, value_bytes: int, *, memory: int, timeout: float) -> None:
        """value_bytes: of a header and a block. memory: bytes that this service gives to the store. timeout: seconds."""
        self.facts: dict[str, object] = {"host": address.host, "port": address.port, "memory": memory}
        self._size = value_bytes
        self._link = MooncakeLink(address, max(_PART_BYTES, value_bytes), memory=memory, timeout=timeout)
        self._most = self._link.part_bytes // value_bytes  # values of one call

    def set_era(self, key: bytes, era: bytes) -> None:
        if self._link.ask(call="set_small", names=[key.decode()], value=era.hex(), replaces=True) != 0:
            raise ServerError("the era is not taken")

    def learn_era(self, key: bytes, era: bytes) -> bytes:
        self._link.ask(call="set_small", names=[key.decode()], value=era.hex(), replaces=False)
        found = self._era(key)
        if found is None:
            raise ServerError("no era")
        return found

    def use(self, era_key: bytes, places: Sequence[bytes]) -> tuple[bytes | None, list[bool]]:
        era = self._era(era_key)
        codes = self._link.ask(call="are_there", names=[place.decode() for place in places])
        return era, [code == 1 for code in codes]

    def get(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[memoryview], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        era, results, size = self._era(era_key), list[TierResult](), self._size
        for first, names in self._batches(places):
            with self._link.part() as part:
                codes = part.ask(call="get", names=names, size=size)
                results += [_result(code, size) for code in codes]
                for place, (header, block) in enumerate(zip(headers[first:], blocks[first : first + len(names)], strict=False)):
                    value = part.memory[place * size : (place + 1) * size]
                    header[:], block[:] = value[: len(header)], value[len(header) :]
        return era, results

    def put(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        era, results, size = self._era(era_key), list[TierResult](), self._size
        for first, names in self._batches(places):
            with self._link.part() as part:
                for place, (header, block) in enumerate(zip(headers[first:], blocks[first : first + len(names)], strict=False)):
                    value = part.memory[place * size : (place + 1) * size]
                    value[: len(header)], value[len(header) :] = header, block
                codes = part.ask(call="put", names=names, size=size)
            results += [TierResult.DONE if code == 0 else TierResult.FAILED for code in codes]
        return era, results

    def delete(self, places: Sequence[bytes]) -> None:
        self._link.ask(call="delete", names=[place.decode() for place in places])

    def close(self) -> None:
        self._link.close()

    def _era(self, key: bytes) -> bytes | None:
        return bytes.fromhex(self._link.ask(call="small", names=[key.decode()])) or None

    def _batches(self, places: Sequence[bytes]) -> list[tuple[int, list[str]]]:
        """As many places as a call moves values, each with the index of its first."""
        names = [place.decode() for place in places]
        return [(first, names[first : first + self._most]) for first in range(0, len(names), self._most)]


def _result(code: int, size: int) -> TierResult:
    if code == size:
        return TierResult.DONE
    if code == _MISSING:
        return TierResult.MISSING
    return TierResult.DAMAGED if code > 0 or code == _LARGER else TierResult.FAILED
