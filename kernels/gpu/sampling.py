"""sample_rows on CUDA: one program a row, no sorting.

Thresholds are searched by counting, or weighing, the tokens above several pivots at once (after Qrita, arXiv 2602.01518); then
one number is drawn by inverse CDF in token order.

Filters are those of sampling.py, but weights are float32 here: a draw within a rounding error of the border between two tokens,
or a token within one of a filter's border, can differ from the CPU's. The sums of weights are float64 and taken in one fixed
order, so a row's token never depends on the rows beside it.
"""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, power_of_2

_CHUNK = 4096
_PIVOTS = 4

COUNT: tl.constexpr = tl.constexpr(0)  # of logits
MASS: tl.constexpr = tl.constexpr(1)  # of logits
TYPICAL: tl.constexpr = tl.constexpr(2)  # mass of tokens by how close their surprise is to the mean


@triton.jit
def _load_chunk(row_ptr, chunk, vocab_size, most, factor, CHUNK: tl.constexpr):
    """Logits [CHUNK], and how far they lie below the largest, as powers of two of the weight; -inf beyond the vocabulary."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return logits, (logits - most) * factor


@triton.jit
def _kept_weights(logits, scaled, threshold, least, closest, mean):
    """Weights, 0 for tokens that top_k and top_p (threshold), min_p (least) and typical_p (closest) drop."""
    kept = (logits >= threshold) & (scaled >= least) & (-tl.abs(scaled - mean) >= closest)
    return tl.where(kept, tl.exp2(scaled), 0.0)


@triton.jit
def _search(
    row_ptr,
    vocab_size,
    most,
    factor,
    threshold,
    least,
    mean,
    low,
    above,
    target,
    KIND: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest key for which the keys from it on count, or weigh, at least target; the smallest from low on if none.

    Keys are logits or, for TYPICAL, minus the distance of the surprise from its mean. Every pass shrinks [low, above), to
    between two pivots and to keys that occur; it is over when one key is left.
    """
    fractions = (tl.arange(0, PIVOTS) + 1).to(tl.float32) / PIVOTS
    top = above
    while low < above:
        pivots = tl.minimum(tl.maximum(low * (1.0 - fractions) + top * fractions, low), top)
        sums = tl.zeros([PIVOTS, CHUNK], tl.float32)
        least_key = tl.full([CHUNK], float("inf"), tl.float32)
        most_key = tl.full([CHUNK], float("-inf"), tl.float32)
        for chunk in range(tl.cdiv(vocab_size, CHUNK)):
            keys, scaled = _load_chunk(row_ptr, chunk, vocab_size, most, factor, CHUNK)
            if KIND == 0:
                weights = tl.full([CHUNK], 1.0, tl.float32)
            elif KIND == 1:
                weights = tl.exp2(scaled)
            else:
                weights = _kept_weights(keys, scaled, threshold, least, float("-inf"), mean)
                keys = tl.where(weights > 0, -tl.abs(scaled - mean), float("-inf"))
            sums += tl.where(keys[None, :] >= pivots[:, None], weights[None, :], 0.0)
            inside = (keys >= low) & (keys < above)
            least_key = tl.minimum(least_key, tl.where(inside, keys, float("inf")))
            most_key = tl.maximum(most_key, tl.where(inside, keys, float("-inf")))
        enough = tl.sum(sums, 1) >= target
        smallest, largest = tl.min(least_key, 0), tl.max(most_key, 0)
        if smallest >= largest:  # one key is left, or, when there never was one, none
            low = tl.minimum(smallest, above)
            above = low
        else:
            low = tl.maximum(tl.max(tl.where(enough, pivots, low), 0), smallest)
            above = tl.min(tl.where(enough, above, pivots), 0)
            top = tl.minimum(largest, above)
    return low


