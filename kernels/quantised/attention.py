"""quantised_decode and quantised_prefill: attention over stored K and V, and over pages of the tail where there are some.

One call reads both: each block of a sequence is read from its page of the tail if the tail's table names one, else as it is
stored. On a CPU, compiled kernels read stored elements in place for decode; all else makes numbers of a sequence's K and V
first and runs torch's fused attention on them. Windows, soft caps and sink logits are those of paged_attention_decode;
retention is not served.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..attention.dense_attention import dense_attention
from ..attention.paged_rows import require_tables
from ..checks import on_cuda, require, require_index, require_sink_logits
from ..cpu import compiled
from ..cpu import quantised as fast
from ..cpu.quantised import DirectTables
from .layout import QuantisedLayer
from .read_kv import read_kv

if TYPE_CHECKING:
    from ..gpu.decode_work import DecodeWork

_OP = "quantised_attention"
_MOST_QUERIES = 64  # of one call of torch's attention, see paged_attention_prefill


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """The tables of a step's rows, checked once for all layers; made by plan_rows.

    Attributes:
        block_tables: int32 [S, max_blocks] of stored blocks.
        tail_tables: int32 [S, max_blocks] of pages, 0 where there is none; None: there is no tail.
        seq_lens: int32 [S].
        query_start_loc: int32 [S + 1]; None: each row has one query.
        lens, locs: seq_lens and query_start_loc as numbers, on a CPU.
        works: by window the work list of decode on a device, once a layer has made it.
    """

    block_tables: torch.Tensor
    tail_tables: torch.Tensor | None
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    lens: tuple[int, ...] = ()
    locs: tuple[int, ...] = ()
    works: "dict[int | None, DecodeWork | None]" = field(default_factory=dict)


def plan_rows(
    block_tables: torch.Tensor,
    tail_tables: torch.Tensor | None,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    layer: QuantisedLayer,
) -> QuantisedRows:
    """Check tables and lengths.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit, or, on a CPU, a table that is too short or leaves the arena.
    """
    require_index(_OP, "block_tables", block_tables, 2)
    require_index(_OP, "seq_lens", seq_lens, 1)
    require((tail_tables is None) == (layer.tail is None), _OP, "tail_tables", "are there where the layout has a tail")
    if tail_tables is not None:
        fits = tail_tables.shape == block_tables.shape
        require(fits, _OP, "tail_tables", "must be {} like block_tables, are {}", block_tables.shape, tail_tables.shape)
        tail_tables = tail_tables.int().contiguous()
    rows = QuantisedRows(block_tables.int().contiguous(), tail_tables, seq_lens.int().contiguous(), query_start_loc)
    if on_cuda(_OP, seq_lens):
        return rows
    lens = seq_lens.numpy().astype(np.int64)
    for tables in (block_tables, tail_tables):
        if tables is not None:
            require_tables(_OP, tables.numpy().astype(np.int64), lens, layer.elements)
    locs: tuple[int, ...] = ()
    if query_start_loc is not None:
        require_index(_OP, "query_start_loc", query_start_loc, 1)
        starts = query_start_loc.numpy().astype(np.int64)
        counts = np.diff(starts)
        fits = len(starts) == len(lens) + 1 and starts[0] == 0 and bool((counts >= 0).all())
        require(fits, _OP, "query_start_loc", "must rise from 0, with one entry more than there are sequences")
        require(bool((counts <= lens).all()), _OP, "seq_lens", "must count the queries in")
        locs = tuple(starts.tolist())
    return QuantisedRows(
        rows.block_tables, tail_tables, rows.seq_lens, query_start_loc, tuple(int(length) for length in lens), locs
    )


def quantised_decode(
    q: torch.Tensor,
    layer: QuantisedLayer,
    rows: QuantisedRows,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one query per sequence, the last of its tokens, q [S, num_heads, head_dim]; rows of length 0 give zeros.

    Raises:
        KernelArgumentError: queries or sink logits that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, q)
    _require_queries(q, layer, rows.seq_lens.shape[0])
    require_sink_logits(_OP, sink_logits, q)
    q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
    if cuda:
        from ..gpu import quantised_decode as gpu

        return gpu.quantised_decode(q, layer, rows, scale=scale, window=window, soft_cap=soft_cap, sink_logits=sink_logits)
    if compiled.serves(q):
        num_keys = sum(rows.lens) if window is None else sum(min(length, window) for length in rows.lens)
        tables = DirectTables(rows.block_tables, rows.tail_tables, rows.seq_lens, num_keys)
        return fast.decode(q, layer, tables, scale=scale, window=window, soft_cap=soft_cap, sink_logits=sink_logits)
    out = torch.zeros_like(q)
    for seq, length in enumerate(rows.lens):
        if length:
            first = 0 if window is None else max(length - window, 0)
            k, v = _read(layer, rows, seq, first, length)
            heads = q[seq].unflatten(0, (layer.layout.num_kv_heads, -1))  # [num_kv_heads, group, head_dim]
            attended = dense_attention(
                heads,
                k.transpose(0, 1),
                v.transpose(0, 1),
                None,
                is_causal=False,
                scale=scale,
                soft_cap=soft_cap,
                sink_logits=None if sink_logits is None else sink_logits.view(layer.layout.num_kv_heads, -1, 1),
            )
            out[seq] = attended.flatten(0, 1)
    return out


def quantised_prefill(
    q: torch.Tensor,
    layer: QuantisedLayer,
    rows: QuantisedRows,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend every sequence's queries, the last of its tokens, causally, q [T, num_heads, head_dim].

    Raises:
        KernelArgumentError: queries or sink logits that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    assert rows.query_start_loc is not None, "rows of several queries are planned with their starts"
    cuda = on_cuda(_OP, q)
    _require_queries(q, layer, None)
    require_sink_logits(_OP, sink_logits, q)
    if cuda:
        from ..gpu import quantised_prefill as gpu

        return gpu.quantised_prefill(q, layer, rows, scale=scale, window=window, soft_cap=soft_cap, sink_logits=sink_logits)
    require(rows.locs[-1] <= q.shape[0], _OP, "query_start_loc", "names {} queries of {}", rows.locs[-1], q.shape[0])
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    num_kv_heads = layer.layout.num_kv_heads
    group = q.shape[1] // num_kv_heads
    for seq, length in enumerate(rows.lens):
        begin, end = rows.locs[seq], rows.locs[seq + 1]
        if begin == end:
            continue
        position = length - (end - begin)  # of the first query
        first = 0 if window is None else max(position - window + 1, 0)
        k, v = (side.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for side in _read(layer, rows, seq, first, length))
        heads = q[begin:end].unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        for at in range(0, end - begin, _MOST_QUERIES):
            last = min(at + _MOST_QUERIES, end - begin)
            num_keys = position + last - first  # that the last of these queries sees
            ahead = torch.arange(first, first + num_keys) - torch.arange(position + at, position + last)[:, None]
            dead = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
            mask = torch.zeros(dead.shape, dtype=q.dtype).masked_fill_(dead, -torch.inf)
            attended = dense_attention(
                heads[:, :, at:last],
                k[:, :, :num_keys],
                v[:, :, :num_keys],
                mask,
                is_causal=False,
                scale=scale,
                soft_cap=soft_cap,
                sink_logits=None if sink_logits is None else sink_logits.view(num_kv_heads, group, 1, 1),
            )
            out[begin + at : begin + last] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _read(layer: QuantisedLayer, rows: QuantisedRows, seq: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [end - first, num_kv_heads, head_dim] of a row's tokens, in the layout's dtype."""
    tails = None if rows.tail_tables is None else rows.tail_tables[seq]
    if layer.layout.dtype is torch.float32 and compiled.serves(torch.empty(0)):
        k, v = fast.read(layer, rows.block_tables[seq], tails, first, end - first)
        return k, v
    return read_kv(layer, rows.block_tables[seq], tails, torch.arange(first, end), layer.layout.dtype)


def _require_queries(q: torch.Tensor, layer: QuantisedLayer, num_seqs: int | None) -> None:
    layout = layer.layout
    fits = q.dim() == 3 and q.shape[1] % layout.num_kv_heads == 0 and q.shape[2] == layout.head_dim
    fits = fits and (num_seqs is None or q.shape[0] == num_seqs)
    require(fits, _OP, "q", "{} does not fit {} KV heads of {}", q.shape, layout.num_kv_heads, layout.head_dim)
    require(q.dtype == layout.dtype, _OP, "q", "must be {}, is {}", layout.dtype, q.dtype)
