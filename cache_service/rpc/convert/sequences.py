"""Requests about sequences as values of the core, and a sequence as a message."""

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.blocks.reuse_order import SOON_SECONDS
from ...core.values.errors import InvalidField
from ...core.values.sequence_args import Retention, SequenceArgs
from ...core.values.types import MAX_ID, NO_INT32, Int32Array, ReuseHint
from ...core.values.views import SequenceView
from .checks import MAX_INT32, check_range, scope, sequence_id
from .step import int32_column

_OTHERWISE = {"block_table", "group_tables", "retention", "idle_seconds"}
_LAST_HINT = max(ReuseHint)
_SAME = tuple(name for name in SequenceView.__slots__ if name not in _OTHERWISE)  # fields of a view as the message has them


def sequence_args(request: pb.CreateSequenceRequest | pb.NewSequence) -> SequenceArgs:
    """Raises InvalidField."""
    if bool(request.token_ids) == bool(request.packed_token_ids):
        raise InvalidField("give token_ids or packed_token_ids, with 1 token or more", field="token_ids", limit=1)
    check_range("priority", request.priority, -1000, 1000)
    check_range("max_tokens", request.max_tokens, 0, MAX_INT32)
    check_range("start_number", request.start_number, 0, MAX_ID)
    if request.packed_token_ids:
        tokens = int32_column(request.packed_token_ids, "packed_token_ids")
        if tokens.min() < 0:
            raise InvalidField("token ids are below 2^31", field="packed_token_ids", limit=MAX_INT32)
    else:
        tokens = token_ids(request.token_ids)
    return SequenceArgs(
        sequence_id(request.sequence_id),
        tokens,
        request.max_tokens,
        scope(request),
        request.priority,
        retention(request),
        request.start_number,
        *_reuse(request),
    )


def retention(
    request: pb.CreateSequenceRequest | pb.NewSequence | pb.UpdateSequenceRequest | pb.CheckAdmissionRequest,
) -> Retention | None:
    """None where the field is absent. Raises InvalidField."""
    if not request.HasField("retention"):
        return None
    sink, window = request.retention.num_sink_tokens, request.retention.num_window_tokens
    check_range("retention.num_sink_tokens", sink, 0, MAX_INT32)
    check_range("retention.num_window_tokens", window, 1, MAX_INT32)
    return Retention(sink, window)


def reuse_hint(request: pb.CreateSequenceRequest | pb.NewSequence | pb.UpdateSequenceRequest | pb.PrefixHint) -> ReuseHint:
    """Raises InvalidField."""
    check_range("reuse_hint", request.reuse_hint, 0, _LAST_HINT)
    return ReuseHint(request.reuse_hint)


def retain_seconds(request: pb.CreateSequenceRequest | pb.NewSequence | pb.PrefixHint) -> float:
    """Raises InvalidField."""
    check_range("retain_ms", request.retain_ms, 0, round(SOON_SECONDS[-1] * 1000))
    return float(request.retain_ms / 1000)


def _reuse(request: pb.CreateSequenceRequest | pb.NewSequence) -> tuple[ReuseHint, float]:
    """What is known of the next use, and the seconds that it is retained. Raises InvalidField."""
    hint, seconds = reuse_hint(request), retain_seconds(request)
    if seconds and hint is ReuseHint.NONE:
        raise InvalidField("what is not used again is not retained", field="retain_ms", limit=0)
    return (ReuseHint.SOON if seconds else hint), seconds


def token_ids(values: object, *, at_least: int = 1) -> Int32Array:
    """A repeated uint32 field as an array. Raises InvalidField."""
    tokens = np.array(values, np.int64)
    if len(tokens) < at_least:
        raise InvalidField(f"token_ids holds {at_least} token or more", field="token_ids", limit=at_least)
    if len(tokens) and tokens.max() > MAX_INT32:
        raise InvalidField("token ids are below 2^31", field="token_ids", limit=MAX_INT32)
    return tokens.astype("<i4")


def sequence_info(view: SequenceView, *, with_table: bool = True, tokens: Int32Array = NO_INT32) -> pb.SequenceInfo:
    """A sequence for people to look at."""
    retention = None
    if view.retention is not None:
        sink, window = view.retention.num_sink_tokens, view.retention.num_window_tokens
        retention = pb.Retention(num_sink_tokens=sink, num_window_tokens=window)
    return pb.SequenceInfo(
        **{name: getattr(view, name) for name in _SAME},
        block_table=view.block_table.tolist() if with_table else (),
        token_ids=tokens.tolist(),
        retention=retention,
        idle_ms=round(view.idle_seconds * 1000),
        group_tables=[pb.GroupTable(block_table=table.tolist()) for table in view.group_tables] if with_table else (),
    )
