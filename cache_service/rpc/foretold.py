"""Whether a request is the step that was foretold, which its bytes tell: what a forecast says of it is compared, not read.

A request begins with its ids, numbers and commits, as protobuf writes them, and ends with its reservations. Between them stand
the new tokens, and what a forecast leaves open: releases and starts. A request that is anything else, a wrong one too, is left
to the usual way, which has the words for what is wrong. The answer waits for what happens here, and a call into numpy costs as
much as ten cuts of bytes where little of it is in the processor's caches.
"""

from bisect import bisect_left
from functools import lru_cache
from struct import unpack

import numpy as np
from google.protobuf.message import DecodeError

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.step.expected import OpenStep
from ..core.step.forecast import Forecast
from ..core.values.step_columns import MAX_STEP_ITEMS, StepBatch
from .convert.step import step_batch

_ID_BYTES, _INT_BYTES = 8, 4
# What may stand behind the tokens. Any other field makes it another step.
_STARTS = ("start_sequence_ids", "start_max_new_tokens", "start_max_hit_tokens", "start_may_wait")
_RELEASED = "release_sequence_ids"
_OPEN = {_RELEASED, *_STARTS}
_MOST_OPEN_BYTES = MAX_STEP_ITEMS * _ID_BYTES
_MOST_LEFT_OUT = 128  # reservations; a request that leaves out more is read the usual way


class ForetoldBytes:
    """The bytes that a session will most likely send next."""

    def __init__(self, forecast: Forecast, session_id: str, epoch: int) -> None:
        batch = forecast.batch
        self.step_id, self.completed_step_id = batch.step_id, batch.completed_step_id
        self.answer: bytes | None = None
        self.num_calls = 0  # of its pool, when the answer was made
        self._forecast = forecast
        self._growing, self._roots = forecast.growing.tolist(), forecast.roots.tolist()
        self._commit_ids, self._reserve_ids = batch.commit_ids.tobytes(), batch.reserve_ids.tobytes()
        self._reserve_lens = batch.reserve_max.tobytes()
        head = pb.StepRequest(
            session_id=session_id,
            epoch=epoch,
            step_id=batch.step_id,
            completed_step_id=batch.completed_step_id,
            commit_sequence_ids=self._commit_ids,
            commit_num_tokens=batch.commit_lens.tobytes(),
            commit_num_new_tokens=batch.commit_num_new.tobytes(),
            commit_token_ids=batch.commit_tokens.tobytes(),
        ).SerializeToString()
        self._end = len(head)  # of the tokens
        self._head = head[: self._end - batch.commit_tokens.nbytes]
        # No token is negative: the last of its four bytes, which has the sign, is below 128.
        self._signs = slice(len(self._head) + _INT_BYTES - 1, self._end, _INT_BYTES)
        self._tail = _reservations(self._reserve_ids, self._reserve_lens)

    @property
    def whole(self) -> OpenStep:
        """The step that releases and starts nothing."""
        return OpenStep(self.step_id, False, [], [], [], self._forecast.batch.reserve_max, self._growing, self._roots)

    def is_whole(self, raw: bytes) -> bool:
        """Whether a request is as foretold, and releases and starts nothing."""
        is_as_long = len(raw) == self._end + len(self._tail)
        return is_as_long and raw.startswith(self._head) and raw.endswith(self._tail) and raw[self._signs].isascii()

    def read_open(self, raw: bytes) -> OpenStep | None:
        """A request that may release and start, as far as its answer needs it; None of any other request."""
        if self.is_whole(raw):
            return self.whole
        if not raw.startswith(self._head) or not raw[self._signs].isascii():
            return None
        tail_start = self._tail_start(raw)
        fields = _open_fields(raw[self._end : tail_start])
        if fields is None or sum(len(fields.get(name, b"")) for name in (_RELEASED, _STARTS[0])) > _MOST_OPEN_BYTES:
            return None
        rows = self._released_rows(fields.get(_RELEASED, b""))
        if rows is None:
            return None
        ids, lens = self._reserve_ids, self._reserve_lens
        for row in reversed(rows):
            ids, lens = _without(ids, row, _ID_BYTES), _without(lens, row, _INT_BYTES)
        if raw[tail_start:] != _reservations(ids, lens):
            return None
        start_ids, *columns = (fields.get(name, b"") for name in _STARTS)
        num_starts, is_ragged = divmod(len(start_ids), _ID_BYTES)
        num_bytes = num_starts * _INT_BYTES
        if is_ragged or [*map(len, columns)] not in ([num_bytes] * 3, [num_bytes, num_bytes, 0]):
            return None
        max_new, max_hit, may_wait = (list(unpack(f"<{len(column) // _INT_BYTES}i", column)) for column in columns)
        if not {0, 1}.issuperset(may_wait):
            return None
        growing, roots = self._growing, self._roots
        for row in reversed(rows):
            growing, roots = _without_row(growing, roots, row)
        return OpenStep(
            self.step_id,
            _RELEASED in fields,
            list(unpack(f"<{num_starts}q", start_ids)),
            max_new,
            max_hit,
            np.frombuffer(lens, "<i4"),
            growing,
            roots,
        )

    def step(self, raw: bytes) -> tuple[StepBatch, Forecast]:
        """Such a request as a whole, and the forecast with its releases."""
        batch = step_batch(pb.StepRequest.FromString(raw))
        forecast = self._forecast.without(batch.release_ids) if len(batch.release_ids) else self._forecast
        assert forecast is not None, "a request that was read"
        return batch, forecast

    def _tail_start(self, raw: bytes) -> int:
        """Where the reservations of a request begin, if they are as foretold but for some that it leaves out."""
        num_foretold = len(self._reserve_ids) // _ID_BYTES
        for num_kept in range(num_foretold, max(num_foretold - _MOST_LEFT_OUT, 0), -1):
            begin, num_bytes = _tail_frame(num_kept)
            if raw.startswith(begin, len(raw) - num_bytes):
                return len(raw) - num_bytes
        return len(raw)

    def _released_rows(self, released: bytes) -> list[int] | None:
        """The reservations that these releases leave out, ascending; None where one is not of this step, or twice."""
        rows = list[int]()
        chunks = [released[at : at + _ID_BYTES] for at in range(0, len(released), _ID_BYTES)]
        for chunk in chunks:
            row = _row_of(chunk, self._reserve_ids)
            if row >= 0:
                rows.append(row)
            elif _row_of(chunk, self._commit_ids) < 0:
                return None
        rows.sort()
        return rows if len(set(chunks)) == len(chunks) else None


