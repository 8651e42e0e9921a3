"""store_quantised and rotary_store_quantised: write a step's K and V into stored blocks and pages of the tail, in one pass.

As store_kv and rotary_store_kv do it for blocks of numbers: a slot is block_id * block_size + offset, and a negative one is
skipped. Each token goes into its slot of the stored blocks, and as it was computed into its slot of the tail, where it has
one.
"""

import torch

from ..activations.rms_norm import rms_norm
from ..activations.rotary import require_tables, rotary
from ..checks import on_cuda, require, require_index
from ..cpu import compiled
from ..cpu import quantised as fast
from ..types import QuantisedSlots
from .formats import quantise
from .layout import QuantisedLayer

_OP = "store_quantised"


def plan_slots(stored: torch.Tensor, tail: torch.Tensor | None, layer: QuantisedLayer) -> QuantisedSlots:
    """Check a step's slots [T] once for all layers.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit, or, on a CPU, a slot beyond the arena.
    """
    require((tail is None) == (layer.tail is None), _OP, "tail", "has slots where the layout has a tail")
    num_slots = layer.elements.shape[0] * layer.layout.block_size
    for name, own in (("stored", stored), ("tail", tail)):
        if own is None:
            continue
        require_index(_OP, name, own, 1)
        require(own.shape == stored.shape, _OP, name, "must be {} slots, are {}", stored.shape, own.shape)
        if not own.is_cuda and own.numel():
            high = int(own.max())
            require(high < num_slots, _OP, name, "names slot {} of {}", high, num_slots)
    return QuantisedSlots(stored.long().contiguous(), None if tail is None else tail.long().contiguous())


def store_quantised(k: torch.Tensor, v: torch.Tensor, layer: QuantisedLayer, slots: QuantisedSlots) -> None:
    """Write k and v [T, num_kv_heads, head_dim] of the layout's dtype, contiguous in the last two, into their slots.

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, k)
    _require(k, v, layer, slots)
    if cuda:
        from ..gpu import store_quantised as gpu

        gpu.store_quantised(k, v, layer, slots)
        return
    if compiled.serves_floats(k):
        fast.store(k, v, layer, slots.stored, slots.tail)
        return
    size, kv_format = layer.layout.block_size, layer.layout.kv_format
    rows = torch.nonzero(slots.stored >= 0).flatten()
    blocks, offsets = slots.stored[rows] // size, slots.stored[rows] % size
    elements, scales = quantise(torch.stack((k[rows], v[rows]), 1), kv_format)  # [n, 2, num_kv_heads, ...]
    layer.elements[blocks, :, offsets] = elements
    if kv_format.scale_bytes:
        layer.scales[blocks, :, offsets] = scales
    if slots.tail is not None and layer.tail is not None:
        rows = torch.nonzero(slots.tail >= 0).flatten()
        layer.tail[slots.tail[rows] // size, :, slots.tail[rows] % size] = torch.stack((k[rows], v[rows]), 1)


def rotary_store_quantised(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer: QuantisedLayer,
    slots: QuantisedSlots,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values, in place, and return the queries [T, num_heads, head_dim].

    Args:
        qk: [T, num_heads + num_kv_heads, head_dim], queries before keys.
        v, layer, slots: as in store_quantised.
        cos, sin: [T, head_dim], see rotary.
        norm: of queries and keys before they are rotated, see rotary_store_kv.

    Raises:
        KernelArgumentError, UnsupportedDeviceError: as store_quantised.
    """
    num_kv_heads = v.shape[1]
    if norm is not None:
        qk, _ = rms_norm(qk, *norm)
    if compiled.serves_floats(qk) and cos.is_contiguous() and sin.is_contiguous() and qk.stride()[1:] == (qk.shape[2], 1):
        require_tables(_OP, qk, cos, sin)
        _require(qk[:, -num_kv_heads:], v, layer, slots)
        return fast.rotary_store(qk, v, cos, sin, layer, slots.stored, slots.tail)
    qk = rotary(qk, cos, sin)
    store_quantised(qk[:, -num_kv_heads:], v, layer, slots)
    return qk[:, :-num_kv_heads]


def _require(k: torch.Tensor, v: torch.Tensor, layer: QuantisedLayer, slots: QuantisedSlots) -> None:
    layout = layer.layout
    heads = (slots.stored.shape[0], layout.num_kv_heads, layout.head_dim)
    require(k.shape == heads and v.shape == heads, _OP, "k", "and v must be {}, are {} and {}", heads, k.shape, v.shape)
    fits = k.dtype == v.dtype == layout.dtype
    require(fits, _OP, "k", "and v must be {}, are {} and {}", layout.dtype, k.dtype, v.dtype)
    dense = k.stride()[1:] == v.stride()[1:] == (layout.head_dim, 1)
    require(dense, _OP, "k", "and v must be contiguous in their last two dimensions")
