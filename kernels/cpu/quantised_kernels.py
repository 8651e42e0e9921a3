"""Loops over stored K and V of one format, compiled by numba.

Follows the rules in kernel_parts.py: what a kernel is given, how threads share its items, and that numbers that are not finite
stay so.
of_format loads this file once for each format, as a module whose name ends in the format's, so that a loop has the decoding
of its elements inside and nothing of other formats; under its own name it is of int8. Kernels have no closures: numba never
finds one on disk whose closure has a helper in it, and would compile it in every process.
"""

from typing import Final

import numpy as np
from numba import carray

from ..quantised.formats import BF16, FORMATS, FP8, FP16, INT4, INT8
from .attention_kernels import (
    TILE,
    begin_rows,
    count_keys,
    end_rows,
    find_own_heads,
    score_run,
    share_of_keys,
    weigh_run,
    weigh_scores,
)
from .kernel_parts import find_share, floats_at, greatest_magnitude, helper, int8s_at, int32s_at, int64s_at, kernel, prefetch
from .number_formats import (
    bits_of_float,
    brain_of_float,
    e4m3_of_float,
    float_of_brain,
    float_of_half,
    float_of_integer,
    half_of_float,
    part_of_e4m3,
    uint8s_at,
    uint16s_at,
)

_CODE: Final = FORMATS.get(__name__.rpartition("_")[2], INT8).code
_FP16, _BF16, _FP8, _INT8, _INT4 = FP16.code, BF16.code, FP8.code, INT8.code, INT4.code
_LEAST: Final = np.float32(1e-30)
_PAIR: Final = 8  # tokens whose rows are read ahead of their use


def _kernel_of_format(function):
    """A kernel whose file on disk has the end of this module's name in its own."""
    function.__qualname__ += __name__.rpartition("quantised_kernels")[2]
    return kernel(function)


@helper
def _scale_of_head(row, most):
    """The bits of the bfloat16 scale of a head, and what its numbers are multiplied by; see quantised/formats.py."""
    poison = np.float32(0)
    for i in range(len(row)):
        poison += row[i] * np.float32(0)  # not a number where one is not finite
    raw = np.float32(np.float64(greatest_magnitude(row)) / np.float64(most))
    if poison != np.float32(0):  # also where it is not a number
        return np.uint16(0x7FC0), np.float32(0)
    if raw < _LEAST:
        return np.uint16(0), np.float32(0)
    bits = np.uint16((np.uint32(bits_of_float(raw)) + np.uint32(0xFFFF)) >> np.uint32(16))
    return bits, np.float32(np.float64(1) / np.float64(float_of_brain(bits)))


@helper
def _greatest(row):
    greatest = row[0]
    for i in range(len(row)):
        greatest = max(greatest, row[i])
    return greatest


@helper
def _least(row):
    least = row[0]
    for i in range(len(row)):
        least = min(least, row[i])
    return least


_MOST = np.float32({_FP8: 448, _INT8: 127, _INT4: 8}.get(_CODE, 0))  # the greatest magnitude of an element
_IS_SCALED, _UNIT = _CODE in (_FP8, _INT8, _INT4), np.float32(256 if _CODE == _FP8 else 1)

# Of the elements at an address, and the number that one of them is; chosen here, because a loop knows one type.
_row_of = uint16s_at if _CODE in (_FP16, _BF16) else int8s_at if _CODE == _INT8 else uint8s_at
_number_of = {_FP16: float_of_half, _BF16: float_of_brain, _FP8: part_of_e4m3}.get(_CODE, float_of_integer)


@helper
def _scale_of_slot(scales_at, slot):
    """What the _number_of an element is multiplied by."""
    if _IS_SCALED:
        return float_of_brain(uint16s_at(scales_at + slot * 2, 1)[0]) * _UNIT
    return np.float32(1)


