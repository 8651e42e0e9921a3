"""Attention of some queries of one KV head to a tile of keys, compiled: what is the same for keys and values of any format.

A thread's memory for some queries is one array of float32, which cut_memory cuts: scores [TILE, padded queries], values [TILE,
padded size], sums [queries, padded size], the queries turned, and the highest score, total and factor of each query. Queries
are the columns and keys the rows of a product, so that keys are read where they are, and a query's sums do not depend on the
queries beside it: see tiles.py and softmax.py.
"""

from typing import Final

import numpy as np

from .kernel_parts import exp, floats_at, helper
from .softmax import soften_column
from .tiles import FLOAT32, LANES, make_multiply

TILE: Final = 64  # keys of one pass
MOST_QUERIES: Final = 64  # of one pass
SEE_ALL: Final = (0, 1, 0)  # of queries that see all keys that they are given
_NOT_SEEN: Final = np.float32(-1e30)  # a score without weight, beside any that has one
_multiply_values = make_multiply(FLOAT32)


@helper
def pad(count):
    return (count + LANES - 1) // LANES * LANES


@helper
def find_memory(num_queries, size):
    """Floats that a thread needs for at most so many queries of so many elements."""
    queries, elements = pad(num_queries), pad(size)
    return TILE * (queries + elements) + num_queries * elements + queries * (size + 3)


@helper
def cut_memory(at, num_queries, size):
    """Addresses of scores, values, sums, turned queries, and states."""
    queries, elements = pad(num_queries), pad(size)
    values_at = at + TILE * queries * 4
    sums_at = values_at + TILE * elements * 4
    turned_at = sums_at + num_queries * elements * 4
    return at, values_at, sums_at, turned_at, turned_at + queries * size * 4


@helper
def begin_queries(memory, num_queries, size):
    """Queries that have seen no key."""
    queries, elements = pad(num_queries), pad(size)
    sums, states = floats_at(memory[2], num_queries * elements), floats_at(memory[4], 3 * queries)
    for i in range(num_queries * elements):
        sums[i] = np.float32(0)
    for i in range(queries):
        states[i], states[queries + i] = np.float32(-np.inf), np.float32(0)


@helper
def begin_with(memory, num_queries, first, last, logits_at):
    """Let queries [first, last) begin with a key that has a score and no value."""
    states, logits = floats_at(memory[4], 2 * pad(num_queries)), floats_at(logits_at, last - first)
    for query in range(first, last):
        states[query], states[pad(num_queries) + query] = logits[query - first], np.float32(1)


@helper
def take_over(memory, num_queries, shared, num_shared, first, size):
    """Let queries go on from where those of another memory, from `first` on, have got to."""
    elements = pad(size)
    sums, others = (
        floats_at(memory[2], num_queries * elements),
        floats_at(shared[2] + first * elements * 4, num_queries * elements),
    )
    for i in range(num_queries * elements):
        sums[i] = others[i]
    states, theirs = floats_at(memory[4], 2 * pad(num_queries)), floats_at(shared[4], 2 * pad(num_shared))
    for query in range(num_queries):
        states[query], states[pad(num_queries) + query] = theirs[first + query], theirs[pad(num_shared) + first + query]


@helper
def _tanh(x):
    """Small ones from a series: in the quotient most of their digits would be lost."""
    square = x * x
    series = np.float32(62 / 2835) * square - np.float32(17 / 315)
    series = (series * square + np.float32(2 / 15)) * square - np.float32(1 / 3)
    small = x + x * square * series
    large = np.float32(1) - np.float32(2) / (exp(np.float32(2) * x) + np.float32(1))
    return small if square < np.float32(1 / 16) else large


@helper
def _bend(scores, factor, cap):
    for i in range(len(scores)):
        scores[i] = cap * _tanh(scores[i] * factor)


@helper
def _hide(scores, first, count, queries, num_queries, position, group, window):
    """Take weight from keys that a query does not see; query q is at position + q // group, and sees `window` keys."""
    for query in range(num_queries):
        own = position + query // group
        for key in range(count):
            if first + key > own or first + key <= own - window:
                scores[key * queries + query] = _NOT_SEEN


@helper
def turn_query(memory, num_queries, place, q_at, size):
    """Write a query of float32 into column `place` of the turned ones, [size, padded queries]."""
    queries, q = pad(num_queries), floats_at(q_at, size)
    turned = floats_at(memory[3], queries * size)
    for i in range(size):
        turned[i * queries + place] = q[i]


@helper
def attend_tile(memory, num_queries, size, begin, count, scale, cap, seen):
    """Go on with `count` keys from `begin` on, whose scores and values are there.

    seen: of queries that do not see all of them the first one's position, queries of a position and window; a window of 0 says
    that all see all.
    """
    position, group, window = seen
    queries, elements = pad(num_queries), pad(size)
    scores_at, values_at, sums_at, _, highest_at = memory
    totals_at, factors_at = highest_at + queries * 4, highest_at + queries * 8
    scores, factors, own_scale = floats_at(scores_at, count * queries), floats_at(factors_at, queries), scale
    if cap > 0:
        _bend(scores, scale / cap, cap)
        own_scale = np.float32(1)
    if window > 0 and (begin + count > position + 1 or begin <= position + (num_queries - 1) // group - window):
        _hide(scores, begin, count, queries, num_queries, position, group, window)
    for lane in range(0, queries * 4, LANES * 4):
        of_lane = highest_at + lane, totals_at + lane, factors_at + lane
        soften_column(scores_at + lane, count, queries * 4, of_lane[0], of_lane[1], of_lane[2], own_scale)
    for query in range(num_queries):
        factor = factors[query]
        if factor != np.float32(1):
            sums = floats_at(sums_at + query * elements * 4, elements)
            for i in range(elements):
                sums[i] *= factor
    row_bytes, of_key = elements * 4, queries * 4
    _multiply_values(sums_at, row_bytes, scores_at, 4, of_key, values_at, row_bytes, count, num_queries, elements, 1)


@helper
def end_query(memory, num_queries, query, size):
    """What a query has attended to, float32 [size]."""
    queries, elements = pad(num_queries), pad(size)
    sums, totals = floats_at(memory[2] + query * elements * 4, size), floats_at(memory[4] + queries * 4, queries)
    factor = np.float32(1) / totals[query]
    for i in range(size):
        sums[i] *= factor
    return sums
