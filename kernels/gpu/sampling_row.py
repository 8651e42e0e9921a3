"""What all kernels of sample_rows know of a row: its parameters, and what its tokens weigh.

Weights are whole numbers, of 2 ** -40 of the largest one's. So their sums are exact in any order, and a row's token does not
depend on how many programs have added up its weights. A token of less than that weighs one, so that it can be drawn.
"""

import triton
import triton.language as tl


@triton.jit
def row_factor(temperature_ptr, row):
    """What turns a difference of logits into one of powers of two."""
    return (1.4426950408889634 / tl.load(temperature_ptr + row)).to(tl.float32)


@triton.jit
def least_scaled(min_p_ptr, row):
    """The least scaled logit that min_p keeps."""
    min_p = tl.load(min_p_ptr + row).to(tl.float32)
    return tl.where(min_p > 0, tl.log2(tl.maximum(min_p, 1e-30)), float("-inf"))


@triton.jit
def load_chunk(row_ptr, chunk, vocab_size, CHUNK: tl.constexpr):
    """Logits [CHUNK]; -inf beyond the vocabulary."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))


@triton.jit
def whole_weights(scaled, kept):
    """Weights of scaled logits, 0 or less, as whole numbers; 0 for those that are not kept, and for what is not a number."""
    # 2 ** 40: the sum of 2 ** 22 tokens of the largest weight stays below 2 ** 63.
    weights = tl.ceil(tl.exp2(tl.minimum(scaled, 0.0)) * 1099511627776.0)
    is_number = scaled == scaled
    return tl.where(kept & is_number, weights, 0.0).to(tl.int64)


@triton.jit
def finite_extremes(logits):
    """The largest logit, and the smallest that is not -inf."""
    return tl.max(logits, 0), tl.min(tl.where(logits > float("-inf"), logits, float("inf")), 0)
