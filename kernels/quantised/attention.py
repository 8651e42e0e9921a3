"""quantised_decode and quantised_prefill: attention over stored K and V, and over pages of the tail where there are some.

One call reads both: each block of a sequence is read from its page of the tail if the tail's table names one, else as it is
stored. On a CPU, compiled kernels read stored elements in place for decode; all else makes numbers of a sequence's K and V
first (see attention/gathered.py). Windows, soft caps and sink logits are those of paged_attention_decode; retention is not
served.
"""

from collections.abc import Iterator

import numpy as np
import torch

from ..attention.gathered import Gathered, attend_gathered, plan_sequences, require_starts
from ..attention.paged_rows import require_tables
from ..checks import on_cuda, require, require_index, require_sink_logits
from ..cpu import compiled
from ..cpu import quantised as fast
from ..cpu.quantised import DirectTables
from ..types import QuantisedRows
from .formats import dequantise
from .layout import QuantisedLayer


def read_kv(
    layer: QuantisedLayer,
    block_table: torch.Tensor,
    tail_table: torch.Tensor | None,
    positions: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, [T, num_kv_heads, head_dim] of `dtype`, of the tokens at `positions`.

    Args:
        block_table: [max_blocks] of stored blocks.
        tail_table: [max_blocks] of pages, 0 where there is none; None: there is no tail.
        positions: int64 [T].
    """
    layout = layer.layout
    entries, offsets = positions // layout.block_size, positions % layout.block_size
    blocks = block_table[entries].long()
    elements = layer.elements[blocks, :, offsets]  # [T, 2, num_kv_heads, row_bytes]
    scales = layer.scales[blocks, :, offsets] if layout.kv_format.scale_bytes else layer.scales
    kv = dequantise(elements, scales, layout.kv_format, dtype)
    if tail_table is not None and layer.tail is not None:
        pages = tail_table[entries].long()
        there = pages != 0
        kv[there] = layer.tail[pages[there], :, offsets[there]].to(dtype)
    return kv[:, 0], kv[:, 1]


_OP = "quantised_attention"


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
    lens_there = seq_lens.int().contiguous()
    tables = block_tables.int().contiguous()
    if on_cuda(_OP, seq_lens):
        return QuantisedRows(tables, tail_tables, lens_there, query_start_loc)
    lens = seq_lens.numpy().astype(np.int64)
    for each in (block_tables, tail_tables):
        if each is not None:
            require_tables(_OP, each.numpy().astype(np.int64), lens, layer.elements)
    locs = np.arange(len(lens) + 1)
    if query_start_loc is not None:
        require_index(_OP, "query_start_loc", query_start_loc, 1)
        locs = query_start_loc.numpy().astype(np.int64)
        require_starts(_OP, locs, lens)
    return QuantisedRows(tables, tail_tables, lens_there, query_start_loc, lens, locs)


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
    if compiled.serves_floats(q):
        assert rows.lens is not None, "planned on a CPU"
        num_keys = int((rows.lens if window is None else np.minimum(rows.lens, window)).sum())
        tables = DirectTables(rows.block_tables, rows.tail_tables, rows.seq_lens, num_keys)
        return fast.decode(q, layer, tables, scale=scale, window=window, soft_cap=soft_cap, sink_logits=sink_logits)
    return attend_gathered(
        q,
        _read(layer, rows, window),
        layer.layout.num_kv_heads,
        scale=scale,
        value_size=q.shape[2],
        soft_cap=soft_cap,
        sink_logits=sink_logits,
    )


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
    assert rows.locs is not None, "planned on a CPU"
    require(rows.locs[-1] <= q.shape[0], _OP, "query_start_loc", "names {} queries of {}", rows.locs[-1], q.shape[0])
    return attend_gathered(
        q,
        _read(layer, rows, window),
        layer.layout.num_kv_heads,
        scale=scale,
        value_size=q.shape[2],
        soft_cap=soft_cap,
        sink_logits=sink_logits,
    )


def _read(layer: QuantisedLayer, rows: QuantisedRows, window: int | None) -> Iterator[Gathered]:
    """K and V that each row's queries see, in the layout's dtype."""
    dtype = layer.layout.dtype
    if window not in rows.gathers:
        assert rows.lens is not None, "planned on a CPU"
        assert rows.locs is not None, "planned on a CPU"
        rows.gathers[window] = plan_sequences(rows.lens, rows.locs, dtype, window)
    for each in rows.gathers[window]:
        table, tails = rows.block_tables[each.seq], None if rows.tail_tables is None else rows.tail_tables[each.seq]
        if compiled.serves_floats(torch.empty(0, dtype=dtype)):
            yield each, *fast.read(layer, table, tails, int(each.positions[0]), len(each.positions))
        else:
            yield each, *read_kv(layer, table, tails, torch.from_numpy(each.positions), dtype)


def _require_queries(q: torch.Tensor, layer: QuantisedLayer, num_seqs: int | None) -> None:
    layout = layer.layout
    fits = q.dim() == 3 and q.shape[1] % layout.num_kv_heads == 0 and q.shape[2] == layout.head_dim
    fits = fits and (num_seqs is None or q.shape[0] == num_seqs)
    require(fits, _OP, "q", "{} does not fit {} KV heads of {}", q.shape, layout.num_kv_heads, layout.head_dim)
    require(q.dtype == layout.dtype, _OP, "q", "must be {}, is {}", layout.dtype, q.dtype)