def _open_fields(raw: bytes) -> dict[str, bytes] | None:
    """By their names, what stands between the tokens and the reservations; None where another field does."""
    try:
        request = pb.StepRequest.FromString(raw)
    except DecodeError:
        return None
    if request.ByteSize() != len(raw):  # a field stands there twice
        return None
    fields = {field.name: value for field, value in request.ListFields()}
    return fields if fields.keys() <= _OPEN else None


def _reservations(ids: bytes, lens: bytes) -> bytes:
    """Columns of reservations, as protobuf writes them."""
    return pb.StepRequest(reserve_sequence_ids=ids, reserve_min_tokens=lens, reserve_max_tokens=lens).SerializeToString()


@lru_cache(4096)
def _tail_frame(num_reservations: int) -> tuple[bytes, int]:
    """How the columns of so many reservations begin, and their length in bytes."""
    tail = _reservations(bytes(_ID_BYTES * num_reservations), bytes(_INT_BYTES * num_reservations))
    return tail[: tail.index(0)], len(tail)


def _row_of(chunk: bytes, ids: bytes) -> int:
    """Where an id stands in a column of ids, or -1."""
    at = ids.find(chunk)
    while at >= 0 and at % _ID_BYTES:  # across two ids
        at = ids.find(chunk, at + 1)
    return at // _ID_BYTES


def _without_row(growing: list[int], roots: list[int], row: int) -> tuple[list[int], list[int]]:
    """Growing reservations, ascending, and their roots, if a reservation is left out."""
    at = bisect_left(growing, row)
    end = at + (at < len(growing) and growing[at] == row)
    return growing[:at] + [grows - 1 for grows in growing[end:]], roots if end == at else roots[:at] + roots[end:]


def _without(column: bytes, row: int, width: int) -> bytes:
    return column[: row * width] + column[(row + 1) * width :]
