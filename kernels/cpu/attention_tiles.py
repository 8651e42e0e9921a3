"""Attention of some queries of one KV head to a tile of keys, compiled: what is the same for keys and values of any format.

A thread has memory in common for all heads: scores [queries, TILE], and lists of addresses of a tile's keys and values. Of the
queries of each head it has sums [queries, padded size] and states [2, queries], which are the highest score so far and the
total of the weights (online softmax, Milakov and Gimelshein, arXiv 1805.02867).
"""

from typing import Final

import numpy as np
from numba import njit

from .kernel_parts import exp, floats_at, helper
from .tiles import LANES

TILE: Final = 64  # keys of one pass
MOST_QUERIES: Final = 64  # of one pass
SEE_ALL: Final = (np.int64(0), np.int64(1), np.int64(0))  # of queries that see all keys that they are given
_NOT_SEEN: Final = np.float32(-1e30)  # a score without weight, beside any that has one


@helper
def pad(count):
    """So many in whole vectors."""
    return (count + LANES - 1) // LANES * LANES


@helper
def count_own(num_queries, size):
    """Floats of the queries of one head."""
    return num_queries * (pad(size) + 2)


@helper
def begin_queries(own_at, num_queries, size, group, logits_at):
    """Queries that have seen no key. logits_at: of each of a group the score of a key without a value; 0: there is none."""
    sums, states = floats_at(own_at, num_queries * pad(size)), floats_at(own_at + num_queries * pad(size) * 4, 2 * num_queries)
    for i in range(num_queries * pad(size)):
        sums[i] = np.float32(0)
    logits = floats_at(logits_at, group)
    for query in range(num_queries):
        states[query], states[num_queries + query] = np.float32(-np.inf), np.float32(0)
        if logits_at != 0:
            states[query], states[num_queries + query] = logits[query % group], np.float32(1)


@helper
def take_over(own_at, num_queries, shared_at, num_shared, first, size):
    """Let queries go on from where those of another memory, from `first` on, have got to."""
    length = pad(size)
    sums, others = floats_at(own_at, num_queries * length), floats_at(shared_at + first * length * 4, num_queries * length)
    for i in range(num_queries * length):
        sums[i] = others[i]
    states = floats_at(own_at + num_queries * length * 4, 2 * num_queries)
    theirs = floats_at(shared_at + num_shared * length * 4, 2 * num_shared)
    for query in range(num_queries):
        states[query], states[num_queries + query] = theirs[first + query], theirs[num_shared + first + query]


@njit(fastmath=True, error_model="numpy", boundscheck=False)
def _highest(scores):
    """The greatest score, or any number among scores of which one is not finite: their exponentials are not finite either."""
    highest = scores[0]
    for i in range(1, len(scores)):
        highest = max(highest, scores[i])
    return highest


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
def _scale(scores, scale, cap):
    """In place, and bent towards cap unless it is 0."""
    if cap > 0:
        factor = scale / cap
        for i in range(len(scores)):
            scores[i] = cap * _tanh(scores[i] * factor)
    else:
        for i in range(len(scores)):
            scores[i] *= scale


@helper
def _hide(scores, begin, position, window):
    """Take weight from keys from `begin` on that a query at a position does not see."""
    for key in range(len(scores)):
        if begin + key > position or begin + key <= position - window:
            scores[key] = _NOT_SEEN


@helper
def _exponentials(scores, highest):
    """In place e^(score - the highest so far); that highest, and their sum."""
    highest, total = max(highest, _highest(scores)), np.float32(0)
    for i in range(len(scores)):
        value = exp(scores[i] - highest)
        scores[i] = value
        total += value
    return highest, total


@helper
def weigh_scores(scores_at, own_at, num_queries, size, begin, count, scale, cap, seen):
    """Replace `count` scores of each query by their weights, and scale what the query has seen down to the new highest.

    begin: the first key. seen: of queries that do not see all keys the first one's position, queries of a position and window;
    a window of 0 says that all see all.
    """
    length = pad(size)
    states = floats_at(own_at + num_queries * length * 4, 2 * num_queries)
    for query in range(num_queries):
        scores, before = floats_at(scores_at + query * TILE * 4, count), states[query]
        _scale(scores, scale, cap)
        position = seen[0] + query // seen[1]
        if seen[2] > 0 and (begin + count - 1 > position or begin <= position - seen[2]):
            _hide(scores, begin, position, seen[2])
        highest, total = _exponentials(scores, before)
        if highest > before:
            factor = exp(before - highest)
            states[num_queries + query] *= factor
            sums = floats_at(own_at + query * length * 4, length)
            for i in range(length):
                sums[i] *= factor
        states[query] = highest
        states[num_queries + query] += total


@helper
def end_query(own_at, num_queries, query, size):
    """What a query has attended to, float32 [size]."""
    sums = floats_at(own_at + query * pad(size) * 4, size)
    totals = floats_at(own_at + num_queries * (pad(size) + 1) * 4, num_queries)
    factor = np.float32(1) / totals[query]
    for i in range(size):
        sums[i] *= factor
    return sums
