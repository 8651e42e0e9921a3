"""Products of integers, compiled: rows are quantised in groups, multiplied by weights of 8 or 4 bits, and scaled back.

How weights lie, and what a product is, is in integer_tiles.py.
"""

import numpy as np
from numba import carray, njit

from .integer_tiles import STEPS, WIDTH, make_multiply_integers
from .kernel_parts import (
    find_share,
    floats_at,
    get_or,
    greatest_magnitude,
    int8s_at,
    int32s_at,
    int64s_at,
    keep,
    kernel,
    order_by_expert,
    take_share,
)
from .products import GROUP
from .tiles import DEEP, PANEL, find_slice

_MOST, _LEAST = np.float32(127), np.float32(1e-30)
_DEEP_GROUPS = DEEP // STEPS


@njit(fastmath={"contract"}, error_model="numpy", boundscheck=False)
def _quantise_group(x, greatest, out):
    """The scale of x, which is not a number if x is not finite, and the sum of its integers; behind the last they are 0."""
    poison, total, steps_per_unit = np.float32(0), np.int32(0), _MOST / greatest
    for i in range(len(x)):
        poison += x[i] * np.float32(0)
        level = np.int32(min(max(np.rint(x[i] * steps_per_unit), -_MOST), _MOST))
        out[i] = np.int8(level)
        total += level
    for i in range(len(x), GROUP):
        out[i] = np.int8(0)
    return greatest / _MOST + poison, total


@kernel
def quantise_rows(data):
    """Integers [T, groups, GROUP] of x [T, I], and their terms [T, groups, 2]: a float32 scale, and the integers' int32 sum."""
    args = carray(data, (7,), np.int64)
    x_at, num_rows, num_in, out_at, terms_at = args[2], args[3], args[4], args[5], args[6]
    num_groups = (num_in + GROUP - 1) // GROUP
    first, last = find_share(args, num_rows)
    for row in range(first, last):
        for group in range(num_groups):
            count, idx = min(np.int64(GROUP), num_in - group * GROUP), row * num_groups + group
            x, out = floats_at(x_at + (row * num_in + group * GROUP) * 4, count), int8s_at(out_at + idx * GROUP, GROUP)
            greatest = max(greatest_magnitude(x), _LEAST)
            scale, total = _quantise_group(x, greatest, out)
            floats_at(terms_at + idx * 8, 1)[0] = scale
            int32s_at(terms_at + idx * 8 + 4, 1)[0] = total


@njit(error_model="numpy", boundscheck=False)
def _finish(sums, factors, bias, out):
    """out [W] = sums times factors, and the bias [W or 0] rounded by itself."""
    for i in range(len(out)):
        out[i] = sums[i] * factors[i]
    for i in range(len(bias)):
        out[i] += bias[i]


