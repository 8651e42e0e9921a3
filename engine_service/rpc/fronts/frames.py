"""Frames between an engine and a front; over a socket each is a head of fixed size, then bytes.

Nothing is pickled. Numbers are a front's, one for each call, and are not used again. A call begins with MESSAGE;
Generate is a call, too, with answers of its own. An engine answers a call with FULL; or with ANSWER, each confirmed by TAKEN,
and END; or with ADMITTED, then CHUNK and TOKENS; and with ERROR in place of all that is still to come. A front ends a call with
DROPPED, whether it is over or not; then nothing more is said of it. Pure.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

HEAD: Final = struct.Struct("<BQI")  # kind, number, bytes of the body


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
    TOKENS = 17  # [TokenColumns] of many requests, tokens that have nothing with them; its number is 0
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
