"""ReadKv and WriteKv: K and V of single tokens, for people, tests and clients without shared memory. Never on a step's path.

Pools of opaque pages have no such rows, and are refused.

Both read and write rows of an arena by sequence, layer and token range, through the sequence's table as it is at that moment.
No table is kept from one chunk to the next, because a call in between may change it. Where K and V have scales, what is read is
dequantised, and what is written is quantised; a tail is written as well, and never read, because hits do without it.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Final

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.sequences.spans import check_readable
from ..core.sequences.transitions import wrong_state
from ..core.values.errors import InvalidField, NotImplementedYet, OpaquePages
from ..core.values.kv_spec import KvSpec
from ..core.values.types import Int32Array, SequenceId, SequenceState, SessionId
from ..core.values.views import Readable, SequenceView
from ..runtime.pool import Pool
from ..runtime.session_manager import SessionManager
from .convert import checks
from .convert.checks import check_range
from .convert.kv_rows import KvRows
from .convert.kv_spec import ELEMENT_TYPES, to_kv_dtype
from .one_item_session import OneItemSessions
from .ownership import check_sequence, readable_session

MAX_CHUNK_BYTES = 1 << 20  # K and V of a ReadKv chunk together stay below
_WIRE_TYPES: Final = (0, pb.KV_DTYPE_FLOAT16, pb.KV_DTYPE_BFLOAT16, pb.KV_DTYPE_FLOAT32)


class KvCalls:
    """WriteKv is a one-item call; ReadKv changes nothing but the sequence's access count."""

    def __init__(self, session_manager: SessionManager, one_item: OneItemSessions) -> None:
        self._session_manager = session_manager
        self._one_item = one_item

    async def read_kv(self, request: pb.ReadKvRequest) -> AsyncIterator[pb.ReadKvResponse]:
        live = readable_session(self._session_manager, request)
        rows = _make_rows(live.pool, request.kv_dtype)
        sequence_id = checks.sequence_id(request.sequence_id)
        check_sequence(live, sequence_id)
        num_layers = live.pool.info.spec.num_layers
        if len(request.layer_idx) > num_layers:
            raise InvalidField("each layer is read once", field="layer_idx", limit=num_layers)
        for layer_idx in request.layer_idx:
            check_range("layer_idx", layer_idx, 0, num_layers - 1)
        readable = live.pool.manager.queries.readable(live.core.id, sequence_id)
        committed, first = readable.view.num_committed_tokens, request.first_token_idx
        check_range("first_token_idx", first, 0, committed)
        check_range("num_tokens", request.num_tokens, 0, committed - first)
        count = request.num_tokens or max(readable.num_tokens - first, 0)
        check_bounds(readable, first, count)
        spec = live.pool.info.spec
        layers = request.layer_idx or [idx for idx in range(num_layers) if spec.has_rows(idx)] or range(num_layers)
        for layer_idx in layers:
            _check_rows(spec, layer_idx)
            _table(live.pool, readable.view, layer_idx, first, count)
        live.pool.manager.updates.note_read(live.core.id, sequence_id)
        for layer_idx in layers:
            heads = spec.layer_heads(layer_idx)
            for token_idx, num_tokens in _chunks(rows.wire_bytes(layer_idx), first, count):
                await self._one_item.wait_for_copies(request)  # a copy may fill the block that is read
                readable = live.pool.manager.queries.readable(live.core.id, sequence_id)
                key, value = _read(live.pool, rows, readable, layer_idx, token_idx, num_tokens)
                yield pb.ReadKvResponse(
                    layer_idx=layer_idx,
                    first_token_idx=token_idx,
                    num_tokens=num_tokens,
                    key=key,
                    value=value,
                    kv_dtype=to_kv_dtype(rows.wire_type),
                    stored_kv_dtype=to_kv_dtype(spec.element_type),
                    num_kv_heads=heads.num_kv_heads,
                    head_dim=heads.head_dim,
                )

    async def write_kv(self, requests: AsyncIterator[pb.WriteKvRequest]) -> pb.WriteKvResponse:
        num_chunks = num_bytes = 0
        async for request in requests:
            sequence_id, key, value = checks.sequence_id(request.sequence_id), request.key, request.value
            await self._one_item.wait_for_copies(request)  # a copy may overwrite the block that is written
            with self._one_item.session(request) as live:
                rows = _make_rows(live.pool, request.kv_dtype)
                if live.pool.info.spec.has_states:
                    text = "K and V are not written by call beside recurrent layers, whose states no call writes"
                    raise NotImplementedYet(text, feature="layer_group_kind")
                _write(live.pool, rows, live.core.id, sequence_id, request.layer_idx, request.first_token_idx, key, value)
            num_chunks += 1
            num_bytes += len(key) + len(value)
        return pb.WriteKvResponse(num_chunks=num_chunks, num_bytes=num_bytes)


