"""rotary_store_kv: norm of queries and keys, rotary and store_kv in one pass: on a device, two launches less in every layer."""

import torch

from .activations.rms_norm import rms_norm
from .activations.rotary import require_tables, rotary
from .checks import on_cuda, require, require_index, require_kv_layer
from .cpu import compiled
from .cpu.rows import rotary_store_kv as compiled_rotary_store_kv
from .store_kv import StorePlan, plan_store, store_kv

_OP = "rotary_store_kv"


def rotary_store_kv(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    plan: StorePlan | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into their slots, in place, and return the queries.

    Args:
        qk: [T, num_heads + num_kv_heads, head_dim], queries before keys, the cache's dtype, the last dimension contiguous.
        v: [T, num_kv_heads, head_dim], likewise.
        cos, sin: [T, head_dim], see rotary.
        kv_layer, slot_mapping, plan: see store_kv.
        norm: weight [num_heads + num_kv_heads, head_dim] and eps of rms_norm, for queries and keys before they are rotated;
            None: they are taken as they are.

    Returns:
        The rotated queries [T, num_heads, head_dim].

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit, or, on a CPU, a slot beyond the arena.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    num_kv_heads = kv_layer.shape[3]
    cuda = on_cuda(_OP, qk)
    if norm is not None and not cuda:
        qk, _ = rms_norm(qk, *norm)
    if cuda:
        from .gpu import rotary_store_kv as gpu

        require_kv_layer(_OP, kv_layer)
        require_index(_OP, "slot_mapping", slot_mapping, 1)
        _require_rows(qk, v, cos, sin, kv_layer, slot_mapping)
        if norm is not None:
            weight, _ = norm
            fits = weight.shape == qk.shape[1:] and weight.dtype == qk.dtype and weight.is_contiguous()
            require(fits, _OP, "norm", "must be contiguous {} {}, is {} {}", qk.dtype, qk.shape[1:], weight.dtype, weight.shape)
        return gpu.rotary_store_kv(qk, v, cos, sin, kv_layer, slot_mapping, norm)
    if compiled.serves(qk):
        if plan is None:
            plan = plan_store(slot_mapping, kv_layer)
        heads_dense = qk.stride(1) == v.stride(1) == qk.shape[2] and v.stride(2) == 1
        if plan.token_rows is None and heads_dense and cos.is_contiguous() and sin.is_contiguous():
            _require_rows(qk, v, cos, sin, kv_layer, slot_mapping)
            return compiled_rotary_store_kv(qk, v, cos, sin, kv_layer, plan.k_rows, plan.v_rows)
    qk = rotary(qk, cos, sin)
    q, k = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
    store_kv(k, v, kv_layer, slot_mapping, plan)
    return q


def _require_rows(
    qk: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Raise KernelArgumentError unless queries, keys and values belong to the slots and the layer."""
    num_kv_heads = kv_layer.shape[3]
    require_tables(_OP, qk, cos, sin)
    heads = (slot_mapping.shape[0], *kv_layer.shape[3:])
    fits = v.shape == heads and v.stride(2) == 1 and v.dtype == qk.dtype == kv_layer.dtype
    require(fits, _OP, "v", "must be {} {}, is {} {}", kv_layer.dtype, heads, v.dtype, v.shape)
    fits = qk.shape[0] == v.shape[0] and qk.shape[1] > num_kv_heads and qk.shape[2] == heads[2]
    require(fits, _OP, "qk", "{} must hold queries and {} keys", qk.shape, num_kv_heads)