def _make_products(bits):
    """The helpers that are the kernels of weights of so many bits, see multiply_int8 and multiply_experts_int8."""
    multiply, integer_bytes = make_multiply_integers(bits), WIDTH * GROUP * bits // 8
    num_bytes = integer_bytes + WIDTH * (2 if bits == 8 else 4)

    @njit(error_model="numpy", boundscheck=False)
    def multiply_slice(sums_at, x_at, terms_at, num_rows, num_groups, blocks_at, ends, order_at, num_out, begin, size):
        factors_at, bias_at, out_at = ends
        block_at, column = blocks_at + begin // WIDTH * num_groups * num_bytes, begin % WIDTH
        count = min(size, num_out - begin)
        factors, bias = floats_at(factors_at + begin * 4, count), floats_at(bias_at + begin * 4, count if bias_at else 0)
        for row in range(0, num_rows, PANEL):
            rows, done = min(np.int64(PANEL), num_rows - row), np.int64(0)
            while done < num_groups:
                groups, at = min(np.int64(_DEEP_GROUPS), num_groups - done), block_at + done * num_bytes
                of_row = row * num_groups + done
                multiply(
                    sums_at,
                    size * 4,
                    x_at + of_row * GROUP,
                    num_groups * GROUP,
                    terms_at + of_row * 8,
                    num_groups * 8,
                    at + column * 4,
                    at + integer_bytes + column * 2,
                    num_bytes,
                    groups,
                    rows,
                    size,
                    done,
                )
                done += groups
            for own in range(rows):
                place = get_or(order_at, row + own, row + own)
                out = floats_at(out_at + (place * num_out + begin) * 4, count)
                _finish(floats_at(sums_at + own * size * 4, count), factors, bias, out)

    @njit(error_model="numpy", boundscheck=False)
    def multiply_weight(data):
        args = carray(data, (12,), np.int64)
        x_at, terms_at, num_rows, num_groups, blocks_at = args[2], args[3], args[4], args[5], args[6]
        ends, num_out, taken_at = (args[7], args[8], args[9]), args[10], args.ctypes.data + 11 * 8
        size = find_slice(args, np.int64(WIDTH), num_out)
        sums, num_slices = np.empty(PANEL * size, np.float32), (num_out + size - 1) // size
        first, last = take_share(args, taken_at, num_slices)
        while first < last:
            for begin in range(first * size, last * size, size):
                multiply_slice(sums.ctypes.data, x_at, terms_at, num_rows, num_groups, blocks_at, ends, 0, num_out, begin, size)
            first, last = take_share(args, taken_at, num_slices)
        keep(sums)
        keep(args)

    @njit(error_model="numpy", boundscheck=False)
    def multiply_experts(data):
        args = carray(data, (12,), np.int64)
        x_at, terms_at, chosen_at, num_pairs, per_row, num_groups, table_at = (
            args[2],
            args[3],
            args[4],
            args[5],
            args[6],
            args[7],
            args[8],
        )
        out_at, num_out, taken_at = args[9], args[10], args.ctypes.data + 11 * 8
        size, row_bytes = find_slice(args, np.int64(WIDTH), num_out), num_groups * GROUP
        sums = np.empty(PANEL * size, np.float32)
        own, own_terms = np.empty(num_pairs * row_bytes, np.int8), np.empty(num_pairs * num_groups, np.int64)
        order, begins = order_by_expert(int64s_at(chosen_at, num_pairs))
        num_slices, addresses = (num_out + size - 1) // size, int64s_at(table_at, 3 * (len(begins) - 1))
        end_item, num_items = 0, np.sum(begins[1:] > begins[:-1]) * num_slices
        first, last = take_share(args, taken_at, num_items)
        for expert in range(len(begins) - 1):
            count = begins[expert + 1] - begins[expert]
            begin_item, end_item = end_item, end_item + num_slices * (count > 0)
            if first >= end_item:
                continue
            for row in range(count):
                source = order[begins[expert] + row] // per_row
                own[row * row_bytes : (row + 1) * row_bytes] = int8s_at(x_at + source * row_bytes, row_bytes)
                terms = int64s_at(terms_at + source * num_groups * 8, num_groups)
                own_terms[row * num_groups : (row + 1) * num_groups] = terms
            blocks_at, ends = addresses[3 * expert], (addresses[3 * expert + 1], addresses[3 * expert + 2], out_at)
            rows, order_at = (own.ctypes.data, own_terms.ctypes.data, count), order.ctypes.data + begins[expert] * 8
            while first < min(last, end_item):
                begin = (first - begin_item) * size
                multiply_slice(sums.ctypes.data, *rows, num_groups, blocks_at, ends, order_at, num_out, begin, size)
                first += 1
                if first == last:
                    first, last = take_share(args, taken_at, num_items)
        keep(sums)
        keep(own)
        keep(own_terms)
        keep(order)
        keep(args)

    return multiply_weight, multiply_experts


_multiply_8, _multiply_experts_8 = _make_products(8)
_multiply_4, _multiply_experts_4 = _make_products(4)


@kernel
def multiply_int8(data):
    """out [T, O] of rows of quantise_rows, and W in groups of 8 bits, and factors [O]."""
    _multiply_8(data)


@kernel
def multiply_int4(data):
    """The same of W in groups of 4 bits."""
    _multiply_4(data)


@kernel
def multiply_experts_int8(data):
    """out [T K, O] of rows of quantise_rows of x [T, I] or [T K, I]: each row times the weights of its K experts.

    Of each expert the addresses of its W in groups of 8 bits, its factors and its bias, [E, 3]. See multiply_experts of floats.
    """
    _multiply_experts_8(data)


@kernel
def multiply_experts_int4(data):
    """The same of W in groups of 4 bits."""
    _multiply_experts_4(data)
