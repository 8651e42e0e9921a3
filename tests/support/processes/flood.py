"""A client that sends frames of HTTP/2 without a pause: `python -m tests.support.processes.flood ADDRESS KIND`.

Each connection is made once, and sends until the service sends it away or reads no more of it, or until so many frames or
seconds are over. What the service answers is read and thrown away. The frames are written by hand, for a library would hold
back most of them.
"""

import argparse
import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, repeat

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING, _CONTINUATION = 1, 3, 4, 6, 9
_ACK, _END_HEADERS = 1, 4
_CANCEL = struct.pack(">I", 8)
_BATCH = 200  # frames, or streams
_CALM = b"too_many_pings"  # why a service sends a connection away
_TIMEOUT_S = 20.0
_STALLED_S = 5.0  # without a byte that the service takes in


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _field(name: str, value: str) -> bytes:
    """A header that is neither compressed nor remembered."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


def _request(path: str) -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    return b"".join(_field(*field) for field in (fields | {"content-type": "application/grpc", "te": "trailers"}).items())


def _resets(path: str) -> Iterator[bytes]:
    head = _request(path)
    for stream in count(1, 2):
        yield frame(_HEADERS, _END_HEADERS, stream, head) + frame(_RST_STREAM, 0, stream, _CANCEL)


def _pings(path: str) -> Iterator[bytes]:
    return repeat(frame(_PING, 0, 0, bytes(8)))


def _settings(path: str) -> Iterator[bytes]:
    return repeat(frame(_SETTINGS, 0, 0))


def _continuations(path: str) -> Iterator[bytes]:
    yield frame(_HEADERS, 0, 1, _request(path))
    yield from repeat(frame(_CONTINUATION, 0, 1, _field("x-more", "x" * 50)))


KINDS: dict[str, Callable[[str], Iterator[bytes]]] = {
    "resets": _resets,
    "pings": _pings,
    "settings": _settings,
    "continuations": _continuations,
}


def connect(address: str) -> tuple[socket.socket, bytes]:
    """A connection that has exchanged settings, and what else came with them."""
    if address.startswith("unix:"):
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(_TIMEOUT_S)
        end.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        end = socket.create_connection((host, int(port)), _TIMEOUT_S)
    end.sendall(_PREFACE + frame(_SETTINGS, 0, 0))
    came = end.recv(1 << 16)  # to acknowledge what has not come is an error
    if not came:
        raise ConnectionError("closed at once")
    end.sendall(frame(_SETTINGS, _ACK, 0))
    return end, came


def flood(address: str, kind: str, path: str, num_frames: int, seconds: float) -> tuple[int, bool]:
    """How many frames, or streams, were sent on one connection, and whether the service sent it away or reads no more of it."""
    end, _ = connect(address)
    over, sent, sent_at = time.monotonic() + seconds, 0, time.monotonic()
    closed, is_stalled = threading.Event(), False

    def read() -> None:
        tail = b""
        with contextlib.suppress(OSError):
            while (came := end.recv(1 << 16)) and _CALM not in (tail := tail[-len(_CALM) :] + came):
                pass
        closed.set()

    reader = threading.Thread(target=read, daemon=True)
    end.settimeout(None)
    reader.start()
    frames = KINDS[kind](path)
    try:
        while sent < num_frames and time.monotonic() < over and not closed.is_set():
            batch = memoryview(b"".join(next(frames) for _ in range(min(_BATCH, num_frames - sent))))
            while batch:
                try:
                    batch, sent_at = batch[end.send(batch, socket.MSG_DONTWAIT) :], time.monotonic()
                except BlockingIOError:  # the service reads no more, for now
                    if closed.wait(0.001) or time.monotonic() > min(over, sent_at + _STALLED_S):
                        break
            if batch:
                is_stalled = time.monotonic() < over
                break
            sent += min(_BATCH, num_frames - sent)
        if kind == "pings" and sent >= num_frames:
            closed.wait(_TIMEOUT_S)  # for the answer to the last of them
    except OSError:
        closed.set()
    is_refused = closed.is_set() or is_stalled
    end.close()
    return sent, is_refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--path", default="/grpc.health.v1.Health/Check")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--frames", type=int, default=sys.maxsize)
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    results: list[tuple[int, bool]] = []

    def one() -> None:
        results.append(flood(args.address, args.kind, args.path, args.frames, args.seconds))

    threads = [threading.Thread(target=one) for _ in range(args.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
