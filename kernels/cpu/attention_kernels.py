"""Decode attention over blocks of float32, compiled, and what is the same for blocks of any format."""

from typing import Final

import numpy as np
from numba import carray, njit

from .kernel_parts import (
    exp,
    find_share,
    floats_at,
    helper,
    int32s_at,
    kernel,
    prefetch,
)

TILE: Final = 128  # keys of one pass: their scores stay in the first cache


@helper
def _run_of_slots(base, table, position, last, block_stride, block_size, slot):
    """The run of neighbouring slots that begins at a position: its address, the way to the next block's, and its end."""
    index, offset = position // block_size, position % block_size
    block = np.int64(table[index])
    following = np.int64(table[min(index + 1, len(table) - 1)])
    at = base + (block * block_stride + offset * slot) * 4
    return at, (following - block) * block_stride * 4, position + min(block_size - offset, last - position)


@helper
def _prefetch_rows(at, slot, size):
    """Ask for the head at an address and for the same head of the next three slots."""
    for row in range(4):
        for line in range(0, size, 16):
            prefetch(at + (row * slot + line) * 4)


@helper
def score_run(scores, place, q_at, at, ahead, count, slot, size, heads, group):
    """scores [heads * group, TILE] from `place` on, of `count` neighbouring slots; asks for the rows `ahead` bytes further."""
    done = np.int64(0)
    while done + 4 <= count:
        for head in range(heads):
            _prefetch_rows(at + ahead + head * size * 4, slot, size)
            k0, k1 = floats_at(at + head * size * 4, size), floats_at(at + (slot + head * size) * 4, size)
            k2, k3 = floats_at(at + (2 * slot + head * size) * 4, size), floats_at(at + (3 * slot + head * size) * 4, size)
            for member in range(head * group, head * group + group):
                q = floats_at(q_at + member * size * 4, size)
                s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for i in range(size):
                    s0 += q[i] * k0[i]
                    s1 += q[i] * k1[i]
                    s2 += q[i] * k2[i]
                    s3 += q[i] * k3[i]
                to = member * TILE + place + done
                scores[to] = s0
                scores[to + 1] = s1
                scores[to + 2] = s2
                scores[to + 3] = s3
        at += slot * 16
        done += 4
    while done < count:
        for head in range(heads):
            k = floats_at(at + head * size * 4, size)
            for member in range(head * group, head * group + group):
                q = floats_at(q_at + member * size * 4, size)
                total = np.float32(0)
                for i in range(size):
                    total += q[i] * k[i]
                scores[member * TILE + place + done] = total
        at += slot * 4
        done += 1


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
def _exponentials(scores, highest, scale, cap):
    """In place e^(score - the highest so far), of scores times scale and bent towards cap; that highest, and their sum."""
    count = len(scores)
    if cap > 0:
        factor = scale / cap
        for i in range(count):
            scores[i] = cap * _tanh(scores[i] * factor)
    else:
        for i in range(count):
            scores[i] *= scale
    highest = max(highest, _highest(scores))
    total = np.float32(0)
    for i in range(count):
        value = exp(scores[i] - highest)
        scores[i] = value
        total += value
    return highest, total


@helper
def weigh_run(scores, place, out_at, at, ahead, count, slot, size, heads, group):
    """Add to out [heads * group, size] the values of `count` neighbouring slots times their scores."""
    done = np.int64(0)
    while done + 4 <= count:
        for head in range(heads):
            _prefetch_rows(at + ahead + head * size * 4, slot, size)
            v0, v1 = floats_at(at + head * size * 4, size), floats_at(at + (slot + head * size) * 4, size)
            v2, v3 = floats_at(at + (2 * slot + head * size) * 4, size), floats_at(at + (3 * slot + head * size) * 4, size)
            for member in range(head * group, head * group + group):
                out = floats_at(out_at + member * size * 4, size)
                of = member * TILE + place + done
                w0, w1, w2, w3 = scores[of], scores[of + 1], scores[of + 2], scores[of + 3]
                for i in range(size):
                    out[i] += w0 * v0[i] + w1 * v1[i] + w2 * v2[i] + w3 * v3[i]
        at += slot * 16
        done += 4
    while done < count:
        for head in range(heads):
            v = floats_at(at + head * size * 4, size)
            for member in range(head * group, head * group + group):
                out = floats_at(out_at + member * size * 4, size)
                weight = scores[member * TILE + place + done]
                for i in range(size):
                    out[i] += weight * v[i]
        at += slot * 4
        done += 1


@helper
def _scale(row_at, size, factor):
    row = floats_at(row_at, size)
    for i in range(size):
        row[i] *= factor


@helper
def count_keys(lens, window):
    """The keys that the queries of all sequences see."""
    count = np.int64(0)
    for seq in range(len(lens)):
        count += min(np.int64(lens[seq]), window)
    return count


@helper
def share_of_keys(args, num_keys):
    """As find_share, of keys; the last share has the sequences without keys at the end."""
    first, last = find_share(args, num_keys)
    return first, last + 1 if last == num_keys else last


