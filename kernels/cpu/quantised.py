"""Store, decode and read of K and V in few bits, compiled: launches the kernels of the layer's format."""

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from .compiled import load_kernels
from .launch import Launcher

if TYPE_CHECKING:
    from ..quantised.formats import KvFormat
    from ..quantised.layout import QuantisedLayer


def of_format(kv_format: "KvFormat") -> ModuleType:
    """Compile the format's kernels, or take them from disk. Raises ImportError where numba is not installed."""
    return load_kernels("quantised_kernels", kv_format.name)


_ALL_KEYS = 1 << 62
_LAYOUTS = {"store": "q" * 21, "attend_decode": "q" * 20 + "ddqq", "read": "q" * 15}
_launchers: dict[tuple[str, int], Launcher] = {}


def _launcher(name: str, layer: "QuantisedLayer") -> Launcher:
    kv_format = layer.layout.kv_format
    if (name, kv_format.code) not in _launchers:

        def find(own: str, _: torch.dtype) -> int:
            address: int = getattr(of_format(kv_format), own).address
            return address

        _launchers[name, kv_format.code] = Launcher(name, _LAYOUTS[name], find)
    return _launchers[name, kv_format.code]


def _stored(layer: "QuantisedLayer") -> tuple[int, int, int, int]:
    """Where a layer's stored K begin, and the bytes of a block, of a side, and of its elements."""
    layout = layer.layout
    return layer.elements.data_ptr(), layer.elements.stride(0), layout.side_bytes, layout.elements_bytes


def _tail(layer: "QuantisedLayer") -> tuple[int, int]:
    return (0, 0) if layer.tail is None else (layer.tail.data_ptr(), layer.tail.stride(0))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def store(
    k: torch.Tensor, v: torch.Tensor, layer: "QuantisedLayer", slots: torch.Tensor, tail_slots: torch.Tensor | None
) -> None:
    """The compiled path of store_quantised; slots int64, contiguous."""
    _store(k, v, None, None, None, layer, slots, tail_slots, 0)


def rotary_store(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer: "QuantisedLayer",
    slots: torch.Tensor,
    tail_slots: torch.Tensor | None,
) -> torch.Tensor:
    """The compiled path of rotary_store_quantised."""
    num_heads = qk.shape[1] - v.shape[1]
    q = torch.empty((qk.shape[0], num_heads, qk.shape[2]))
    _store(qk, v, cos, sin, q, layer, slots, tail_slots, num_heads)
    return q


def _store(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q: torch.Tensor | None,
    layer: "QuantisedLayer",
    slots: torch.Tensor,
    tail_slots: torch.Tensor | None,
    num_heads: int,
) -> None:
    layout = layer.layout
    _launcher("store", layer)(
        qk.dtype,
        8 * qk.numel(),
        qk.data_ptr(),
        qk.stride(0),
        v.data_ptr(),
        v.stride(0),
        _address(cos),
        _address(sin),
        _address(q),
        *_stored(layer),
        *_tail(layer),
        slots.data_ptr(),
        _address(tail_slots),
        len(slots),
        num_heads,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        layout.kv_format.row_bytes(layout.head_dim),
    )


@dataclass(frozen=True, slots=True)
class DirectTables:
    """Tables as the kernels read them, int32, and proved to stay in the arena.

    Attributes:
        block_tables, tail_tables: [S, max_blocks]; the latter None without a tail.
        seq_lens: [S].
        num_keys: that all queries see together.
    """

    block_tables: torch.Tensor
    tail_tables: torch.Tensor | None
    seq_lens: torch.Tensor
    num_keys: int


def decode(
    q: torch.Tensor,
    layer: "QuantisedLayer",
    tables: DirectTables,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [S, num_heads, head_dim], float32, as quantised_decode does."""
    layout, out, tails = layer.layout, torch.empty(q.shape), tables.tail_tables
    _launcher("attend_decode", layer)(
        q.dtype,
        tables.num_keys * q.shape[1] * q.shape[2],
        q.data_ptr(),
        q.stride(0),
        *_stored(layer),
        layout.kv_format.row_bytes(layout.head_dim),
        *_tail(layer),
        tables.block_tables.data_ptr(),
        _address(tails),
        tables.block_tables.stride(0),
        0 if tails is None else tails.stride(0),
        tables.seq_lens.data_ptr(),
        window or _ALL_KEYS,
        len(q),
        q.shape[1],
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        float(scale),
        float(soft_cap or 0),
        out.data_ptr(),
        _address(sink_logits),
    )
    return out


def read(
    layer: "QuantisedLayer", block_table: torch.Tensor, tail_table: torch.Tensor | None, first: int, count: int
) -> torch.Tensor:
    """K and V [2, count, num_kv_heads, head_dim] of positions from `first` on of a sequence with these int32 tables."""
    layout = layer.layout
    out = torch.empty((2, count, layout.num_kv_heads, layout.head_dim))
    _launcher("read", layer)(
        out.dtype,
        out.numel(),
        *_stored(layer),
        layout.kv_format.row_bytes(layout.head_dim),
        *_tail(layer),
        block_table.data_ptr(),
        _address(tail_table),
        first,
        count,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        out.data_ptr(),
    )
    return out


def prepare(kv_format: "KvFormat") -> None:
    """Compile the kernels of a format, or take them from disk, so that no request waits for it."""
    of_format(kv_format)