@helper
def _store_head(row, elements_at, factor_at):
    size = len(row)
    if _CODE == _FP16:
        out = uint16s_at(elements_at, size)
        for i in range(size):
            out[i] = half_of_float(row[i])
    elif _CODE == _BF16:
        out = uint16s_at(elements_at, size)
        for i in range(size):
            out[i] = brain_of_float(row[i])
    else:
        bits, factor = _scale_of_head(row, _MOST)
        uint16s_at(factor_at, 1)[0] = bits
        if _CODE == _INT8:
            whole = int8s_at(elements_at, size)
            for i in range(size):
                whole[i] = np.int8(np.int32(np.rint(row[i] * factor)))
        elif _CODE == _FP8:
            packed = uint8s_at(elements_at, size)
            for i in range(size):
                packed[i] = e4m3_of_float(min(max(row[i] * factor, -_MOST), _MOST))
        else:
            if factor != np.float32(0) and _greatest(row) > -_least(row):
                factor = -factor
                uint16s_at(factor_at, 1)[0] = bits | np.uint16(0x8000)
            packed = uint8s_at(elements_at, size // 2)
            for i in range(size // 2):
                low = min(np.int32(np.rint(row[i] * factor)), np.int32(7)) + np.int32(8)
                high = min(np.int32(np.rint(row[i + size // 2] * factor)), np.int32(7)) + np.int32(8)
                packed[i] = np.uint8((low & np.int32(15)) | (high << np.int32(4)))


@_kernel_of_format
def store(data):
    """Keys of qk [T, N + M, D], rotated unless cos is none, and v into slots; rotated queries to q [T, N, D]."""
    args = carray(data, (23,), np.int64)
    qk_at, qk_stride, v_at, v_stride, cos_at, sin_at, q_at = args[2], args[3], args[4], args[5], args[6], args[7], args[8]
    layer_at, block_stride, side_bytes, elements_bytes = args[9], args[10], args[11], args[12]
    tail_at, tail_stride, slots_at, tail_slots_at = args[13], args[14], args[15], args[16]
    num_tokens, num_heads, num_kv_heads, size, block_size, row_bytes = (
        args[17],
        args[18],
        args[19],
        args[20],
        args[21],
        args[22],
    )
    half, slot_len = size // 2, num_kv_heads * size
    slots, tail_slots = int64s_at(slots_at, num_tokens), int64s_at(tail_slots_at, num_tokens)
    turned = np.empty(size, np.float32)
    first, last = find_share(args, num_tokens)
    for token in range(first, last):
        slot = slots[token]
        at = layer_at + slot // block_size * block_stride
        offset = slot % block_size
        tail_slot = np.int64(-1)
        if tail_slots_at != 0:
            tail_slot = tail_slots[token]
        page = tail_at + (tail_slot // block_size * tail_stride + tail_slot % block_size * slot_len) * 4
        cos = floats_at(cos_at + token * size * 4, size)
        sin = floats_at(sin_at + token * size * 4, size)
        for head in range(num_heads + num_kv_heads):
            low = floats_at(qk_at + (token * qk_stride + head * size) * 4, half)
            high = floats_at(qk_at + (token * qk_stride + head * size + half) * 4, half)
            own = head - num_heads
            if head < num_heads:
                to = floats_at(q_at + (token * num_heads + head) * size * 4, size)
            else:
                to = turned
            if cos_at != 0:
                for i in range(half):
                    a, b = low[i], high[i]
                    to[i] = a * cos[i] + b * sin[i]
                    to[half + i] = b * cos[half + i] + a * sin[half + i]
            elif own >= 0:
                for i in range(half):
                    to[i] = low[i]
                    to[half + i] = high[i]
            if own >= 0:
                if slot >= 0:
                    entry = offset * num_kv_heads + own
                    _store_head(turned, at + entry * row_bytes, at + elements_bytes + entry * 2)
                if tail_slot >= 0:
                    copy = floats_at(page + own * size * 4, size)
                    for i in range(size):
                        copy[i] = turned[i]
        for own in range(num_kv_heads):
            v = floats_at(v_at + (token * v_stride + own * size) * 4, size)
            if slot >= 0:
                entry = offset * num_kv_heads + own
                _store_head(v, at + side_bytes + entry * row_bytes, at + side_bytes + elements_bytes + entry * 2)
            if tail_slot >= 0:
                copy = floats_at(page + (block_size * slot_len + own * size) * 4, size)
                for i in range(size):
                    copy[i] = v[i]


@helper
def _block_scores(scores, place, q_at, at, scales_at, offset, count, size, row_bytes, head, num_kv_heads, group):
    """scores [members, TILE] from `place` on, of `count` slots of a block from `offset` on, for one KV head's queries."""
    half, step = size // 2, num_kv_heads * row_bytes
    at += (offset * num_kv_heads + head) * row_bytes
    entry, done = offset * num_kv_heads + head, np.int64(0)
    while done < count:
        is_four = done + 4 <= count
        k0 = _row_of(at, size)
        k1, k2, k3 = k0, k0, k0
        if is_four:
            k1, k2, k3 = _row_of(at + step, size), _row_of(at + 2 * step, size), _row_of(at + 3 * step, size)
        for member in range(group):
            q = floats_at(q_at + member * size * 4, size)
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            if _CODE == _INT4:
                for i in range(half):
                    a, b = q[i], q[half + i]
                    s0 += a * np.float32((k0[i] & 15) - 8) + b * np.float32((k0[i] >> 4) - 8)
                    s1 += a * np.float32((k1[i] & 15) - 8) + b * np.float32((k1[i] >> 4) - 8)
                    s2 += a * np.float32((k2[i] & 15) - 8) + b * np.float32((k2[i] >> 4) - 8)
                    s3 += a * np.float32((k3[i] & 15) - 8) + b * np.float32((k3[i] >> 4) - 8)
            else:
                for i in range(size):
                    s0 += q[i] * _number_of(k0[i])
                    s1 += q[i] * _number_of(k1[i])
                    s2 += q[i] * _number_of(k2[i])
                    s3 += q[i] * _number_of(k3[i])
            to = member * TILE + place + done
            scores[to] = s0 * _scale_of_slot(scales_at, entry)
            if is_four:
                scores[to + 1] = s1 * _scale_of_slot(scales_at, entry + num_kv_heads)
                scores[to + 2] = s2 * _scale_of_slot(scales_at, entry + 2 * num_kv_heads)
                scores[to + 3] = s3 * _scale_of_slot(scales_at, entry + 3 * num_kv_heads)
        taken = 4 if is_four else 1
        done += taken
        at += taken * step
        entry += taken * num_kv_heads


@helper
def _block_weigh(scores, place, out_at, at, scales_at, offset, count, size, row_bytes, head, num_kv_heads, group):
    """Add to out [members, size] the values of these slots times their scores."""
    half, step = size // 2, num_kv_heads * row_bytes
    at += (offset * num_kv_heads + head) * row_bytes
    entry, done = offset * num_kv_heads + head, np.int64(0)
    while done < count:
        is_four = done + 4 <= count
        v0 = _row_of(at, size)
        v1, v2, v3 = v0, v0, v0
        c0, c1, c2, c3 = _scale_of_slot(scales_at, entry), np.float32(0), np.float32(0), np.float32(0)
        if is_four:
            v1, v2, v3 = _row_of(at + step, size), _row_of(at + 2 * step, size), _row_of(at + 3 * step, size)
            c1 = _scale_of_slot(scales_at, entry + num_kv_heads)
            c2 = _scale_of_slot(scales_at, entry + 2 * num_kv_heads)
            c3 = _scale_of_slot(scales_at, entry + 3 * num_kv_heads)
        for member in range(group):
            out = floats_at(out_at + member * size * 4, size)
            of = member * TILE + place + done
            w0, w1, w2, w3 = scores[of] * c0, np.float32(0), np.float32(0), np.float32(0)
            if is_four:
                w1, w2, w3 = scores[of + 1] * c1, scores[of + 2] * c2, scores[of + 3] * c3
            if _CODE == _INT4:
                low, high = floats_at(out_at + member * size * 4, half), floats_at(out_at + (member * size + half) * 4, half)
                for i in range(half):
                    a, b, c, d = v0[i], v1[i], v2[i], v3[i]
                    low[i] += (
                        w0 * np.float32((a & 15) - 8)
                        + w1 * np.float32((b & 15) - 8)
                        + w2 * np.float32((c & 15) - 8)
                        + w3 * np.float32((d & 15) - 8)
                    )
                    high[i] += (
                        w0 * np.float32((a >> 4) - 8)
                        + w1 * np.float32((b >> 4) - 8)
                        + w2 * np.float32((c >> 4) - 8)
                        + w3 * np.float32((d >> 4) - 8)
                    )
            else:
                for i in range(size):
                    out[i] += w0 * _number_of(v0[i]) + w1 * _number_of(v1[i]) + w2 * _number_of(v2[i]) + w3 * _number_of(v3[i])
        taken = 4 if is_four else 1
        done += taken
        at += taken * step
        entry += taken * num_kv_heads


@_kernel_of_format
def attend_decode(data):
    """out [S, N, D]: one query each over the last `window` keys, block by block from the tail or from stored blocks."""
    args, numbers = carray(data, (26,), np.int64), carray(data, (26,), np.float64)
    q_at, q_stride, layer_at, block_stride, side_bytes, elements_bytes, row_bytes = (
        args[2],
        args[3],
        args[4],
        args[5],
        args[6],
        args[7],
        args[8],
    )
    tail_at, tail_stride, tables_at, tail_tables_at = args[9], args[10], args[11], args[12]
    table_stride, tail_table_stride, lens_at, window = args[13], args[14], args[15], args[16]
    num_seqs, num_heads, num_kv_heads, size, block_size = args[17], args[18], args[19], args[20], args[21]
    scale, cap, out_at, logits_at = np.float32(numbers[22]), np.float32(numbers[23]), args[24], args[25]
    group, slot = num_heads // num_kv_heads, num_kv_heads * size
    lens = int32s_at(lens_at, num_seqs)
    share_first, share_last = share_of_keys(args, count_keys(lens, window) * num_kv_heads)
    scores = np.empty(num_heads * TILE, np.float32)
    highest, totals = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
    begin = np.int64(0)
    for seq in range(num_seqs):
        length = np.int64(lens[seq])
        start = max(np.int64(0), length - window)
        first_head, heads = find_own_heads(begin, length - start, num_kv_heads, share_first, share_last)
        begin += (length - start) * num_kv_heads
        if heads == 0:
            continue
        first_row = seq * num_heads + first_head * group
        query_at, row_at = q_at + (seq * q_stride + first_head * group * size) * 4, out_at + first_row * size * 4
        count = (length + block_size - 1) // block_size
        table = int32s_at(tables_at + seq * table_stride * 4, count)
        pages = int32s_at(tail_tables_at + seq * tail_table_stride * 4, count)
        own_logits_at = logits_at + first_head * group * 4 if logits_at != 0 else logits_at
        begin_rows(highest, totals, own_logits_at, row_at, heads * group, size)
        for first in range(start, length, TILE):
            last = min(first + TILE, length)
            for side in range(2):
                position = first
                while position < last:
                    index, offset = position // block_size, position % block_size
                    run = min(block_size - offset, last - position)
                    page = np.int64(0)
                    if tail_tables_at != 0:
                        page = np.int64(pages[index])
                    if page != 0:
                        at = tail_at + (page * tail_stride + (side * block_size + offset) * slot + first_head * size) * 4
                        if side == 0:
                            score_run(scores, position - first, query_at, at, np.int64(0), run, slot, size, heads, group)
                        else:
                            weigh_run(scores, position - first, row_at, at, np.int64(0), run, slot, size, heads, group)
                    else:
                        block = np.int64(table[index])
                        at = layer_at + block * block_stride + side * side_bytes
                        following = np.int64(table[min(index + 1, count - 1)])
                        ahead = layer_at + following * block_stride + side * side_bytes
                        for line in range(0, run * num_kv_heads * row_bytes, 64):
                            prefetch(ahead + line)
                        for head in range(heads):
                            to = head * group * TILE + position - first
                            own = head * group * size * 4
                            if side == 0:
                                _block_scores(
                                    scores,
                                    to,
                                    query_at + own,
                                    at,
                                    at + elements_bytes,
                                    offset,
                                    run,
                                    size,
                                    row_bytes,
                                    first_head + head,
                                    num_kv_heads,
                                    group,
                                )
                            else:
                                _block_weigh(
                                    scores,
                                    to,
                                    row_at + own,
                                    at,
                                    at + elements_bytes,
                                    offset,
                                    run,
                                    size,
                                    row_bytes,
                                    first_head + head,
                                    num_kv_heads,
                                    group,
                                )
                    position += run
                if side == 0:
                    have_seen = first > start or logits_at != 0
                    weigh_scores(scores, last - first, highest, totals, row_at, heads * group, size, scale, cap, have_seen)
        if length > start:
            end_rows(totals, row_at, heads * group, size)


@_kernel_of_format
def read(data):
    """K and V [2, count, M, D] in float32 of the positions [first, first + count) of one sequence."""
    args = carray(data, (17,), np.int64)
    layer_at, block_stride, side_bytes, elements_bytes, row_bytes = args[2], args[3], args[4], args[5], args[6]
    tail_at, tail_stride, table_at, tail_table_at = args[7], args[8], args[9], args[10]
    start, count, num_kv_heads, size, block_size, out_at = args[11], args[12], args[13], args[14], args[15], args[16]
    half, slot = size // 2, num_kv_heads * size
    table = int32s_at(table_at, (start + count + block_size - 1) // block_size)
    pages = int32s_at(tail_table_at, (start + count + block_size - 1) // block_size)
    first, last = find_share(args, count)
    for at in range(first, last):
        index, offset = (start + at) // block_size, (start + at) % block_size
        page = np.int64(0)
        if tail_table_at != 0:
            page = np.int64(pages[index])
        for side in range(2):
            to = out_at + (side * count + at) * slot * 4
            if page != 0:
                copy = floats_at(tail_at + (page * tail_stride + (side * block_size + offset) * slot) * 4, slot)
                out = floats_at(to, slot)
                for i in range(slot):
                    out[i] = copy[i]
                continue
            block = layer_at + np.int64(table[index]) * block_stride + side * side_bytes
            for head in range(num_kv_heads):
                entry = offset * num_kv_heads + head
                row, factor = _row_of(block + entry * row_bytes, size), _scale_of_slot(block + elements_bytes, entry)
                out = floats_at(to + head * size * 4, size)
                if _CODE == _INT4:
                    for i in range(half):
                        out[i] = np.float32((row[i] & 15) - 8) * factor
                        out[half + i] = np.float32((row[i] >> 4) - 8) * factor
                else:
                    for i in range(size):
                        out[i] = _number_of(row[i]) * factor
