"""What the ranks say to each other, and the pipe for it: kinds of messages, and a step's arrays behind a header of fixed size.

Without torch, which takes seconds to load. A message is a frame: kind and length, then the body. Bodies are JSON
where they are rare, and arrays where they are a step's. Nothing is pickled, and nothing in a body names a type.
"""

import enum
import json
import socket
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..values.batch import Batch, BatchRetention


class PipeEnded(Exception):
    """The process at the other end has ended, or does not read or answer in time."""


class SumFailed(RuntimeError):
    """Another rank has ended, or did not come in time."""


class RankLost(Exception):
    """A rank has ended or hangs, or its sums fail; another process can take its place. The text names the rank.

    Where its device is lost to it, a ReportedFault of device_errors comes instead.
    """


class RankRefused(Exception):
    """The cache service refused a rank. fields: code, reason and message of its error."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__(fields["message"])
        self.fields = fields


HEAD: Final = struct.Struct("<B3xI")
MOST_BYTES: Final = (1 << 32) - 1

# A batch's arrays in their order: name and dtype. Those of a retention, of groups and of what is awaited may be absent.
_FIELDS: Final = (
    ("token_ids", "<i8"),
    ("positions", "<i8"),
    ("slot_mapping", "<i8"),
    ("query_start_loc", "<i4"),
    ("seq_lens", "<i4"),
    ("block_tables", "<i4"),
    ("logit_rows", "<i8"),
    ("logit_start_loc", "<i4"),
    ("sink_lens", "<i4"),
    ("window_lens", "<i4"),
    ("group_tables", "<i4"),
    ("group_slots", "<i8"),
    ("awaited_rows", "<i8"),
)
_RETENTION: Final = ("sink_lens", "window_lens")
_SHAPE: Final = struct.Struct("<b7x3q")  # dimensions, -1 for an array that is absent, and the lengths of up to three
_ALIGNMENT: Final = 8


class Kind(enum.IntEnum):
    """Kinds of messages. All but TRANSFERS and COPIES have an answer."""

    SET_UP = 1  # JSON: what to load; the answer comes once it is loaded
    JOIN = 2  # JSON: where the ranks meet
    ATTACH = 3  # JSON: the session's memory
    DETACH = 4  # nothing: unmap it
    MAKE_READY = 5  # JSON: the largest step
    TRANSFERS = 6  # int64 [4, N]: ids, kinds, sources and destinations of a step's orders
    COPIES = 7  # int64 [N, 2]: sources and destinations of a step's copies
    FORWARD = 8  # a batch; the answer has the ids of orders that failed in this step
    SYNCHRONIZE = 9  # nothing: the device is to have done all; the answer is as that of FORWARD
    CAPTURE = 10  # JSON: the largest step, and its shape
    REPLAY = 11  # as FORWARD, of a step that was captured


IN_STEPS: Final = frozenset((Kind.TRANSFERS, Kind.COPIES, Kind.FORWARD, Kind.REPLAY, Kind.SYNCHRONIZE))


class Answer(enum.IntEnum):
    """Kinds of answers. After the last two the rank ends; they come also where nothing was asked for."""

    DONE = 1
    REFUSED = 2  # JSON: an error of the cache service
    LOST = 3  # JSON: a fault of its device, on which no process can serve now
    FAILED = 4  # JSON: a fault of its device in a step; another process may do better


class Pipe:
    """One end of the socket between the first rank and another one. Each notices at once when the other has ended.

    Not for several threads at once.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, kind: int, body: bytes = b"", timeout_s: float | None = None) -> None:
        """Raises PipeEnded."""
        assert len(body) <= MOST_BYTES, "a step's arrays are far smaller"
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(HEAD.pack(kind, len(body)) + body)
        except TimeoutError:
            raise PipeEnded("it does not read") from None
        except OSError as error:
            raise PipeEnded(f"its pipe is closed: {error.strerror}") from None

    def receive(self, timeout_s: float | None = None) -> tuple[int, bytearray]:
        """Kind and body. Raises PipeEnded."""
        try:
            self._connection.settimeout(timeout_s)
            kind, length = HEAD.unpack(self._read(HEAD.size))
            return int(kind), self._read(length)
        except TimeoutError:
            raise PipeEnded("it does not answer") from None
        except OSError as error:
            raise PipeEnded(f"its pipe is closed: {error.strerror}") from None

    def close(self) -> None:
        self._connection.close()

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, done = memoryview(data), 0
        while done < num_bytes:
            count = self._connection.recv_into(view[done:])
            if not count:
                raise PipeEnded("its pipe is closed")
            done += count
        return data


def encode_batch(batch: Batch) -> bytes:
    """The body of a FORWARD or REPLAY."""
    shapes, arrays, num_bytes = [], [], len(_FIELDS) * _SHAPE.size
    for name, dtype in _FIELDS:
        found = getattr(batch.retention, name, None) if name in _RETENTION else getattr(batch, name)
        if found is None:
            shapes.append(_SHAPE.pack(-1, 0, 0, 0))
            continue
        array = np.ascontiguousarray(found if isinstance(found, np.ndarray) else found.cpu(), dtype)  # tokens may be torch's
        shapes.append(_SHAPE.pack(array.ndim, *array.shape, *[0] * (3 - array.ndim)))
        arrays.append(array.tobytes().ljust(_padded(array.nbytes), b"\0"))
        num_bytes += len(arrays[-1])
    return b"".join((*shapes, *arrays))


def decode_batch(body: bytearray) -> Batch:
    """Its arrays are views of the body. Raises ValueError for a body that is none of encode_batch's."""
    at = len(_FIELDS) * _SHAPE.size
    if len(body) < at:
        raise ValueError("shorter than its header")
    found: dict[str, npt.NDArray[Any] | None] = {}
    for place, (name, dtype) in enumerate(_FIELDS):
        num_dims, *lengths = _SHAPE.unpack_from(body, place * _SHAPE.size)
        if num_dims == -1:
            found[name] = None
            continue
        shape = lengths[:num_dims]
        count = int(np.prod(shape, dtype=object)) if num_dims in (1, 2, 3) and min(shape) >= 0 else -1
        num_bytes = count * np.dtype(dtype).itemsize
        if count < 0 or at + num_bytes > len(body):
            raise ValueError(f"{name} does not fit")
        found[name] = np.frombuffer(body, dtype, count, at).reshape(shape)
        at += _padded(num_bytes)
    sink_lens, window_lens = (found.pop(name) for name in _RETENTION)
    retention = None if sink_lens is None or window_lens is None else BatchRetention(sink_lens, window_lens)
    return Batch(**found, retention=retention)  # type: ignore[arg-type]


def encode_ids(ids: list[int]) -> bytes:
    return np.array(ids, "<i8").tobytes()


def decode_ids(body: bytes | bytearray) -> list[int]:
    return np.frombuffer(body, "<i8").tolist()


def encode_fault(name: str, sizes: str, device: str) -> bytes:
    """The body of a LOST or FAILED: a DeviceFault, and the device of the rank that sends it."""
    return json.dumps({"name": name, "sizes": sizes, "device": device}).encode()


def decode_fault(body: bytes | bytearray) -> tuple[str, str, str]:
    """What encode_fault was given."""
    fields = json.loads(body)
    return fields["name"], fields["sizes"], fields["device"]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
