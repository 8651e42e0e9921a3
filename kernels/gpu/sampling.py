"""sample_rows on CUDA: no sorting, and several programs a row.

Thresholds are searched by counting, or weighing, the tokens above several pivots at once (after Qrita, arXiv 2602.01518); then
one number is drawn by inverse CDF in token order. Where a row has several chunks, a program for each finds a narrow bracket for
each threshold first (sampling_bounds.py); what is left for the one program that draws are the tokens within it. A row with more
of these than are kept, and one with typical_p, is searched as a whole by that program. Both ways give the same token.

Filters are those of kernels/sampling.py, but weights are whole numbers made in float32 here (sampling_bounds.py): a draw within
a rounding error of the border between two tokens, or a token within one of a filter's border, can differ from the CPU's.
"""

import torch
import triton
import triton.language as tl

from .sampling_bounds import (
    MOST_CANDIDATES,
    find_bounds,
    finite_extremes,
    least_scaled,
    load_chunk,
    load_filters,
    row_extremes,
    row_factor,
    whole_weights,
)
from .sizes import cdiv, power_of_2

_CHUNK = 4096
_PIVOTS = 4
_FEWEST_CHUNKS = 3  # of a row that several programs search: fewer are read faster than four kernels are launched

COUNT: tl.constexpr = tl.constexpr(0)  # of logits
MASS: tl.constexpr = tl.constexpr(1)  # of logits
TYPICAL: tl.constexpr = tl.constexpr(2)  # mass of tokens by how close their surprise is to the mean


@triton.jit
def _is_kept(logits, scaled, threshold, least, closest, mean):
    """Tokens that top_k and top_p (threshold), min_p (least) and typical_p (closest) keep."""
    return (logits >= threshold) & (scaled >= least) & (-tl.abs(scaled - mean) >= closest)


@triton.jit
def _load_candidates(candidate_ptr, count_ptr, tile, num_chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr):
    """Candidates [CHUNK] of a row, as many of each of its chunks; -inf where there are no more."""
    SLOTS: tl.constexpr = CHUNK // CHUNKS
    places = tl.arange(0, CHUNK)
    chunks, slots = places // SLOTS, tile * SLOTS + places % SLOTS
    counts = tl.load(count_ptr + chunks, mask=chunks < num_chunks, other=0)
    return tl.load(candidate_ptr + chunks * MOST + slots, mask=slots < counts, other=float("-inf"))