@triton.jit
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    typical_p_ptr,
    uniform_ptr,
    token_ptr,
    row_stride,
    vocab_size,
    PIVOTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row of logits: its token."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    factor = (1.4426950408889634 / tl.load(temperature_ptr + row)).to(tl.float32)
    top_k = tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row).to(tl.float32), tl.load(min_p_ptr + row).to(tl.float32)
    typical_p = tl.load(typical_p_ptr + row).to(tl.float32)
    num_chunks = tl.cdiv(vocab_size, CHUNK)

    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    lowest = tl.full([CHUNK], float("inf"), tl.float32)
    for chunk in range(num_chunks):
        logits, _ = _load_chunk(row_ptr, chunk, vocab_size, 0.0, 1.0, CHUNK)
        highest = tl.maximum(highest, logits)
        lowest = tl.minimum(lowest, tl.where(logits > float("-inf"), logits, float("inf")))
    most, smallest = tl.max(highest, 0), tl.min(lowest, 0)
    above = most + tl.maximum(tl.abs(most) * 1e-3, 1.0)
    threshold = smallest
    if (top_k > 0) & (top_k < vocab_size):
        target = top_k.to(tl.float32)
        threshold = _search(row_ptr, vocab_size, most, factor, 0.0, 0.0, 0.0, smallest, above, target, COUNT, PIVOTS, CHUNK)
    if top_p < 1.0:
        mass = tl.zeros([CHUNK], tl.float32)
        for chunk in range(num_chunks):
            logits, scaled = _load_chunk(row_ptr, chunk, vocab_size, most, factor, CHUNK)
            mass += tl.where(logits >= threshold, tl.exp2(scaled), 0.0)
        target = top_p * tl.sum(mass, 0)
        threshold = _search(row_ptr, vocab_size, most, factor, 0.0, 0.0, 0.0, threshold, above, target, MASS, PIVOTS, CHUNK)
    least = tl.where(min_p > 0, tl.log2(tl.maximum(min_p, 1e-30)), float("-inf"))
    closest, mean = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    if typical_p < 1.0:
        mass = tl.zeros([CHUNK], tl.float32)
        moment = tl.zeros([CHUNK], tl.float32)
        for chunk in range(num_chunks):
            logits, scaled = _load_chunk(row_ptr, chunk, vocab_size, most, factor, CHUNK)
            weights = _kept_weights(logits, scaled, threshold, least, closest, mean)
            mass += weights
            moment += weights * tl.where(weights > 0, scaled, 0.0)
        total_mass = tl.sum(mass, 0)
        # Surprise less its mean, the entropy, is the mean of the scaled logits less the scaled logit.
        mean = tl.sum(moment, 0) / total_mass
        target = typical_p * total_mass
        # Weights below 2 ** -150 are zero, so no key is less than -512.
        furthest, nearest = tl.full([], -512.0, tl.float32), tl.full([], 1.0, tl.float32)
        closest = _search(
            row_ptr, vocab_size, most, factor, threshold, least, mean, furthest, nearest, target, TYPICAL, PIVOTS, CHUNK
        )

    chunk_ids = tl.arange(0, NUM_CHUNKS)
    sums = tl.zeros([NUM_CHUNKS], tl.float64)
    for chunk in range(num_chunks):
        logits, scaled = _load_chunk(row_ptr, chunk, vocab_size, most, factor, CHUNK)
        weights = _kept_weights(logits, scaled, threshold, least, closest, mean)
        sums = tl.where(chunk_ids == chunk, tl.sum(weights.to(tl.float64), 0), sums)
    # The chunk, then the token, where the running sum first exceeds its share. Rounding can leave none: then the last.
    share = tl.load(uniform_ptr + row) * tl.sum(sums, 0)
    num_passed = tl.sum((tl.cumsum(sums, 0) <= share).to(tl.int32), 0)
    picked = tl.minimum(num_passed, tl.max(tl.where(sums > 0, chunk_ids, 0), 0))
    share -= tl.sum(tl.where(chunk_ids < picked, sums, 0.0), 0)
    logits, scaled = _load_chunk(row_ptr, picked, vocab_size, most, factor, CHUNK)
    weights = _kept_weights(logits, scaled, threshold, least, closest, mean)
    places = tl.arange(0, CHUNK)
    beyond = (tl.cumsum(weights.to(tl.float64), 0) > share) & (weights > 0)
    first = tl.min(tl.where(beyond, places, CHUNK), 0)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    tl.store(token_ptr + row, (picked * CHUNK + tl.minimum(first, last)).to(tl.int64))


def sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """The CUDA path of kernels.sampling, with the parameters of its SamplingTensors, contiguous."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    sample_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        typical_p,
        uniforms,
        tokens,
        logits.stride(0),
        vocab_size,
        PIVOTS=_PIVOTS,
        NUM_CHUNKS=power_of_2(cdiv(vocab_size, _CHUNK)),
        CHUNK=_CHUNK,
        num_warps=16,
    )
    return tokens
