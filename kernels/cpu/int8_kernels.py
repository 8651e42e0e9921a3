"""Products of 8-bit integers, compiled: rows are quantised, multiplied exactly, and scaled back; see linear_int8.py."""

import numpy as np
from numba import carray, njit

from .kernel_parts import find_share, floats_at, greatest_magnitude, int32s_at, keep, kernel
from .number_formats import uint8s_at
from .tiles import DEEP, INT8, PANEL, find_slice, make_multiply

_multiply = make_multiply(INT8)


@njit(fastmath={"contract"}, error_model="numpy", boundscheck=False)
def _quantise_in_order(x, scale, levels, zero, out):
    """Levels of x [I] over scale, rounded in the order in which FBGEMM does; what is not a number if x is not finite."""
    poison = np.float32(0)
    for i in range(len(x)):
        poison += x[i] * np.float32(0)
        level = np.rint(x[i] / scale * levels + zero)
        level = level if level > zero - levels else zero - levels
        out[i] = np.uint8(np.int32(min(level, zero + levels)))
    return poison


@kernel
def quantise_rows(data):
    """out [T, 4 steps] of x [T, I]: `levels` on either side of `zero`; scales [T], by which a level is to be multiplied."""
    args, numbers = carray(data, (11,), np.int64), carray(data, (11,), np.float64)
    x_at, num_rows, num_in, out_at, out_bytes, scales_at = args[2], args[3], args[4], args[5], args[6], args[7]
    levels, zero, least = np.float32(numbers[8]), np.float32(numbers[9]), np.float32(numbers[10])
    scales = floats_at(scales_at, num_rows)
    first, last = find_share(args, num_rows)
    for row in range(first, last):
        x, out = floats_at(x_at + row * num_in * 4, num_in), uint8s_at(out_at + row * out_bytes, num_in)
        scale = max(greatest_magnitude(x), least)
        scales[row] = scale + _quantise_in_order(x, scale, levels, zero, out)


@njit(fastmath={"contract"}, error_model="numpy", boundscheck=False)
def _scale_in_order(sums, shifts, zero, factors, scale, out):
    """out [W] = (sums - zero * shifts) * factors * scale, in this order: FBGEMM's."""
    for i in range(len(out)):
        out[i] = np.float32(sums[i] - zero * shifts[i]) * factors[i] * scale


@njit(error_model="numpy", boundscheck=False)
def _add(bias, out):
    """Rounded by itself, as it is where torch adds it."""
    for i in range(len(out)):
        out[i] += bias[i]


@kernel
def multiply_int8(data):
    """out [T, O] of rows of quantise_rows [T, 4 steps], W in blocks of int8, its sums over inputs [O] and factors [O]."""
    args = carray(data, (14,), np.int64)
    x_at, scales_at, num_rows, num_steps, blocks_at, width = args[2], args[3], args[4], args[5], args[6], args[7]
    shifts_at, factors_at, bias_at, zero, out_at, num_out = args[8], args[9], args[10], args[11], args[12], args[13]
    size, step_bytes, row_bytes = find_slice(args, width, num_out), width * 4, num_steps * 4
    sums, scales = np.empty(PANEL * size, np.int32), floats_at(scales_at, num_rows)
    first, last = find_share(args, (num_out + size - 1) // size)
    for begin in range(first * size, last * size, size):
        weights_at = blocks_at + begin // width * step_bytes * num_steps + begin % width * 4
        count = min(size, num_out - begin)
        shifts, factors = int32s_at(shifts_at + begin * 4, count), floats_at(factors_at + begin * 4, count)
        bias = floats_at(bias_at + begin * 4, count)
        for row in range(0, num_rows, PANEL):
            rows, done = min(np.int64(PANEL), num_rows - row), np.int64(0)
            while done < num_steps:
                steps, of_x = min(np.int64(DEEP), num_steps - done), x_at + row * row_bytes + done * 4
                of_weights = weights_at + done * step_bytes
                _multiply(sums.ctypes.data, size * 4, of_x, row_bytes, 4, of_weights, step_bytes, steps, rows, size, done)
                done += steps
            for own in range(rows):
                out = floats_at(out_at + ((row + own) * num_out + begin) * 4, count)
                own_sums = sums[own * size : own * size + count]
                _scale_in_order(own_sums, shifts, np.int32(zero), factors, scales[row + own], out)
                if bias_at != 0:
                    _add(bias, out)
    keep(sums)
