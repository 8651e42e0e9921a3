"""Loops over stored K and V of one format, compiled by numba.

Follows the rules in kernel_parts.py: what a kernel is given, how threads share its items, and that numbers that are not finite
stay so.
load_kernels loads this file once for each format, as a module whose name ends in the format's, so that a loop has the decoding
of its elements inside and nothing of other formats; under its own name it is of int8. Kernels have no closures: numba never
finds one on disk whose closure has a helper in it, and would compile it in every process.
"""

from typing import Final

import numpy as np
from numba import carray

from ..quantised.formats import BF16, FORMATS, FP8, FP16, INT4, INT8
from .attention_tiles import SEE_ALL, TILE, begin_queries, count_own, end_query, pad, weigh_scores
from .kernel_parts import (
    find_share,
    floats_at,
    greatest_magnitude,
    helper,
    int8s_at,
    int32s_at,
    int64s_at,
    keep,
    named_kernel,
    take_share,
)
from .key_tiles import make_scores, make_sums
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
from .tiles import FLOAT32, LANES

_CODE: Final = FORMATS.get(__name__.rpartition("_")[2], INT8).code
_FP16, _BF16, _FP8, _INT8, _INT4 = FP16.code, BF16.code, FP8.code, INT8.code, INT4.code
_LEAST: Final = np.float32(1e-30)


_kernel_of_format = named_kernel(__name__)
_score_keys = make_scores(FLOAT32)
_add_values = make_sums(FLOAT32)


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
def _read_head(out_at, block_at, elements_bytes, entry, size, row_bytes):
    """Write a stored head, the `entry`th of a side of a block, as float32 [size]."""
    row, out = _row_of(block_at + entry * row_bytes, size), floats_at(out_at, size)
    factor = _scale_of_slot(block_at + elements_bytes, entry)
    if _CODE == _INT4:
        half = size // 2
        for i in range(half):
            out[i] = np.float32((row[i] & 15) - 8) * factor
            out[half + i] = np.float32((row[i] >> 4) - 8) * factor
    else:
        for i in range(size):
            out[i] = _number_of(row[i]) * factor


@helper
def _copy_head(out_at, at, size):
    out, head = floats_at(out_at, size), floats_at(at, size)
    for i in range(size):
        out[i] = head[i]


@_kernel_of_format
def attend_decode(data):
    """out [S, N, D]: one query each over the last `window` keys, tile by tile from the tail or from stored blocks."""
    args, numbers = carray(data, (27,), np.int64), carray(data, (26,), np.float64)
    q_at, q_stride, layer_at, block_stride, side_bytes, elements_bytes = args[2], args[3], args[4], args[5], args[6], args[7]
    row_bytes, tail_at, tail_stride, tables_at, tail_tables_at = args[8], args[9], args[10], args[11], args[12]
    table_stride, tail_table_stride, lens_at, window = args[13], args[14], args[15], args[16]
    num_seqs, num_heads, num_kv_heads, size, block_size = args[17], args[18], args[19], args[20], args[21]
    scale, cap, out_at, logits_at = np.float32(numbers[22]), np.float32(numbers[23]), args[24], args[25]
    group, slot, elements = num_heads // num_kv_heads, num_kv_heads * size, pad(size)
    lens, item, num_items, taken_at = int32s_at(lens_at, num_seqs), 0, num_seqs * num_kv_heads, args.ctypes.data + 26 * 8
    share_first, share_last = take_share(args, taken_at, num_items)
    space = np.empty(count_own(group, size) + TILE * (group + 2 * elements), np.float32)
    own_at = space.ctypes.data
    scores_at = own_at + count_own(group, size) * 4
    keys_at = scores_at + TILE * group * 4
    values_at, lists = keys_at + TILE * elements * 4, np.empty(2 * TILE, np.int64)
    for key in range(2 * TILE):
        lists[key] = keys_at + key * elements * 4  # values behind keys
    list_at, queries = lists.ctypes.data, np.empty(group, np.int64)
    for seq in range(num_seqs):
        length = np.int64(lens[seq])
        start, count = max(np.int64(0), length - window), (length + block_size - 1) // block_size
        table = int32s_at(tables_at + seq * table_stride * 4, count)
        pages = int32s_at(tail_tables_at + seq * tail_table_stride * 4, count)
        for head in range(num_kv_heads):
            if item == share_last:
                share_first, share_last = take_share(args, taken_at, num_items)
            is_own = share_first <= item < share_last
            item += 1
            if not is_own:
                continue
            logits_of_head = logits_at
            if logits_at != 0:
                logits_of_head = logits_at + head * group * 4
            begin_queries(own_at, group, size, group, logits_of_head)
            for query in range(group):
                queries[query] = q_at + (seq * q_stride + (head * group + query) * size) * 4
            for first in range(start, length, TILE):
                last = min(first + TILE, length)
                for position in range(first, last):
                    index, offset = position // block_size, position % block_size
                    page = np.int64(0)
                    if tail_tables_at != 0:
                        page = np.int64(pages[index])
                    for side in range(2):
                        to = (keys_at if side == 0 else values_at) + (position - first) * elements * 4
                        if page != 0:
                            at = page * tail_stride + (side * block_size + offset) * slot + head * size
                            _copy_head(to, tail_at + at * 4, size)
                        else:
                            block_at = layer_at + np.int64(table[index]) * block_stride + side * side_bytes
                            _read_head(to, block_at, elements_bytes, offset * num_kv_heads + head, size, row_bytes)
                keys = last - first
                for key in range(0, keys, LANES):
                    to = scores_at + key * 4
                    _score_keys(queries.ctypes.data, 0, group, list_at + key * 8, size, to, TILE * 4)
                weigh_scores(scores_at, own_at, group, size, first, keys, scale, cap, SEE_ALL)
                _add_values(own_at, elements * 4, scores_at, TILE * 4, list_at + TILE * 8, keys, group, size)
            for query in range(group):
                out = floats_at(out_at + (seq * num_heads + head * group + query) * size * 4, size)
                if length > start:
                    found = end_query(own_at, group, query, size)
                    for i in range(size):
                        out[i] = found[i]
                else:
                    for i in range(size):
                        out[i] = np.float32(0)
    keep(space)
    keep(lists)
    keep(queries)
    keep(args)


@_kernel_of_format
def read(data):
    """K and V [2, count, M, D] in float32 of the positions [first, first + count) of one sequence."""
    args = carray(data, (17,), np.int64)
    layer_at, block_stride, side_bytes, elements_bytes, row_bytes = args[2], args[3], args[4], args[5], args[6]
    tail_at, tail_stride, table_at, tail_table_at = args[7], args[8], args[9], args[10]
    start, count, num_kv_heads, size, block_size, out_at = args[11], args[12], args[13], args[14], args[15], args[16]
    slot = num_kv_heads * size
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
            block_at = layer_at + np.int64(table[index]) * block_stride + side * side_bytes
            for head in range(num_kv_heads):
                entry = offset * num_kv_heads + head
                _read_head(to + head * size * 4, block_at, elements_bytes, entry, size, row_bytes)
