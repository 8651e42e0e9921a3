"""Frames between an engine and a front; over a socket each is a head of fixed size, then bytes.

Nothing is pickled. Numbers are a front's, one for each call, and are not used again. A call begins with MESSAGE;
Generate is a call, too, with answers of its own. An engine answers a call with FULL; or with ANSWER, each confirmed by TAKEN,
and END; or with ADMITTED, then CHUNK and PARTS; and with ERROR in place of all that is still to come. A front ends a call with
DROPPED, whether it is over or not; then nothing more is said of it. Pure.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final

from ...outputs.plain_columns import PlainColumns

HEAD: Final = struct.Struct("<BQI")  # kind, number, bytes of the body
_NUM_PARTS: Final = struct.Struct("<I")
_NUMBERS, _COUNTS = "Q", "I"  # types of columns, in the byte order of the machine that both ends are on


class Kind(IntEnum):
    """What a frame says; in brackets its body."""

    # From the engine, of the front; their number is 0.
    SET_UP = 0  # [JSON of FrontSetUp] the first frame
    STATE = 1  # [JSON of FrontState]
    STOP = 2  # [seconds, as text] stop serving, and end
    # From the engine, of a call.
    FULL = 11  # [limit, as text] too many calls wait for their turn
    ANSWER = 12  # [a message]
    END = 13
    ERROR = 14  # [JSON of an error]
    ADMITTED = 15  # [JSON of Admitted]
    CHUNK = 16  # [GenerateResponse] what is not plain; its text is the front's to make where Admitted says so
    PARTS = 17  # [columns] plain tokens of many requests; its number is 0
    # From a front, of the front.
    READY = 30
    FAILED = 31  # [text] it cannot serve, and ends
    REFUSED = 32  # [JSON of counts by reason] calls that were not let in so far
    # From a front, of a call.
    MESSAGE = 41  # [bytes of Told, and a message]
    TAKEN = 42  # the last ANSWER was written
    STOPPED = 43  # [index and number of tokens] a continuation met a stop string
    BROKEN = 44  # [JSON of an error] the request is to end with this error
    DROPPED = 45
    # From either end; the number is 0 where the engine asks.
    PING = 46
    PONG = 47  # with the number of the PING


Frame = tuple[Kind, int, bytes]  # kind, number, body


def frame(kind: Kind, number: int = 0, body: bytes = b"") -> bytes:
    """One frame."""
    return HEAD.pack(kind, number, len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> Iterator[Frame]:
        """Kind, number and body of each frame that is complete. Raises ValueError for a kind that is none."""
        buffer, start = self._buffer, 0
        buffer += data
        while len(buffer) - start >= HEAD.size:
            kind, number, length = HEAD.unpack_from(buffer, start)
            end = start + HEAD.size + length
            if len(buffer) < end:
                break
            body = bytes(memoryview(buffer)[start + HEAD.size : end])
            start = end
            yield Kind(kind), number, body
        del buffer[:start]


class PartColumns:
    """Plain tokens of many requests, by column."""

    def __init__(self) -> None:
        self._numbers, self._counts, self._token_ids = array(_NUMBERS), array(_COUNTS), array(_COUNTS)

    def add(self, number: int, token_ids: Sequence[int]) -> None:
        self._numbers.append(number)
        self._counts.append(len(token_ids))
        self._token_ids.extend(token_ids)

    def add_columns(self, columns: PlainColumns) -> None:
        """Tokens of many requests at once."""
        self._numbers.frombytes(columns.numbers.tobytes())
        self._counts.frombytes(columns.counts.astype(_COUNTS).tobytes())
        self._token_ids.frombytes(columns.token_ids.astype(_COUNTS).tobytes())

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def to_bytes(self) -> bytes:
        columns = (self._numbers, self._counts, self._token_ids)
        return b"".join((_NUM_PARTS.pack(len(self._numbers)), *(column.tobytes() for column in columns)))


def parts_of(body: bytes) -> Iterator[tuple[int, list[int]]]:
    """The number of each request, and its tokens. Raises ValueError where the columns do not fit together."""
    (num_parts,) = _NUM_PARTS.unpack_from(body)
    numbers, rest = array(_NUMBERS), array(_COUNTS)
    end = _NUM_PARTS.size + num_parts * numbers.itemsize
    numbers.frombytes(body[_NUM_PARTS.size : end])
    rest.frombytes(body[end:])
    counts, token_ids, first = rest[:num_parts], rest[num_parts:].tolist(), 0
    if sum(counts) != len(token_ids):
        raise ValueError("columns of different lengths")
    for number, count in zip(numbers, counts, strict=True):
        yield number, token_ids[first : first + count]
        first += count
