"""Where in a row the thresholds of top_k and top_p lie, found by many programs: one for each chunk of the row.

A chunk's program counts and weighs the tokens from several pivots on, and the next launch's programs add up what all chunks
of the row have found. Two such rounds leave a narrow bracket for each threshold. Then the tokens within the brackets are
collected, those above them counted and weighed, and one program a row (sampling.py) has little left to do. So few rows fill the
device as many do; and each pass reads the row once, at the speed of memory.

Sums of a round are float32: a bracket is wide enough for their errors. What is counted above the brackets is exact.
"""

import torch
import triton
import triton.language as tl

from .sizes import aligned


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


PIVOTS = 8
MOST_CANDIDATES = 512  # of a chunk: more of them are not collected, and the row is searched as a whole
BRACKET = 6  # numbers
SUMS = 4  # of a chunk


@triton.jit(do_not_specialize=["num_chunks"])
def extremes_kernel(logits_ptr, extremes_ptr, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr):
    """One chunk: its largest and smallest finite logit, to extremes [R, num_chunks, 2]."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    most, least = finite_extremes(load_chunk(logits_ptr + row.to(tl.int64) * row_stride, chunk, vocab_size, CHUNK))
    place = (row * num_chunks + chunk) * 2
    tl.store(extremes_ptr + place, most)
    tl.store(extremes_ptr + place + 1, least)


@triton.jit
def row_extremes(extremes_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """The largest and the smallest finite logit of a row, from extremes_kernel."""
    chunks = tl.arange(0, CHUNKS)
    places = (row * num_chunks + chunks) * 2
    mosts = tl.load(extremes_ptr + places, mask=chunks < num_chunks, other=float("-inf"))
    leasts = tl.load(extremes_ptr + places + 1, mask=chunks < num_chunks, other=float("inf"))
    return tl.max(mosts, 0), tl.min(leasts, 0)


@triton.jit
def _pivots(low, high, most, factor, FIRST_ROUND: tl.constexpr, PIVOTS: tl.constexpr):
    """Pivots [PIVOTS] from below high down to low, the last one low itself.

    In the first round high is the largest logit and low the smallest: they lie closer where logits are large, and but the last
    one where tokens have a weight.
    """
    steps = tl.arange(0, PIVOTS)
    shares, floor = (steps + 1).to(tl.float32) / PIVOTS, low
    if FIRST_ROUND:
        shares, floor = shares * shares, tl.maximum(low, most - 64.0 / factor)  # what lies deeper weighs nothing
    pivots = tl.minimum(high, most) * (1.0 - shares) + floor * shares
    return tl.where(steps == PIVOTS - 1, low, tl.maximum(pivots, low))


@triton.jit
def _add_up(partial_ptr, row, num_chunks, FIGURE: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr):
    """One figure [PIVOTS] of the row's tokens from each pivot on, as all chunks have found it."""
    chunks, pivots = tl.arange(0, CHUNKS), tl.arange(0, PIVOTS)
    places = ((row * num_chunks + chunks) * 3 + FIGURE)[:, None] * PIVOTS + pivots[None, :]
    return tl.sum(tl.load(partial_ptr + places, mask=(chunks < num_chunks)[:, None], other=0.0), 0)


