"""rotary_store_kv: rotary and store_kv in one pass, as decode wants it on a device: one launch less in every layer."""

import torch

from .activations.rotary import require_tables, rotary
from .checks import on_cuda, require, require_index, require_kv_layer
from .store_kv import StorePlan, store_kv

_OP = "rotary_store_kv"


def rotary_store_kv(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    plan: StorePlan | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into their slots, in place, and return the queries.

    Args:
        qk: [T, num_heads + num_kv_heads, head_dim], queries before keys, the cache's dtype, the last dimension contiguous.
        v: [T, num_kv_heads, head_dim], likewise.
        cos, sin: [T, head_dim], see rotary.
        kv_layer, slot_mapping, plan: see store_kv.

    Returns:
        The rotated queries [T, num_heads, head_dim].

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit, or, on a CPU, a slot beyond the arena.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    num_kv_heads = kv_layer.shape[3]
    if on_cuda(_OP, qk):
        from .gpu import rotary_store_kv as gpu

        require_kv_layer(_OP, kv_layer)
        require_index(_OP, "slot_mapping", slot_mapping, 1)
        require_tables(_OP, qk, cos, sin)
        heads = (slot_mapping.shape[0], *kv_layer.shape[3:])
        fits = v.shape == heads and v.stride(2) == 1 and v.dtype == qk.dtype == kv_layer.dtype
        require(fits, _OP, "v", "must be {} {}, is {} {}", kv_layer.dtype, heads, v.dtype, v.shape)
        require(qk.shape[1] > num_kv_heads, _OP, "qk", "{} must hold queries and {} keys", qk.shape, num_kv_heads)
        return gpu.rotary_store_kv(qk, v, cos, sin, kv_layer, slot_mapping)
    qk = rotary(qk, cos, sin)
    q, k = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
    store_kv(k, v, kv_layer, slot_mapping, plan)
    return q
