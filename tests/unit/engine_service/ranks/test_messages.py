"""A step's batch as bytes and back; bodies that are none; frames over a socket."""

import dataclasses
import socket
import struct
import threading

import numpy as np
import pytest

from kvkeeper.engine_service.ranks.messages import Kind, Pipe, PipeEnded, decode_batch, decode_ids, encode_batch, encode_ids
from kvkeeper.engine_service.values.batch import Batch, BatchRetention
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch


def a_batch() -> Batch:
    rows = [
        ScheduledRow([5, 6, 7], 4, np.array([3, 9], np.int32), WantLogits.ALL),
        ScheduledRow([1], 8, np.array([4, 2, 8], np.int32)),
        ScheduledRow([2, 3], 0, np.array([7], np.int32), WantLogits.NONE),
    ]
    return build_batch(rows, 4)


def with_all() -> Batch:
    kept = BatchRetention(np.array([1, 0, 2], np.int32), np.array([4, 0, 8], np.int32))
    tables, slots = np.arange(12, dtype=np.int32).reshape(3, 2, 2), np.arange(12, dtype=np.int64).reshape(2, 6)
    awaited = np.array([-1, 2, -1, 7, -1, 0], np.int64)
    return dataclasses.replace(a_batch(), retention=kept, group_tables=tables, group_slots=slots, awaited_rows=awaited)


def arrays_of(batch: Batch) -> dict[str, object]:
    found = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    kept = found.pop("retention")
    return found | ({} if kept is None else {"sinks": kept.sink_lens, "windows": kept.window_lens})


@pytest.mark.parametrize("batch", [a_batch(), with_all()], ids=["plain", "with retention and groups"])
def test_a_batch_comes_back_as_it_was(batch: Batch) -> None:
    again = decode_batch(bytearray(encode_batch(batch)))
    expected, found = arrays_of(batch), arrays_of(again)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        if isinstance(array, np.ndarray):
            assert found[name].dtype == array.dtype
            assert found[name].flags.writeable, "torch takes it without a copy"


def test_no_shortened_or_changed_batch_is_read_beyond_its_end() -> None:
    body = encode_batch(with_all())
    for length in range(0, len(body) - 8, 7):
        with pytest.raises(ValueError, match=r"fit|shorter"):
            decode_batch(bytearray(body[:length]))
    for lengths in ((1 << 62, 0, 0), (-5, 0, 0)):
        with pytest.raises(ValueError, match="token_ids does not fit"):
            decode_batch(bytearray(struct.pack("<b7x3q", 1, *lengths) + body[32:]))
    with pytest.raises(ValueError, match="token_ids does not fit"):
        decode_batch(bytearray(struct.pack("<b7x3q", 4, 1, 1, 1) + body[32:]))


def test_ids_come_back() -> None:
    assert decode_ids(encode_ids([])) == []
    assert decode_ids(encode_ids([1 << 52, 3])) == [1 << 52, 3]


@pytest.fixture
def pipes():  # type: ignore[no-untyped-def]
    ends = [Pipe(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)]
    yield ends
    for end in ends:
        end.close()


def test_frames_of_any_size_arrive_whole(pipes: list[Pipe]) -> None:
    large = bytes(range(256)) * 40_000  # more than a socket holds
    sending = threading.Thread(target=lambda: [pipes[0].send(Kind.FORWARD, body, 10) for body in (large, b"", b"x")])
    sending.start()
    assert [pipes[1].receive(10) for _ in range(3)] == [(Kind.FORWARD, body) for body in (large, b"", b"x")]
    sending.join()


def test_an_end_that_is_gone_or_silent_is_told(pipes: list[Pipe]) -> None:
    with pytest.raises(PipeEnded, match="does not answer"):
        pipes[0].receive(0.01)
    with pytest.raises(PipeEnded, match="does not read"):
        pipes[0].send(Kind.FORWARD, bytes(1 << 22), 0.01)
    pipes[1].close()
    with pytest.raises(PipeEnded, match="closed"):
        pipes[0].send(Kind.FORWARD)
    with pytest.raises(PipeEnded, match="closed"):
        pipes[0].receive(1)