@triton.jit
def sharper_bracket(
    bracket_ptr,
    partial_ptr,
    row,
    num_chunks,
    most,
    smallest,
    factor,
    top_k,
    top_p,
    ROUND: tl.constexpr,
    CHUNKS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """What is known after ROUND rounds, of which the last one's bracket is not written yet.

    The threshold of top_k is in [low_k, high_k), that of top_p in [low_p, high_p); without the filter the bracket is empty. The
    tokens that top_k keeps weigh from least_mass to most_mass.
    """
    unknown = tl.full([], float("inf"), tl.float32)
    if ROUND <= 1:
        low_k, low_p = smallest, smallest
        high_k, high_p = tl.where(top_k > 0, unknown, smallest), tl.where(top_p < 1.0, unknown, smallest)
        most_mass, least_mass = unknown, tl.zeros([], tl.float32)
    else:
        own = bracket_ptr + row * 6
        low_k, high_k, low_p, high_p = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
        most_mass, least_mass = tl.load(own + 4), tl.load(own + 5)
    if ROUND > 0:
        if top_k > 0:
            pivots = _pivots(low_k, high_k, most, factor, ROUND == 1, PIVOTS)
            masses = _add_up(partial_ptr, row, num_chunks, 1, CHUNKS, PIVOTS)
            enough = _add_up(partial_ptr, row, num_chunks, 0, CHUNKS, PIVOTS) >= top_k
            low_k = tl.max(tl.where(enough, pivots, low_k), 0)
            high_k = tl.min(tl.where(enough, high_k, pivots), 0)
            most_mass = tl.min(tl.where(enough, masses, most_mass), 0)
            least_mass = tl.max(tl.where(enough, least_mass, masses), 0)
        if top_p < 1.0:
            pivots = _pivots(low_p, high_p, most, factor, ROUND == 1, PIVOTS)
            masses = _add_up(partial_ptr, row, num_chunks, 2, CHUNKS, PIVOTS)
            if ROUND == 1 and top_k <= 0:  # all tokens, from the last pivot on
                most_mass = tl.max(masses, 0)
                least_mass = most_mass
            # Float32 sums err by some 1e-6 of their value, each.
            enough = masses >= top_p * most_mass * (1.0 + 2e-5)
            too_few = masses < top_p * least_mass * (1.0 - 2e-5)
            low_p = tl.max(tl.where(enough, pivots, low_p), 0)
            high_p = tl.min(tl.where(too_few, pivots, high_p), 0)
    return low_k, high_k, low_p, high_p, most_mass, least_mass


@triton.jit
def _store_bracket(bracket_ptr, row, low_k, high_k, low_p, high_p, most_mass, least_mass):
    own = bracket_ptr + row * 6
    tl.store(own, low_k)
    tl.store(own + 1, high_k)
    tl.store(own + 2, low_p)
    tl.store(own + 3, high_p)
    tl.store(own + 4, most_mass)
    tl.store(own + 5, least_mass)


@triton.jit
def load_filters(top_k_ptr, top_p_ptr, row, vocab_size):
    """top_k, 0 where it keeps all; top_p."""
    top_k = tl.load(top_k_ptr + row)
    return tl.where(top_k < vocab_size, top_k, 0).to(tl.float32), tl.load(top_p_ptr + row).to(tl.float32)


@triton.jit(do_not_specialize=["num_chunks"])
def narrow_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    extremes_ptr,
    before_ptr,
    partial_before_ptr,
    bracket_ptr,
    partial_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    ROUND: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk in one round, the first one 1: numbers and weights of its tokens from each pivot on.

    To partial [R, num_chunks, 3, PIVOTS]: number and weight for top_k, weight for top_p. bracket [R, BRACKET] becomes what is
    known before.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    top_k, top_p = load_filters(top_k_ptr, top_p_ptr, row, vocab_size)
    if (top_k <= 0) & (top_p >= 1.0):
        return
    factor = row_factor(temperature_ptr, row)
    most, smallest = row_extremes(extremes_ptr, row, num_chunks, CHUNKS)
    low_k, high_k, low_p, high_p, most_mass, least_mass = sharper_bracket(
        before_ptr, partial_before_ptr, row, num_chunks, most, smallest, factor, top_k, top_p, ROUND - 1, CHUNKS, PIVOTS
    )
    if ROUND > 1:  # noqa: SIM102  # known when the kernel is compiled; the next one is not
        if chunk == 0:
            _store_bracket(bracket_ptr, row, low_k, high_k, low_p, high_p, most_mass, least_mass)
    logits = load_chunk(logits_ptr + row.to(tl.int64) * row_stride, chunk, vocab_size, CHUNK)
    weights = tl.exp2((logits - most) * factor)
    own = partial_ptr + (row * num_chunks + chunk) * 3 * PIVOTS
    steps = tl.arange(0, PIVOTS)
    if top_k > 0:
        pivots = _pivots(low_k, high_k, most, factor, ROUND == 1, PIVOTS)
        for step in tl.static_range(PIVOTS):
            above = logits >= tl.sum(tl.where(steps == step, pivots, 0.0), 0)
            tl.store(own + step, tl.sum(above.to(tl.float32), 0))
            tl.store(own + PIVOTS + step, tl.sum(tl.where(above, weights, 0.0), 0))
    if top_p < 1.0:
        pivots = _pivots(low_p, high_p, most, factor, ROUND == 1, PIVOTS)
        for step in tl.static_range(PIVOTS):
            above = logits >= tl.sum(tl.where(steps == step, pivots, 0.0), 0)
            tl.store(own + 2 * PIVOTS + step, tl.sum(tl.where(above, weights, 0.0), 0))


@triton.jit(do_not_specialize=["num_chunks"])
def collect_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    extremes_ptr,
    before_ptr,
    partial_ptr,
    bracket_ptr,
    sums_ptr,
    count_ptr,
    candidate_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    ROUND: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
):
    """One chunk, after ROUND rounds: its tokens within the brackets, and exactly what lies above them.

    To count [R, num_chunks] and candidate [R, num_chunks, MOST], their logits; and to sums, int64 [R, num_chunks, SUMS]: number
    and weight of tokens from high_k on, the weight from high_p on, and the weight of what is surely kept, of min_p too.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    top_k, top_p = load_filters(top_k_ptr, top_p_ptr, row, vocab_size)
    factor, least = row_factor(temperature_ptr, row), least_scaled(min_p_ptr, row)
    most, smallest = row_extremes(extremes_ptr, row, num_chunks, CHUNKS)
    logits = load_chunk(logits_ptr + row.to(tl.int64) * row_stride, chunk, vocab_size, CHUNK)
    scaled = (logits - most) * factor
    weights = whole_weights(scaled, logits > float("-inf"))
    place, surely = row * num_chunks + chunk, smallest
    sums = sums_ptr + place.to(tl.int64) * 4
    if (top_k > 0) | (top_p < 1.0):
        low_k, high_k, low_p, high_p, most_mass, least_mass = sharper_bracket(
            before_ptr, partial_ptr, row, num_chunks, most, smallest, factor, top_k, top_p, ROUND, CHUNKS, PIVOTS
        )
        if chunk == 0:
            _store_bracket(bracket_ptr, row, low_k, high_k, low_p, high_p, most_mass, least_mass)
        surely = tl.where(top_p < 1.0, high_p, high_k)
        tl.store(sums, tl.sum((logits >= high_k).to(tl.int64), 0))
        tl.store(sums + 1, tl.sum(tl.where(logits >= high_k, weights, 0), 0))
        tl.store(sums + 2, tl.sum(tl.where(logits >= high_p, weights, 0), 0))
        inside = ((logits >= low_k) & (logits < high_k)) | ((logits >= low_p) & (logits < high_p))
        slots = tl.cumsum(inside.to(tl.int32), 0) - 1
        candidates = candidate_ptr + place.to(tl.int64) * MOST
        tl.store(candidates + slots, logits, mask=inside & (slots < MOST))
        tl.store(count_ptr + place, tl.sum(inside.to(tl.int32), 0))
    tl.store(sums + 3, tl.sum(tl.where((logits >= surely) & (scaled >= least), weights, 0), 0))


def find_bounds(
    logits: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    num_chunks: int,
    padded_chunks: int,
    chunk: int,
) -> tuple[torch.Tensor, ...]:
    """Extremes, brackets, sums, counts and candidates of the rows; columns are temperature, top_k, top_p and min_p.

    padded_chunks: num_chunks, rounded up to a power of two.
    """
    num_rows, vocab_size = logits.shape
    cells, partials = num_rows * num_chunks, num_rows * num_chunks * 3 * PIVOTS
    brackets = aligned(BRACKET * num_rows)
    sizes = [aligned(2 * cells), partials, partials, brackets, brackets, MOST_CANDIDATES * cells]
    memory = torch.empty(sum(sizes), dtype=torch.float32, device=logits.device)
    extremes, partial, partial_2, bracket, bracket_2, candidates = memory.split(sizes)
    sums = torch.empty(SUMS * cells, dtype=torch.int64, device=logits.device)
    counts = torch.empty(cells, dtype=torch.int32, device=logits.device)
    temperature, top_k, top_p, min_p = columns
    grid, stride = (num_rows, num_chunks), logits.stride(0)
    common = {"CHUNK": chunk, "num_warps": 8}
    known = {"PIVOTS": PIVOTS, "CHUNKS": padded_chunks, **common}
    extremes_kernel[grid](logits, extremes, stride, vocab_size, num_chunks, **common)
    filters = (logits, temperature, top_k, top_p)
    shape = (stride, vocab_size, num_chunks)
    narrow_kernel[grid](*filters, extremes, None, None, None, partial, *shape, ROUND=1, **known)
    narrow_kernel[grid](*filters, extremes, None, partial, bracket, partial_2, *shape, ROUND=2, **known)
    collected = (extremes, bracket, partial_2, bracket_2, sums, counts, candidates)
    collect_kernel[grid](*filters, min_p, *collected, *shape, ROUND=2, MOST=MOST_CANDIDATES, **known)
    return extremes, bracket_2, sums, counts, candidates
