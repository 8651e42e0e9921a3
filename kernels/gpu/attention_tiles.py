"""Common to both attention kernels: one pass over tiles of cached keys and values, with a running softmax in base 2."""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
NO_WINDOW = 1 << 30  # keys; larger than any sequence, so that one kernel serves both cases
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # start of a running maximum: finite, so that nothing is -inf minus -inf

COMPUTE_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword arguments of both ops, see kernels.attention.paged_attention_decode."""

    scale: float
    window: int | None
    soft_cap: float | None
    retention: tuple[torch.Tensor, torch.Tensor] | None
    q_sink: torch.Tensor | None
    sink_logits: torch.Tensor | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """Before and after the bend towards the cap, base 2: scores are q.k * first, or tanh(q.k * first) * second."""
        if self.soft_cap is None:
            return self.scale * LOG2_E, 1.0
        return self.scale / self.soft_cap, self.soft_cap * LOG2_E


def dense_heads(q: torch.Tensor) -> torch.Tensor:
    """q [T, H, D] with the heads of a token contiguous, as they are in a slice of a fused projection."""
    return q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()


@triton.jit
def begin_rows(logit_ptr, heads, live, is_first, M: tl.constexpr):
    """The highest score [M] and the sum [M] before any tile: those of a key without a value, where there is one.

    is_first: whether this program takes it; of several programs of one query, one does.
    """
    most = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    if logit_ptr is not None:
        takes = live & is_first
        most = tl.where(takes, tl.load(logit_ptr + heads, mask=live, other=0.0) * 1.4426950408889634, most)
        total = tl.where(takes, 1.0, total)
    return most, total


@triton.jit
def tile_scores(q, k, scale, cap, HAS_CAP: tl.constexpr):
    """Scores [M, T] in base 2 of q [M, D] and k [T, D]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:  # tanh by exp2, which the hardware has; right at both ends, where exp2 is 0 or inf
        scores = (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0)) * cap
    return scores


@triton.jit
def take_tile(acc, most, total, scores, v, COMPUTE: tl.constexpr):
    """Take scores [M, T], -inf for hidden keys, and v [T, D] into the running softmax."""
    new_most = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - new_most[:, None])
    decay = tl.exp2(most - new_most)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(COMPUTE), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_most, total


@triton.jit
def slot_offsets(table_ptr, tile, num_tokens, block_stride, T: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOT_LEN: tl.constexpr):
    """Token positions [T] of a tile, and the 64-bit offsets of their keys. Table entries from num_tokens on are not read.

    A tile that lies in one block looks its block up once.
    """
    tokens = tile * T + tl.arange(0, T)
    if T <= BLOCK_SIZE:
        block = tl.load(table_ptr + tile * T // BLOCK_SIZE).to(tl.int64)
        offsets = block * block_stride + (tile * T % BLOCK_SIZE + tl.arange(0, T)) * SLOT_LEN
    else:
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < num_tokens, other=0).to(tl.int64)
        offsets = blocks * block_stride + tokens % BLOCK_SIZE * SLOT_LEN
    return tokens, offsets