@triton.jit
def _search(
    row_ptr,
    count_ptr,
    num_parts,
    vocab_size,
    most,
    factor,
    threshold,
    least,
    mean,
    low,
    above,
    beyond,
    target,
    KIND: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
):
    """The largest key for which the keys from it on count, or weigh, at least target; the smallest from low on if none.

    Keys are logits or, for TYPICAL, minus the distance of the surprise from its mean. They are those of the whole row, in
    num_parts chunks, or with count_ptr those of its candidates, in num_parts tiles: then only keys below `above` are taken, and
    the others are known to count, or weigh, `beyond`. Every pass shrinks [low, above), to between two pivots and to keys that
    occur; it is over when one key is left.
    """
    fractions = (tl.arange(0, PIVOTS) + 1).to(tl.float32) / PIVOTS
    top = above
    end = above
    while low < above:
        pivots = tl.minimum(tl.maximum(low * (1.0 - fractions) + top * fractions, low), top)
        sums = tl.zeros([PIVOTS], tl.int64) + beyond
        smallest, largest = tl.full([], float("inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
        for part in range(num_parts):
            if count_ptr is not None:
                keys = _load_candidates(row_ptr, count_ptr, part, vocab_size, CHUNKS, CHUNK, MOST)
                keys = tl.where(keys < end, keys, float("-inf"))
            else:
                keys = load_chunk(row_ptr, part, vocab_size, CHUNK)
            scaled = (keys - most) * factor
            if KIND == 0:
                weights = tl.full([CHUNK], 1, tl.int64)
            elif KIND == 1:
                weights = whole_weights(scaled, keys >= threshold)
            else:
                weights = whole_weights(scaled, (keys >= threshold) & (scaled >= least))
                keys = tl.where(weights > 0, -tl.abs(scaled - mean), float("-inf"))
            sums += tl.sum(tl.where(keys[None, :] >= pivots[:, None], weights[None, :], 0), 1)
            inside = (keys >= low) & (keys < above)
            smallest = tl.minimum(smallest, tl.min(tl.where(inside, keys, float("inf")), 0))
            largest = tl.maximum(largest, tl.max(tl.where(inside, keys, float("-inf")), 0))
        enough = sums >= target
        if smallest >= largest:  # one key is left, or, when there never was one, none
            low = tl.minimum(smallest, above)
            above = low
        else:
            low = tl.maximum(tl.max(tl.where(enough, pivots, low), 0), smallest)
            above = tl.min(tl.where(enough, above, pivots), 0)
            top = tl.minimum(largest, above)
    return low


@triton.jit
def _take_share(mass, share):
    """This share of a mass, rounded up."""
    return tl.ceil(share * mass.to(tl.float64)).to(tl.int64)


@triton.jit
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    typical_p_ptr,
    uniform_ptr,
    extremes_ptr,
    bracket_ptr,
    sums_ptr,
    count_ptr,
    candidate_ptr,
    token_ptr,
    row_stride,
    vocab_size,
    PIVOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
):
    """One row of logits: its token. Without extremes, and what else sampling_bounds finds, the row is searched as a whole."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    factor, least = row_factor(temperature_ptr, row), least_scaled(min_p_ptr, row)
    top_k, top_p_32 = load_filters(top_k_ptr, top_p_ptr, row, vocab_size)
    top_p = tl.load(top_p_ptr + row)
    typical_p = tl.load(typical_p_ptr + row)
    num_chunks = tl.cdiv(vocab_size, CHUNK)
    chunk_ids = tl.arange(0, CHUNKS)

    most, smallest = tl.full([], float("-inf"), tl.float32), tl.full([], float("inf"), tl.float32)
    is_narrow = typical_p < 0.0
    sums = tl.zeros([CHUNKS], tl.int64)
    threshold, closest, mean = smallest, tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    if extremes_ptr is not None:
        most, smallest = row_extremes(extremes_ptr, row, num_chunks, CHUNKS)
        threshold = smallest
        is_filtered = (top_k > 0) | (top_p_32 < 1.0)
        count_ptr += row * num_chunks
        live = chunk_ids < num_chunks
        fullest = tl.max(tl.load(count_ptr + chunk_ids, mask=live, other=0), 0)
        fullest = tl.where(is_filtered, fullest, 0)  # nothing was written for other rows
        is_narrow = (typical_p >= 1.0) & (fullest <= MOST)
        if is_narrow:
            found = sums_ptr + (row.to(tl.int64) * num_chunks + chunk_ids) * 4
            sums = tl.load(found + 3, mask=live, other=0)
            if is_filtered:
                candidate_ptr += row.to(tl.int64) * num_chunks * MOST
                num_tiles = tl.cdiv(fullest, CHUNK // CHUNKS)
                own = bracket_ptr + row * 6
                low_k, high_k, low_p, high_p = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
                highest = most + tl.maximum(tl.abs(most) * 1e-3, 1.0)
                kept_mass = tl.sum(tl.load(found + 1, mask=live, other=0), 0)
                if top_k > 0:
                    beyond = tl.sum(tl.load(found, mask=live, other=0), 0)
                    threshold = _search(
                        candidate_ptr, count_ptr, num_tiles, num_chunks, most, factor, 0.0, 0.0, 0.0, low_k,
                        tl.minimum(high_k, highest), beyond, top_k.to(tl.int64), COUNT, PIVOTS, CHUNKS, CHUNK, MOST,
                    )  # fmt: skip
                    for tile in range(num_tiles):
                        logits = _load_candidates(candidate_ptr, count_ptr, tile, num_chunks, CHUNKS, CHUNK, MOST)
                        kept = (logits >= threshold) & (logits < high_k)
                        kept_mass += tl.sum(whole_weights((logits - most) * factor, kept), 0)
                if top_p_32 < 1.0:
                    beyond = tl.sum(tl.load(found + 2, mask=live, other=0), 0)
                    threshold = _search(
                        candidate_ptr, count_ptr, num_tiles, num_chunks, most, factor, threshold, 0.0, 0.0,
                        tl.maximum(low_p, threshold), tl.minimum(high_p, highest), beyond, _take_share(kept_mass, top_p), MASS,
                        PIVOTS, CHUNKS, CHUNK, MOST,
                    )  # fmt: skip
                surely = tl.where(top_p_32 < 1.0, high_p, high_k)
                for tile in range(num_tiles):
                    logits = _load_candidates(candidate_ptr, count_ptr, tile, num_chunks, CHUNKS, CHUNK, MOST)
                    scaled = (logits - most) * factor
                    weights = whole_weights(scaled, (logits >= threshold) & (logits < surely) & (scaled >= least))
                    sums += tl.sum(tl.reshape(weights, [CHUNKS, CHUNK // CHUNKS]), 1)
    if not is_narrow:
        if extremes_ptr is None:
            for chunk in range(num_chunks):
                own_most, own_least = finite_extremes(load_chunk(row_ptr, chunk, vocab_size, CHUNK))
                most, smallest = tl.maximum(most, own_most), tl.minimum(smallest, own_least)
        above = most + tl.maximum(tl.abs(most) * 1e-3, 1.0)
        nothing = tl.zeros([], tl.int64)
        threshold = smallest
        if top_k > 0:
            threshold = _search(
                row_ptr, None, num_chunks, vocab_size, most, factor, 0.0, 0.0, 0.0, smallest, above, nothing,
                top_k.to(tl.int64), COUNT, PIVOTS, CHUNKS, CHUNK, MOST,
            )  # fmt: skip
        if top_p_32 < 1.0:
            mass = nothing
            for chunk in range(num_chunks):
                logits = load_chunk(row_ptr, chunk, vocab_size, CHUNK)
                mass += tl.sum(whole_weights((logits - most) * factor, logits >= threshold), 0)
            threshold = _search(
                row_ptr, None, num_chunks, vocab_size, most, factor, threshold, 0.0, 0.0, threshold, above, nothing,
                _take_share(mass, top_p), MASS, PIVOTS, CHUNKS, CHUNK, MOST,
            )  # fmt: skip
        if typical_p < 1.0:
            mass = nothing
            moment = tl.zeros([], tl.float64)
            for chunk in range(num_chunks):
                logits = load_chunk(row_ptr, chunk, vocab_size, CHUNK)
                scaled = (logits - most) * factor
                weights = whole_weights(scaled, _is_kept(logits, scaled, threshold, least, closest, mean))
                mass += tl.sum(weights, 0)
                moment += tl.sum(weights.to(tl.float64) * tl.where(weights > 0, scaled, 0.0).to(tl.float64), 0)
            # Surprise less its mean, the entropy, is the mean of the scaled logits less the scaled logit.
            mean = (moment / tl.maximum(mass, 1).to(tl.float64)).to(tl.float32)
            # Weights below 2 ** -150 are zero, so no key is less than -512.
            furthest, nearest = tl.full([], -512.0, tl.float32), tl.full([], 1.0, tl.float32)
            closest = _search(
                row_ptr, None, num_chunks, vocab_size, most, factor, threshold, least, mean, furthest, nearest, nothing,
                _take_share(mass, typical_p), TYPICAL, PIVOTS, CHUNKS, CHUNK, MOST,
            )  # fmt: skip
        for chunk in range(num_chunks):
            logits = load_chunk(row_ptr, chunk, vocab_size, CHUNK)
            scaled = (logits - most) * factor
            weights = whole_weights(scaled, _is_kept(logits, scaled, threshold, least, closest, mean))
            sums = tl.where(chunk_ids == chunk, tl.sum(weights, 0), sums)

    # The chunk, then the token, where the running sum first exceeds its share.
    total = tl.sum(sums, 0)
    share = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    picked = tl.minimum(tl.sum((tl.cumsum(sums, 0) <= share).to(tl.int32), 0), num_chunks - 1)
    share -= tl.sum(tl.where(chunk_ids < picked, sums, 0), 0)
    logits = load_chunk(row_ptr, picked, vocab_size, CHUNK)
    scaled = (logits - most) * factor
    weights = whole_weights(scaled, _is_kept(logits, scaled, threshold, least, closest, mean))
    places = tl.arange(0, CHUNK)
    beyond = (tl.cumsum(weights, 0) > share) & (weights > 0)
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
    num_chunks = cdiv(vocab_size, _CHUNK)
    padded = power_of_2(num_chunks)
    found: tuple[torch.Tensor | None, ...] = (None,) * 5
    if _FEWEST_CHUNKS <= num_chunks <= _CHUNK:
        found = find_bounds(logits, (temperature, top_k, top_p, min_p), num_chunks, padded, _CHUNK)
    sample_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        typical_p,
        uniforms,
        *found,
        tokens,
        logits.stride(0),
        vocab_size,
        PIVOTS=_PIVOTS,
        CHUNKS=padded,
        CHUNK=_CHUNK,
        MOST=MOST_CANDIDATES,
        num_warps=16,
    )
    return tokens
