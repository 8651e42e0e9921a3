"""Whether a request is the step that was foretold, which its bytes tell: what a forecast says of it is compared, not read.

A request begins with its ids, numbers and commits, as protobuf writes them, and ends with its reservations. Between them stand
the new tokens, and what a forecast leaves open: releases and starts. A request that is anything else, a wrong one too, is left
to the usual way, which has the words for what is wrong.
"""

from operator import attrgetter

import numpy as np
from google.protobuf.message import DecodeError

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.step.forecast import Forecast
from ..core.values.errors import InvalidField
from ..core.values.step_columns import BATCH_COLUMNS, StepBatch
from ..core.values.types import Int32Array
from .convert.step import raw_columns, step_batch

_TOKEN_BYTES = 4
# Places of the columns that a forecast leaves open, or says: any other one makes it another step.
_OTHERS = tuple(place for place, column in enumerate(BATCH_COLUMNS) if column.list not in ("release", "start", "reserve"))
_head = attrgetter("session_id", "epoch", "step_id", "completed_step_id")


class ForetoldBytes:
    """The bytes that a session will most likely send next."""

    def __init__(self, forecast: Forecast, session_id: str, epoch: int) -> None:
        batch = forecast.batch
        self.step_id, self.completed_step_id = batch.step_id, batch.completed_step_id
        self.answer: bytes | None = None
        self.num_calls = 0  # of its pool, when the answer was made
        self._forecast = forecast
        self._num_tokens = len(batch.commit_tokens)
        head = pb.StepRequest(
            session_id=session_id,
            epoch=epoch,
            step_id=batch.step_id,
            completed_step_id=batch.completed_step_id,
            commit_sequence_ids=batch.commit_ids.tobytes(),
            commit_num_tokens=batch.commit_lens.tobytes(),
            commit_num_new_tokens=batch.commit_num_new.tobytes(),
            commit_token_ids=batch.commit_tokens.tobytes(),
        ).SerializeToString()
        num_token_bytes = _TOKEN_BYTES * self._num_tokens
        self._head = head[: len(head) - num_token_bytes]
        self._open = len(head)  # where the tokens end
        self._tail = pb.StepRequest(
            reserve_sequence_ids=batch.reserve_ids.tobytes(),
            reserve_min_tokens=batch.reserve_min.tobytes(),
            reserve_max_tokens=batch.reserve_max.tobytes(),
        ).SerializeToString()

    def is_whole(self, raw: bytes) -> bool:
        """Whether a request is as foretold, and releases and starts nothing."""
        head, tail = self._head, self._tail
        if len(raw) != self._open + len(tail) or not raw.startswith(head) or not raw.endswith(tail):
            return False
        # No token is negative: the last of its four bytes, which has the sign, is below 128.
        return raw[len(head) + _TOKEN_BYTES - 1 : self._open : _TOKEN_BYTES].isascii()

    def whole(self, raw: bytes) -> tuple[StepBatch, Forecast]:
        """The batch of such a request."""
        tokens = np.frombuffer(raw, "<i4", self._num_tokens, len(self._head))
        return self._forecast.batch._replace(commit_tokens=tokens), self._forecast

    def read(self, raw: bytes) -> tuple[StepBatch, Forecast] | None:
        """The batch of a request that is as foretold, and the forecast with its releases; None of any other request."""
        if self.is_whole(raw):
            return self.whole(raw)
        if len(raw) < self._open or not raw.startswith(self._head):
            return None
        tokens = np.frombuffer(raw, "<i4", self._num_tokens, len(self._head))
        return self._read_open(raw[self._open :], tokens) if int(tokens.min()) >= 0 else None

    def _read_open(self, rest: bytes, tokens: Int32Array) -> tuple[StepBatch, Forecast] | None:
        """The same of a request that releases or starts sequences; rest is what stands behind its tokens."""
        try:
            request = pb.StepRequest.FromString(rest)
        except DecodeError:
            return None
        # As long as protobuf writes it, so nothing stands there twice or for nothing; and nothing takes back what the head says.
        if request.ByteSize() != len(rest) or any(_head(request)) or request.HasField("traceparent"):
            return None
        raws = raw_columns(request)
        if any(map(raws.__getitem__, _OTHERS)):
            return None
        try:
            told = step_batch(request)
        except InvalidField:
            return None
        forecast: Forecast | None = self._forecast
        if len(told.release_ids):
            forecast = self._forecast.without(told.release_ids)
        if forecast is None or not _have_equal_reservations(told, forecast.batch):
            return None
        batch = forecast.batch
        return batch._replace(
            commit_tokens=tokens,
            release_ids=told.release_ids,
            start_ids=told.start_ids,
            start_max_new=told.start_max_new,
            start_max_hit=told.start_max_hit,
            start_may_wait=told.start_may_wait,
        ), forecast


def _have_equal_reservations(told: StepBatch, foretold: StepBatch) -> bool:
    return (
        told.reserve_ids.tobytes() == foretold.reserve_ids.tobytes()
        and told.reserve_min.tobytes() == foretold.reserve_min.tobytes()
        and told.reserve_max.tobytes() == foretold.reserve_max.tobytes()
    )