def _make_rows(pool: Pool, kv_dtype: "pb.KvDtype") -> KvRows:
    """The pool's K and V, read and written in this type. Raises InvalidField, NotImplementedYet.

    Raises OpaquePages where this service does not know where in a block a token's K and V are.
    """
    if pool.info.spec.num_ranks > 1:
        text = "K and V of several ranks are not read or written by call: map the memory of each rank"
        raise NotImplementedYet(text, feature="tensor_parallel_size")
    if pool.info.spec.is_opaque:
        raise OpaquePages("the blocks of this pool are opaque pages: map the memory, whose bytes only its clients can read")
    if kv_dtype not in _WIRE_TYPES:
        raise InvalidField("kv_dtype is a type without a scale", field="kv_dtype")
    if pool.info.spec.scaled_bits and not kv_dtype:
        text = "K and V with a scale for each head are read and written by call as numbers: say in kv_dtype of which type"
        raise NotImplementedYet(text, feature="scaled_layout")
    return KvRows(pool.info.spec, pool.arena, ELEMENT_TYPES[kv_dtype] if kv_dtype else pool.info.spec.element_type)


def _check_rows(spec: KvSpec, layer_idx: int) -> None:
    """Raises NotImplementedYet for a recurrent layer, OpaquePages for one of pages."""
    if spec.is_recurrent(layer_idx):
        text = f"layer {layer_idx} is recurrent: it has a state, and no K and V"
        raise NotImplementedYet(text, feature="layer_group_kind")
    if not spec.has_rows(layer_idx):
        raise OpaquePages(f"layer {layer_idx} lies in opaque pages: map the memory, whose bytes only its clients can read")


def check_bounds(readable: Readable, first_token_idx: int, num_tokens: int) -> None:
    """Raises InvalidField for tokens that are not committed, not there yet, or not retained."""
    view, arrived = readable
    if first_token_idx < 0 or num_tokens < 0 or first_token_idx + num_tokens > view.num_committed_tokens:
        raise InvalidField("only committed tokens are read", field="first_token_idx", limit=view.num_committed_tokens)
    if max(first_token_idx, first_token_idx + num_tokens) > arrived:
        text = f"tokens from {arrived} on may not be written yet: read them once the last step is reported as completed"
        raise InvalidField(text, field="first_token_idx", limit=arrived)
    check_readable(view.retention, view.num_committed_tokens, first_token_idx, num_tokens)


def _chunks(row_bytes: int, first_token_idx: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cuts a token range into (first token, number of tokens) of one message each."""
    per_chunk = max(1, (MAX_CHUNK_BYTES - 1) // (2 * row_bytes))
    for first in range(first_token_idx, first_token_idx + num_tokens, per_chunk):
        yield first, min(per_chunk, first_token_idx + num_tokens - first)


def _read(
    pool: Pool, rows: KvRows, readable: Readable, layer_idx: int, first_token_idx: int, num_tokens: int
) -> tuple[bytes, bytes]:
    """K and V, [num_tokens, wire_bytes] each. Raises InvalidField as check_bounds does."""
    check_range("layer_idx", layer_idx, 0, pool.info.spec.num_layers - 1)
    check_bounds(readable, first_token_idx, num_tokens)
    view = readable.view
    if view.state is SequenceState.SWAPPED:
        raise wrong_state(view.sequence_id, view.state)
    return rows.read(_table(pool, view, layer_idx, first_token_idx, num_tokens), layer_idx, first_token_idx, num_tokens)


def _write(
    pool: Pool,
    rows: KvRows,
    session: SessionId,
    sequence: SequenceId,
    layer_idx: int,
    first_token_idx: int,
    key: bytes,
    value: bytes,
) -> None:
    """Writes K and V, [num_tokens, wire_bytes] each, into slots that are granted and not committed. Raises InvalidField."""
    check_range("layer_idx", layer_idx, 0, pool.info.spec.num_layers - 1)
    _check_rows(pool.info.spec, layer_idx)
    row_bytes = rows.wire_bytes(layer_idx)
    if not key or len(key) % row_bytes or len(key) != len(value):
        raise InvalidField(f"key and value hold {row_bytes} bytes a token, 1 token or more", field="key", limit=row_bytes)
    num_tokens = len(key) // row_bytes
    low, high = pool.manager.queries.writable_slots(session, sequence)
    if not (low <= first_token_idx and first_token_idx + num_tokens <= high):
        limit = low if first_token_idx < low else high
        raise InvalidField(f"slots {low} to {high} may be written", field="first_token_idx", limit=limit)
    view = pool.manager.queries.view(session, sequence)
    tables = [_table(pool, view, layer_idx, first_token_idx, num_tokens), *view.group_tables]
    rows.write(tables, layer_idx, first_token_idx, (key, value))


def _table(pool: Pool, view: SequenceView, layer_idx: int, first_token_idx: int, num_tokens: int) -> Int32Array:
    """The table of the layer's group. Raises InvalidField for tokens that the group's window has left behind."""
    group_idx, _ = pool.info.spec.find_place(layer_idx)
    table = view.group_tables[group_idx - 1] if group_idx and view.group_tables else view.block_table
    if group_idx and num_tokens:
        there = table.nonzero()[0]
        first = (int(there[0]) if len(there) else len(table)) * pool.info.block_size
        if first_token_idx < first:
            text = f"layer {layer_idx} has a window, which has left tokens before {first} behind"
            raise InvalidField(text, field="first_token_idx", limit=first)
    return table