@helper
def find_own_heads(begin, num_keys, num_kv_heads, first, last):
    """The first KV head of a thread and how many it takes, of a sequence whose heads have num_keys keys each from `begin` on.

    Keys of all sequences and KV heads are in a row; a thread takes the heads whose first key is in its share.
    """
    heads, first_head = np.int64(0), np.int64(0)
    for head in range(num_kv_heads):
        if first <= begin < last:
            if heads == 0:
                first_head = head
            heads += 1
        begin += num_keys
    return first_head, heads


@helper
def begin_rows(highest, totals, logits_at, row_at, num_rows, size):
    """Rows that have seen no key, or where there are logits of sinks a key without a value."""
    logits = floats_at(logits_at, num_rows)
    for row in range(num_rows):
        highest[row], totals[row] = np.float32(-np.inf), np.float32(0)
        if logits_at != 0:
            highest[row], totals[row] = logits[row], np.float32(1)
    zeros = floats_at(row_at, num_rows * size)
    for i in range(num_rows * size):
        zeros[i] = np.float32(0)


@helper
def weigh_scores(scores, count, highest, totals, row_at, num_rows, size, scale, cap, have_seen):
    """Replace `count` scores of each row by their weights, and scale what the rows have seen down to the new highest."""
    for row in range(num_rows):
        place = row * TILE
        own, total = _exponentials(scores[place : place + count], highest[row], scale, cap)
        if have_seen and own > highest[row]:
            factor = exp(highest[row] - own)
            totals[row] *= factor
            _scale(row_at + row * size * 4, size, factor)
        highest[row] = own
        totals[row] += total


@helper
def end_rows(totals, row_at, num_rows, size):
    for row in range(num_rows):
        _scale(row_at + row * size * 4, size, np.float32(1) / totals[row])


@kernel
def attend_decode(data):
    """out [S, N, D]: one query each, over its first keys, the sinks, and those from `starts` on; see the launcher.

    q [S, N, D] scores the latter, and another query like it the sinks.
    """
    args, numbers = carray(data, (23,), np.int64), carray(data, (23,), np.float64)
    q_at, q_stride, sink_q_at, sink_q_stride = args[2], args[3], args[4], args[5]
    layer_at, block_stride, kv_stride, tables_at, table_stride = args[6], args[7], args[8], args[9], args[10]
    num_seqs, num_heads, num_kv_heads, size, block_size = args[14], args[15], args[16], args[17], args[18]
    scale, cap, out_at, logits_at = np.float32(numbers[19]), np.float32(numbers[20]), args[21], args[22]
    group, slot = num_heads // num_kv_heads, num_kv_heads * size
    lens, starts, sinks = int32s_at(args[11], num_seqs), int32s_at(args[12], num_seqs), int32s_at(args[13], num_seqs)
    num_keys = np.int64(0)
    for seq in range(num_seqs):
        num_keys += np.int64(lens[seq]) - starts[seq] + sinks[seq]
    share_first, share_last = share_of_keys(args, num_keys * num_kv_heads)
    scores = np.empty(num_heads * TILE, np.float32)
    highest, totals = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
    begin = np.int64(0)
    for seq in range(num_seqs):
        length, start, sink = np.int64(lens[seq]), np.int64(starts[seq]), np.int64(sinks[seq])
        first_head, heads = find_own_heads(begin, length - start + sink, num_kv_heads, share_first, share_last)
        begin += (length - start + sink) * num_kv_heads
        if heads == 0:
            continue
        own_heads = first_head * group
        row_at, keys_at = out_at + (seq * num_heads + own_heads) * size * 4, layer_at + first_head * size * 4
        table = int32s_at(tables_at + seq * table_stride * 4, (length + block_size - 1) // block_size)
        own_logits_at = logits_at + own_heads * 4 if logits_at != 0 else logits_at
        begin_rows(highest, totals, own_logits_at, row_at, heads * group, size)
        have_seen = logits_at != 0
        for part in range(2):
            if part == 0:
                query_at, position, end = sink_q_at + (seq * sink_q_stride + own_heads * size) * 4, np.int64(0), sink
            else:
                query_at, position, end = q_at + (seq * q_stride + own_heads * size) * 4, start, length
            for first in range(position, end, TILE):
                last = min(first + TILE, end)
                for side in range(2):
                    place = first
                    while place < last:
                        base = keys_at + side * kv_stride * 4
                        at, ahead, stop = _run_of_slots(base, table, place, last, block_stride, block_size, slot)
                        if side == 0:
                            score_run(scores, place - first, query_at, at, ahead, stop - place, slot, size, heads, group)
                        else:
                            weigh_run(scores, place - first, row_at, at, ahead, stop - place, slot, size, heads, group)
                        place = stop
                    if side == 0:
                        weigh_scores(scores, last - first, highest, totals, row_at, heads * group, size, scale, cap, have_seen)
                have_seen = True
        if length > start:
            end_rows(totals, row_at, heads * group, size)
