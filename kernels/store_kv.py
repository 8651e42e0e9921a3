"""store_kv: write this step's K and V into the cache by slot mapping.

Follows vLLM's reshape_and_cache: a slot is block_id * block_size + offset, and a negative slot is padding and is
skipped.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .checks import on_cuda, require, require_index, require_kv_layer, slot_rows

_OP = "store_kv"


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Where a step's tokens go, the same for all layers; built once per step.

    Attributes:
        k_rows, v_rows: int64 [num_written], rows of the layer seen as slots.
        token_rows: int64 [num_written] of the tokens that have a slot, or None when all have one.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    token_rows: torch.Tensor | None


def plan_store(slot_mapping: torch.Tensor, kv_layer: torch.Tensor) -> StorePlan:
    """Turn slots [T] into rows of `kv_layer` (any layer of the arena). Negative slots are dropped.

    On CUDA nothing is planned: the kernel takes the slots as they are, and to look at them would wait for the device.
    """
    require_index(_OP, "slot_mapping", slot_mapping, 1)
    require_kv_layer(_OP, kv_layer)
    if on_cuda(_OP, slot_mapping):
        return StorePlan(slot_mapping, slot_mapping, None)
    num_blocks, _, block_size, num_kv_heads, head_dim = kv_layer.shape
    slots, token_rows, num_slots = slot_mapping.numpy().astype(np.int64), None, num_blocks * block_size
    highest = int(slots.max(initial=0))
    require(highest < num_slots, _OP, "slot_mapping", "names slot {} of {}", highest, num_slots)
    if slots.min(initial=0) < 0:
        written = np.flatnonzero(slots >= 0)
        slots, token_rows = slots[written], torch.from_numpy(written)
    slot_len = num_kv_heads * head_dim
    blocks, offsets = np.divmod(slots, block_size)
    k_rows = blocks * (kv_layer.stride(0) // slot_len) + offsets
    return StorePlan(torch.from_numpy(k_rows), torch.from_numpy(k_rows + kv_layer.stride(1) // slot_len), token_rows)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor, plan: StorePlan | None = None
) -> None:
    """Write k and v into their slots, in place.

    Args:
        k, v: [T, num_kv_heads, head_dim], the cache's dtype; the last two dimensions contiguous.
        kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer's view of the arena.
        slot_mapping: int32 or int64 [T]; negative: not written. No slot twice.
        plan: plan_store of the same slot mapping, to share its work over layers; CUDA has no use for it.

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit, or, on a CPU, a slot beyond the arena.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, kv_layer)
    heads = (slot_mapping.shape[0], *kv_layer.shape[3:])
    fits = k.shape == heads and v.shape == heads
    require(fits, _OP, "k", "and v must be {}, are {} and {}", heads, k.shape, v.shape)
    fits = k.dtype == v.dtype == kv_layer.dtype
    require(fits, _OP, "k", "and v must be {}, are {} and {}", kv_layer.dtype, k.dtype, v.dtype)
    if cuda:
        from .gpu import store_kv as gpu

        require_index(_OP, "slot_mapping", slot_mapping, 1)
        require_kv_layer(_OP, kv_layer)
        dense = k[:1].is_contiguous() and v[:1].is_contiguous()  # the stride of a single head does not matter
        require(dense, _OP, "k", "and v must be contiguous in their last two dimensions")
        gpu.store_kv(k, v, kv_layer, slot_mapping)
        return
    if plan is None:
        plan = plan_store(slot_mapping, kv_layer)
    if plan.token_rows is not None:
        k, v = k[plan.token_rows], v[plan.token_rows]
    rows = slot_rows(kv_layer, heads[1] * heads[2])
    rows.index_copy_(0, plan.k_rows, k.flatten(1))
    rows.index_copy_(0, plan.v_rows, v.flatten(1))
