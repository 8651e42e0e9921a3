"""store_latent: write this step's latent vectors and rotated keys into the cache by slot mapping, side by side in one slot."""

import torch

from .checks import on_cuda, require, require_index, require_kv_layer, slot_rows
from .store_kv import StorePlan, plan_store

_OP = "store_latent"


def store_latent(
    latent: torch.Tensor, rope: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor, plan: StorePlan | None = None
) -> None:
    """Write latent and rope into their slots, in place.

    Args:
        latent: [T, R], rope: [T, P], the cache's dtype, the last dimension contiguous.
        kv_layer: [num_blocks, 2, block_size, 1, R + P], of latent_layer.
        slot_mapping, plan: see store_kv.

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit, or, on a CPU, a slot beyond the arena.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, kv_layer)
    require_kv_layer(_OP, kv_layer)
    num_tokens, width = slot_mapping.shape[0], kv_layer.shape[4]
    fits = kv_layer.stride(1) == 0 and kv_layer.shape[3] == 1
    require(fits, _OP, "kv_layer", "must be of latent_layer, is {} by {}", kv_layer.shape, kv_layer.stride())
    fits = latent.dim() == rope.dim() == 2 and len(latent) == len(rope) == num_tokens
    fits = fits and latent.shape[1] + rope.shape[1] == width and latent.stride(1) == rope.stride(1) == 1
    require(fits, _OP, "latent", "and rope must be {} rows of {}, are {} and {}", num_tokens, width, latent.shape, rope.shape)
    fits = latent.dtype == rope.dtype == kv_layer.dtype
    require(fits, _OP, "latent", "and rope must be {}, are {} and {}", kv_layer.dtype, latent.dtype, rope.dtype)
    if cuda:
        from .gpu.store_latent import store_latent as on_device

        require_index(_OP, "slot_mapping", slot_mapping, 1)
        on_device(latent, rope, kv_layer, slot_mapping)
        return
    if plan is None:
        plan = plan_store(slot_mapping, kv_layer)
    both = torch.cat((latent, rope), 1)
    slot_rows(kv_layer, width).index_copy_(0, plan.k_rows, both if plan.token_rows is None else both[plan.token_rows])
