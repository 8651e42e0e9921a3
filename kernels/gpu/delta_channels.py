"""Kimi Delta Attention (arXiv 2510.26692) on CUDA: what the tokens of a chunk have to do with each other, where the dimensions
of a head's keys forget one by one.

What a token's key has of an earlier one's is a product of what is left of each since the later token's part of the chunk began,
and until then, so that nothing grows; of two tokens of one part it is added up by itself.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..types import STATE_CHUNK, ChannelRule, DeltaInputs, StateChunks
from .delta_decode import find_decay

_PART = 16  # tokens of a part of a chunk


@triton.jit
def load_keys(ptrs, live, IS_UNIT: tl.constexpr):
    """Heads of tokens, at length 1 or as they are."""
    x = tl.load(ptrs, mask=live, other=0.0).to(tl.float32)
    if IS_UNIT:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    return x


@triton.jit
def channel_total_kernel(
    gate_ptr,
    first_ptr,
    len_ptr,
    bias_ptr,
    log_ptr,
    total_ptr,
    gate_stride,
    least,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    K: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """total, float32 [T, NUM_HEADS, KEY_DIM]: the logarithm of what is left of each row of the matrix before the chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, keys = tl.arange(0, TOKENS), tl.arange(0, K)
    first, count = tl.load(first_ptr + chunk), tl.load(len_ptr + chunk)
    own, is_own = first + tokens, (tokens < count)[:, None] & (keys < KEY_DIM)[None, :]
    gate = tl.load((gate_ptr + own * gate_stride + head * KEY_DIM)[:, None] + keys[None, :], mask=is_own, other=0.0)
    bias = tl.load(bias_ptr + head * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
    decay = find_decay(gate, bias[None, :], tl.load(log_ptr + head), least)
    total = tl.cumsum(tl.where(is_own, decay, 0.0), 0)
    tl.store((total_ptr + (own * NUM_HEADS + head) * KEY_DIM)[:, None] + keys[None, :], total, mask=is_own)


@triton.jit
def channel_share_kernel(
    made_ptr,
    first_ptr,
    len_ptr,
    total_ptr,
    system_ptr,
    share_ptr,
    scale,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
    K: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """What PART tokens of one chunk and head have of all of it: share, see chunk_kernel, and system, float32 [T, NUM_HEADS,
    TOKENS], the same of keys with keys, which is not written where the other token is of a later part.
    """
    chunk, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, keys = tl.arange(0, PART), tl.arange(0, K)
    first, count, begin = tl.load(first_ptr + chunk), tl.load(len_ptr + chunk), part * PART
    live, own = begin + tokens < count, first + begin + tokens
    row: tl.constexpr = (2 * KEY_DIM + VALUE_DIM) * NUM_HEADS
    is_key, is_own = keys < KEY_DIM, live[:, None] & (keys < KEY_DIM)[None, :]
    q_ptrs, k_ptrs = made_ptr + head * KEY_DIM, made_ptr + (NUM_HEADS + head) * KEY_DIM
    q = load_keys((q_ptrs + own * row)[:, None] + keys[None, :], is_own, True) * scale
    k = load_keys((k_ptrs + own * row)[:, None] + keys[None, :], is_own, True)
    totals = total_ptr + head * KEY_DIM
    total = tl.load((totals + own * NUM_HEADS * KEY_DIM)[:, None] + keys[None, :], mask=is_own, other=0.0)
    since = tl.load(totals + (first + begin) * NUM_HEADS * KEY_DIM + keys, mask=is_key & (begin < count), other=0.0)
    grown = tl.exp(tl.where(is_own, total - since[None, :], 0.0))
    grown_q, grown_k = (q * grown).to(COMPUTE), (k * grown).to(COMPUTE)
    rows = (own * NUM_HEADS + head) * TOKENS
    systems, shares = system_ptr + rows, share_ptr + rows
    for other in range(TOKENS // PART):
        others = other * PART + tokens
        is_other = (others < count)[:, None] & is_key[None, :] & (other < part) & (begin < count)
        places = first + others
        k_other = load_keys((k_ptrs + places * row)[:, None] + keys[None, :], is_other, True)
        left = tl.load((totals + places * NUM_HEADS * KEY_DIM)[:, None] + keys[None, :], mask=is_other, other=0.0)
        left = tl.exp(tl.where(is_other, since[None, :] - left, 0.0))
        there = tl.trans((k_other * left).to(COMPUTE))
        share = tl.dot(grown_q, there, input_precision="ieee")
        tl.store(shares[:, None] + others[None, :], share.to(COMPUTE), mask=live[:, None] & (other != part))
        system = tl.dot(grown_k, there, input_precision="ieee")
        tl.store(systems[:, None] + others[None, :], system, mask=live[:, None] & (other < part))
    system, share = tl.zeros((PART, PART), tl.float32), tl.zeros((PART, PART), tl.float32)
    for other in range(PART):
        place, is_there = first + begin + other, is_key & (begin + other < count)
        k_other = tl.load(k_ptrs + place * row + keys, mask=is_there, other=0.0).to(tl.float32)
        k_other = k_other * tl.rsqrt(tl.sum(k_other * k_other, 0) + 1e-6)
        left = tl.load(totals + place * NUM_HEADS * KEY_DIM + keys, mask=is_there, other=0.0)
        is_before = is_own & (tokens >= other)[:, None]
        weighed = k_other[None, :] * tl.exp(tl.where(is_before, total - left[None, :], 0.0))
        is_column = (tokens == other)[None, :] & (tokens >= other)[:, None]
        system = tl.where(is_column, tl.sum(k * weighed, 1)[:, None], system)
        share = tl.where(is_column, tl.sum(q * weighed, 1)[:, None], share)
    tl.store(systems[:, None] + (begin + tokens)[None, :], system, mask=live[:, None])
    tl.store(shares[:, None] + (begin + tokens)[None, :], share.to(COMPUTE), mask=live[:, None])


def find_system(
    rule: ChannelRule,
    inputs: DeltaInputs,
    chunks: StateChunks,
    made: torch.Tensor,
    total: torch.Tensor,
    shares: torch.Tensor,
    scale: float,
    sizes: dict[str, Any],
) -> torch.Tensor:
    """The system of chunk_kernel; what total and shares are for goes there."""
    grid = len(chunks.rows), sizes["NUM_HEADS"]
    system = torch.empty(shares.shape, dtype=torch.float32, device=shares.device)
    channel_total_kernel[grid](
        rule.gates,
        chunks.firsts,
        chunks.lens,
        inputs.decay_bias,
        inputs.decay_log,
        total,
        rule.gates.stride(0),
        rule.least,
        num_warps=4,
        **sizes,
    )
    channel_share_kernel[(*grid, STATE_CHUNK // _PART)](
        made,
        chunks.firsts,
        chunks.lens,
        total,
        system,
        shares,
        scale,
        PART=_PART,
        num_warps=4,
        **sizes,
    )
    return system
