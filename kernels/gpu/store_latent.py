"""store_latent on CUDA: a program copies one token's latent vector and rotated key into its slot."""

import torch
import triton
import triton.language as tl

from .sizes import power_of_2, warps_for


@triton.jit
def store_latent_kernel(
    latent_ptr,
    rope_ptr,
    layer_ptr,
    slot_ptr,
    latent_stride,
    rope_stride,
    block_stride,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
):
    """Strides in elements. A token with a negative slot is not written."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    target = layer_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (LATENT + ROPE)
    dims = tl.arange(0, R)
    tl.store(target + dims, tl.load(latent_ptr + token * latent_stride + dims, mask=dims < LATENT), mask=dims < LATENT)
    turned = tl.arange(0, P)
    rope = tl.load(rope_ptr + token * rope_stride + turned, mask=turned < ROPE)
    tl.store(target + LATENT + turned, rope, mask=turned < ROPE)


def store_latent(latent: torch.Tensor, rope: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """The CUDA path of kernels.store_latent, with its arguments."""
    num_tokens, width = latent.shape
    if num_tokens == 0:
        return
    store_latent_kernel[(num_tokens,)](
        latent,
        rope,
        kv_layer,
        slot_mapping,
        latent.stride(0),
        rope.stride(0),
        kv_layer.stride(0),
        LATENT=width,
        ROPE=rope.shape[1],
        BLOCK_SIZE=kv_layer.shape[2],
        R=(padded := power_of_2(width)),
        P=power_of_2(rope.shape[1]),
        num_warps=warps_for(padded),
    )
