"""Frames come out of bytes as they went in, wherever the bytes were cut."""

from typing import Any

import numpy as np
import pytest

from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.engine_service.serving.frames import Admitted, Frame, FrontSetUp, FrontState, Kind, Message, Stopped
from kvkeeper.engine_service.serving.lane import HEAD, FrameReader, frame
from kvkeeper.engine_service.values.errors import NeverFits
from kvkeeper.engine_service.values.output_chunk import OutputChunk, TokenColumns, Usage
from kvkeeper.engine_service.values.request import FinishReason

SENT: list[Frame] = [
    (Kind.STOPPED, 1, Stopped(2, 7)),
    (Kind.ANSWER, 2**63, b"x" * 300),
    (Kind.END, 7, None),
    (
        Kind.MESSAGE,
        8,
        Message("/s/M", Caller("näme", "tenant", Role.CLIENT), "ipv4:1.2.3.4:5", b"\0m", (("traceparent", "00-1"),)),
    ),
    (Kind.STATE, 0, FrontState(is_serving=True, is_leaving=False, max_len=9)),
    (Kind.SET_UP, 0, FrontSetUp({"listen": "a"}, None)),
    (Kind.STOP, 0, 0.25),
    (Kind.FULL, 9, 3),
    (Kind.ADMITTED, 9, Admitted("id", True, [1, 2])),
    (Kind.CHUNK, 9, OutputChunk(1, "ä", (3, 4), FinishReason.STOP, Usage(1, 2, 3, 4, 5), cumulative_logprob=-0.5)),
    (Kind.CHUNK, 9, OutputChunk(0, "", (3,))),
    (Kind.FAILED, 0, "an address"),
    (Kind.REFUSED, 0, {"WRONG": 3}),
]


@pytest.mark.parametrize("step", [1, 2, 13, 1000])
def test_frames_come_out_whole_wherever_bytes_are_cut(step: int) -> None:
    raw = b"".join(frame(*each) for each in SENT)
    reader = FrameReader()
    found = [each for first in range(0, len(raw), step) for each in reader.add(raw[first : first + step])]
    assert found == SENT


def through_bytes(kind: Kind, body: Any) -> Any:
    ((found, number, read),) = FrameReader().add(frame(kind, 5, body))
    assert (found, number) == (kind, 5)
    return read


def test_errors_and_columns_are_sent_whole() -> None:
    for kind in (Kind.ERROR, Kind.BROKEN):
        error = through_bytes(kind, NeverFits("too long", requested=9, limit=8))
        assert (error.reason, str(error), error.metadata) == ("NEVER_FITS", "too long", {"requested": "9", "limit": "8"})
    sent = TokenColumns(np.array([7], np.uint64), np.array([2]), np.array([1, 2], np.int32))
    assert [column.tolist() for column in through_bytes(Kind.TOKENS, sent)] == [[7], [2], [1, 2]]


def test_a_kind_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="99"):
        list(FrameReader().add(HEAD.pack(99, 1, 0)))
