"""Whether a request is the step that was foretold, which its bytes tell: what a forecast says of it is compared, not read.

A request begins with its ids, numbers and commits, as protobuf writes them, and ends with its reservations. Between them stand
the new tokens, and what a forecast leaves open: releases and starts. A request that is anything else, a wrong one too, is left
to the usual way, which has the words for what is wrong. The answer waits for what happens here, and a call into numpy costs as
much as ten cuts of bytes where little of it is in the processor's caches.
"""

from struct import unpack

import numpy as np
from google.protobuf.message import DecodeError

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.step.expected import OpenStep
from ..core.step.forecast import Forecast
from ..core.values.step_columns import StepBatch
from .convert.step import step_batch

_ID_BYTES, _INT_BYTES = 8, 4
# What may stand behind the tokens. Any other field makes it another step.
_STARTS = ("start_sequence_ids", "start_max_new_tokens", "start_max_hit_tokens", "start_may_wait")
_RESERVES = ("reserve_sequence_ids", "reserve_min_tokens", "reserve_max_tokens")
_RELEASED = "release_sequence_ids"
_OPEN = {_RELEASED, *_STARTS, *_RESERVES}


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
        self._tail = pb.StepRequest(
            reserve_sequence_ids=self._reserve_ids,
            reserve_min_tokens=self._reserve_lens,
            reserve_max_tokens=self._reserve_lens,
        ).SerializeToString()

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
        fields = self._open_fields(raw)
        if fields is None:
            return None
        ids, lens, told = self._reserve_ids, self._reserve_lens, [fields.get(name, b"") for name in _RESERVES]
        rows = self._released_rows(fields.get(_RELEASED, b""))
        if rows is None:
            return None
        for row in reversed(rows):
            ids, lens = _without(ids, row, _ID_BYTES), _without(lens, row, _INT_BYTES)
        if told != [ids, lens, lens]:
            return None
        start_ids, *columns = (fields.get(name, b"") for name in _STARTS)
        num_starts, is_ragged = divmod(len(start_ids), _ID_BYTES)
        num_bytes = num_starts * _INT_BYTES
        if is_ragged or [*map(len, columns)] not in ([num_bytes] * 3, [num_bytes, num_bytes, 0]):
            return None
        max_new, max_hit, may_wait = (list(unpack(f"<{len(column) // _INT_BYTES}i", column)) for column in columns)
        if not {0, 1}.issuperset(may_wait):
            return None
        growing = list(zip(self._growing, self._roots, strict=True))
        if rows:
            growing = [(at - sum(row < at for row in rows), root) for at, root in growing if at not in rows]
        return OpenStep(
            self.step_id,
            _RELEASED in fields,
            list(unpack(f"<{num_starts}q", start_ids)),
            max_new,
            max_hit,
            np.frombuffer(lens, "<i4"),
            [at for at, _ in growing],
            [root for _, root in growing],
        )

    def step(self, raw: bytes) -> tuple[StepBatch, Forecast]:
        """Such a request as a whole, and the forecast with its releases."""
        batch = step_batch(pb.StepRequest.FromString(raw))
        forecast = self._forecast.without(batch.release_ids) if len(batch.release_ids) else self._forecast
        assert forecast is not None, "a request that was read"
        return batch, forecast

    def _open_fields(self, raw: bytes) -> dict[str, bytes] | None:
        """By their names, what stands behind the tokens; None where something else stands there, or before it."""
        if not raw.startswith(self._head) or not raw[self._signs].isascii():
            return None
        try:
            request = pb.StepRequest.FromString(raw[self._end :])
        except DecodeError:
            return None
        if self._end + request.ByteSize() != len(raw):  # a field stands there twice, or takes back what the head says
            return None
        fields = {field.name: value for field, value in request.ListFields()}
        return fields if fields.keys() <= _OPEN else None

    def _released_rows(self, released: bytes) -> list[int] | None:
        """The reservations that these releases leave out, ascending; None where one is not of this step, or twice."""
        chunks = [released[at : at + _ID_BYTES] for at in range(0, len(released), _ID_BYTES)]
        if len(set(chunks)) < len(chunks) or len(released) % _ID_BYTES:
            return None
        rows = [_row_of(chunk, self._reserve_ids) for chunk in chunks]
        if any(row < 0 and _row_of(chunk, self._commit_ids) < 0 for row, chunk in zip(rows, chunks, strict=True)):
            return None
        return sorted(row for row in rows if row >= 0)


def _row_of(chunk: bytes, ids: bytes) -> int:
    """Where an id stands in a column of ids, or -1."""
    at = ids.find(chunk)
    while at >= 0 and at % _ID_BYTES:  # across two ids
        at = ids.find(chunk, at + 1)
    return at // _ID_BYTES


def _without(column: bytes, row: int, width: int) -> bytes:
    return column[: row * width] + column[(row + 1) * width :]
