"""K and V of single tokens, for people, tests and clients without shared memory. Never on the path of a step.

Reads and writes rows of an arena by sequence, layer and token range, through the sequence's table as it is at that moment:
nothing is remembered between two chunks, because whatever is awaited in between may change the table.
"""

from collections.abc import Iterator

from ..core.sequences.retention import check_readable
from ..core.sequences.transitions import wrong_state
from ..core.values.errors import InvalidField
from ..core.values.types import Int32Array, Readable, SequenceId, SequenceState, SessionId
from ..runtime.pool_registry import Pool
from .convert import kv_spec
from .convert.sequences import check_range

MAX_CHUNK_BYTES = 1 << 20  # K and V of a ReadKv chunk together stay below
_KEY, _VALUE = 0, 1

Run = tuple[tuple[int, int], int]  # first bytes of K and of V in the arena, and how many of each


def chunks(pool: Pool, first_token_idx: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cuts a token range into (first token, number of tokens) of one message each."""
    row_bytes = kv_spec.token_bytes(pool.info.spec)
    per_chunk = max(1, (MAX_CHUNK_BYTES - 1) // (2 * row_bytes))
    for first in range(first_token_idx, first_token_idx + num_tokens, per_chunk):
        yield first, min(per_chunk, first_token_idx + num_tokens - first)


def check_bounds(readable: Readable, first_token_idx: int, num_tokens: int) -> None:
    """Raises InvalidField for tokens that are not committed, not there yet, or not retained."""
    view, arrived = readable
    if first_token_idx < 0 or num_tokens < 0 or first_token_idx + num_tokens > view.num_committed_tokens:
        raise InvalidField("only committed tokens are read", field="first_token_idx", limit=view.num_committed_tokens)
    if max(first_token_idx, first_token_idx + num_tokens) > arrived:
        text = f"tokens from {arrived} on may still be on the way: read them when the last step is reported as completed"
        raise InvalidField(text, field="first_token_idx", limit=arrived)
    check_readable(view.retention, view.num_committed_tokens, first_token_idx, num_tokens)


def read(pool: Pool, readable: Readable, layer_idx: int, first_token_idx: int, num_tokens: int) -> tuple[bytes, bytes]:
    """K and V, [num_tokens, token_bytes] each. Raises InvalidField as check_bounds does."""
    check_range("layer_idx", layer_idx, 0, pool.info.spec.num_layers - 1)
    check_bounds(readable, first_token_idx, num_tokens)
    view = readable.view
    if view.state is SequenceState.SWAPPED:
        raise wrong_state(view.sequence_id, view.state)
    runs = list(_runs(pool, view.block_table, layer_idx, first_token_idx, num_tokens))
    key, value = (b"".join(pool.arena.read(first[side], count) for first, count in runs) for side in (_KEY, _VALUE))
    return key, value


def write(
    pool: Pool, session: SessionId, sequence: SequenceId, layer_idx: int, first_token_idx: int, key: bytes, value: bytes
) -> None:
    """Writes K and V, [num_tokens, token_bytes] each, into slots that are granted and not committed. Raises InvalidField."""
    row_bytes = kv_spec.token_bytes(pool.info.spec)
    check_range("layer_idx", layer_idx, 0, pool.info.spec.num_layers - 1)
    if not key or len(key) % row_bytes or len(key) != len(value):
        raise InvalidField(f"key and value hold {row_bytes} bytes a token, 1 token or more", field="key", limit=row_bytes)
    num_tokens = len(key) // row_bytes
    low, high = pool.manager.writable_slots(session, sequence)
    if not (low <= first_token_idx and first_token_idx + num_tokens <= high):
        limit = low if first_token_idx < low else high
        raise InvalidField(f"slots {low} to {high} may be written", field="first_token_idx", limit=limit)
    table = pool.manager.view(session, sequence).block_table
    done = 0
    for first, count in _runs(pool, table, layer_idx, first_token_idx, num_tokens):
        for side, data in ((_KEY, key), (_VALUE, value)):
            pool.arena.write(first[side], data[done : done + count])
        done += count


def _runs(pool: Pool, table: Int32Array, layer_idx: int, first_token_idx: int, num_tokens: int) -> Iterator[Run]:
    """Where a run of tokens lies, block by block; blocks are [num_layers, 2, block_size, token_bytes]."""
    row_bytes, block_size = kv_spec.token_bytes(pool.info.spec), pool.info.block_size
    token_idx, end = first_token_idx, first_token_idx + num_tokens
    while token_idx < end:
        block_idx, offset = divmod(token_idx, block_size)
        count = min(block_size - offset, end - token_idx)
        layer = int(table[block_idx]) * pool.info.block_bytes + layer_idx * 2 * block_size * row_bytes
        key = layer + offset * row_bytes
        yield (key, key + block_size * row_bytes), count * row_bytes
        token_idx += count
