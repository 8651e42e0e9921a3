"""Passes over rows, compiled: norms, gates, rotation with the store of K and V, products of one row, penalties."""

import numpy as np
from numba import carray, njit

from .kernel_parts import (
    exact_kernel,
    exp,
    find_share,
    floats_at,
    greatest_magnitude,
    helper,
    int8s_at,
    int32s_at,
    int64s_at,
    kernel,
)


@kernel
def rms_norm(data):
    """x [T, N, D], row t at stride; weight [N, D]; residual of x's shape or none, added to x in place; out [T, N, D]."""
    args, numbers = carray(data, (12,), np.int64), carray(data, (12,), np.float64)
    x_at, residual_at, weight_at, out_at = args[2], args[3], args[4], args[5]
    num_rows, num_heads, size, stride = args[6], args[7], args[8], args[9]
    eps = np.float32(numbers[10])
    first, last = find_share(args, num_rows)
    for row in range(first, last):
        for head in range(num_heads):
            x = floats_at(x_at + (row * stride + head * size) * 4, size)
            weight = floats_at(weight_at + head * size * 4, size)
            out = floats_at(out_at + (row * num_heads + head) * size * 4, size)
            total = np.float32(0)
            if residual_at != 0:
                residual = floats_at(residual_at + (row * num_heads + head) * size * 4, size)
                for i in range(size):
                    value = x[i] + residual[i]
                    x[i] = value
                    total += value * value
            else:
                for i in range(size):
                    total += x[i] * x[i]
            # In 64 bits: with `afn` the root of 32 bits is the processor's estimate, refined, and it scales the whole row.
            factor = np.float32(1.0 / np.sqrt(np.float64(total) / size + np.float64(eps)))
            for i in range(size):
                out[i] = x[i] * factor * weight[i]


@kernel
def gate(data):
    """out [T, I] = act(gate) * up of gate_up [T, 2 I]; kind: 0 silu, 1 gelu by tanh, 2 clamped_swiglu."""
    args, numbers = carray(data, (9,), np.int64), carray(data, (9,), np.float64)
    gate_up_at, out_at, num_rows, size, kind = args[2], args[3], args[4], args[5], args[6]
    alpha, limit = np.float32(numbers[7]), np.float32(numbers[8])
    first, last = find_share(args, num_rows * size)
    while first < last:
        row, column = first // size, first % size
        count = min(last - first, size - column)
        gates = floats_at(gate_up_at + (row * 2 * size + column) * 4, count)
        ups = floats_at(gate_up_at + (row * 2 * size + size + column) * 4, count)
        out = floats_at(out_at + first * 4, count)
        if kind == 2:
            for i in range(count):
                x, up = gates[i], ups[i]
                x = limit if x > limit else x
                up = limit if up > limit else up
                up = -limit if up < -limit else up
                out[i] = x / (np.float32(1) + exp(-alpha * x)) * (up + np.float32(1))
        elif kind == 1:
            for i in range(count):
                x = gates[i]
                bent = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)  # 1 + tanh(u) is 2 sigmoid(2 u)
                out[i] = x / (np.float32(1) + exp(-bent)) * ups[i]
        else:
            for i in range(count):
                x = gates[i]
                out[i] = x / (np.float32(1) + exp(-x)) * ups[i]
        first += count


@kernel
def rotary_store_kv(data):
    """Rotate qk [T, N + M, D], copy its queries to q [T, N, D], and keys and v [T, M, D] to rows of slots."""
    args = carray(data, (16,), np.int64)
    qk_at, qk_stride, v_at, v_stride, cos_at, sin_at, q_at = args[2], args[3], args[4], args[5], args[6], args[7], args[8]
    layer_at, k_rows_at, v_rows_at = args[9], args[10], args[11]
    num_tokens, num_heads, num_kv_heads, size = args[12], args[13], args[14], args[15]
    half, slot = size // 2, num_kv_heads * size
    k_rows, v_rows = int64s_at(k_rows_at, num_tokens), int64s_at(v_rows_at, num_tokens)
    first, last = find_share(args, num_tokens)
    for token in range(first, last):
        cos, sin = floats_at(cos_at + token * size * 4, size), floats_at(sin_at + token * size * 4, size)
        for head in range(num_heads + num_kv_heads):
            at = qk_at + (token * qk_stride + head * size) * 4
            low, high = floats_at(at, half), floats_at(at + half * 4, half)
            if head < num_heads:
                to = q_at + (token * num_heads + head) * size * 4
            else:
                to = layer_at + (k_rows[token] * slot + (head - num_heads) * size) * 4
            out_low, out_high = floats_at(to, half), floats_at(to + half * 4, half)
            for i in range(half):
                a, b = low[i], high[i]
                out_low[i] = a * cos[i] + b * sin[i]
                out_high[i] = b * cos[half + i] + a * sin[half + i]
        v, out = floats_at(v_at + token * v_stride * 4, slot), floats_at(layer_at + v_rows[token] * slot * 4, slot)
        for i in range(slot):
            out[i] = v[i]


@helper
def _add_columns(sums, columns_at, x):
    """Add to sums [W] the columns of a block, [I, W], times the elements of x [I]."""
    width, column = len(sums), 0
    while column + 4 <= len(x):
        at = columns_at + column * width * 4
        w0, w1 = floats_at(at, width), floats_at(at + width * 4, width)
        w2, w3 = floats_at(at + width * 8, width), floats_at(at + width * 12, width)
        x0, x1, x2, x3 = x[column], x[column + 1], x[column + 2], x[column + 3]
        for i in range(width):
            sums[i] += (w0[i] * x0 + w1[i] * x1) + (w2[i] * x2 + w3[i] * x3)
        column += 4
    while column < len(x):
        w, x0 = floats_at(columns_at + column * width * 4, width), x[column]
        for i in range(width):
            sums[i] += w[i] * x0
        column += 1


@kernel
def multiply_row(data):
    """out [O] = W x [I] + bias or none, of W in blocks, [ceil(O / width), room, width]."""
    args = carray(data, (10,), np.int64)
    x_at, blocks_at, width, room, bias_at, out_at = args[2], args[3], args[4], args[5], args[6], args[7]
    num_in, num_out = args[8], args[9]
    x, sums = floats_at(x_at, num_in), np.empty(width, np.float32)
    first, last = find_share(args, (num_out + width - 1) // width)
    for block in range(first, last):
        begin = block * width
        for i in range(width):
            sums[i] = np.float32(0)
        _add_columns(sums, blocks_at + begin * room * 4, x)
        count = min(width, num_out - begin)
        out = floats_at(out_at + begin * 4, count)
        if bias_at != 0:
            bias = floats_at(bias_at + begin * 4, count)
            for i in range(count):
                out[i] = sums[i] + bias[i]
        else:
            for i in range(count):
                out[i] = sums[i]


@helper
def _scale_row(x, out, least):
    """Write x [D], divided by the greatest of its magnitudes, but not by less than `least`; return the divisor."""
    scale, poison = max(greatest_magnitude(x), least), np.float32(0)
    factor = np.float32(1) / scale
    for i in range(len(x)):
        poison += x[i] * np.float32(0)  # not a number where x is not finite
        out[i] = x[i] * factor
    return scale + poison


@helper
def _dot_bytes(x, at):
    """The sum of products of x [I], int16, and of 8-bit integers [I]. Casts keep it in 32 bits, in which it is exact."""
    w, total = int8s_at(at, len(x)), np.int32(0)
    for i in range(len(x)):
        total = np.int32(total + np.int32(np.int32(x[i]) * np.int32(w[i])))
    return total


@njit(fastmath={"contract"}, error_model="numpy", boundscheck=False)
def _unscale_in_order(out, factors, scale, bias_at):
    """In place out [W] * factors [W] * scale + bias [W] or none, in this order: FBGEMM's, and that of unscale_rows."""
    if bias_at != 0:
        bias = floats_at(bias_at, len(out))
        for i in range(len(out)):
            out[i] = out[i] * factors[i] * scale + bias[i]
    else:
        for i in range(len(out)):
            out[i] = out[i] * factors[i] * scale


@kernel
def multiply_row_int8(data):
    """out [O] = W x [I] * factors [O] + bias or none, of 8-bit W [O, I]; `levels` on either side of 0 for x."""
    args, numbers = carray(data, (12,), np.int64), carray(data, (12,), np.float64)
    x_at, weight_at, factors_at, bias_at, out_at = args[2], args[3], args[4], args[5], args[6]
    num_in, num_out = args[7], args[8]
    levels, zero, least = np.float32(numbers[9]), np.float32(numbers[10]), np.float32(numbers[11])
    scaled, integers = np.empty(num_in, np.float32), np.empty(num_in, np.int16)
    scale = _scale_row(floats_at(x_at, num_in), scaled, least)
    for i in range(num_in):
        level = np.rint(scaled[i] * levels + zero) - zero  # in one rounding, as FBGEMM has it
        level = level if level > -levels else -levels
        integers[i] = np.int16(np.int32(min(level, levels)))
    first, last = find_share(args, num_out)
    out = floats_at(out_at + first * 4, last - first)
    for i in range(last - first):
        out[i] = np.float32(_dot_bytes(integers, weight_at + (first + i) * num_in))
    _unscale_in_order(out, floats_at(factors_at + first * 4, last - first), scale, bias_at + first * 4 if bias_at != 0 else 0)


@kernel
def scale_rows(data):
    """out [T, D]: x [T, D], each row divided by the greatest of its magnitudes, but not by less than `least`; scales [T]."""
    args, least = carray(data, (8,), np.int64), np.float32(carray(data, (8,), np.float64)[7])
    x_at, out_at, scales_at, num_rows, size = args[2], args[3], args[4], args[5], args[6]
    scales = floats_at(scales_at, num_rows)
    first, last = find_share(args, num_rows)
    for row in range(first, last):
        x, out = floats_at(x_at + row * size * 4, size), floats_at(out_at + row * size * 4, size)
        scales[row] = _scale_row(x, out, least)


@kernel
def unscale_rows(data):
    """y [T, D] in place: each row times its scale, plus bias [D] or none."""
    args = carray(data, (7,), np.int64)
    y_at, scales_at, bias_at, num_rows, size = args[2], args[3], args[4], args[5], args[6]
    scales = floats_at(scales_at, num_rows)
    first, last = find_share(args, num_rows * size)
    while first < last:
        row, column = first // size, first % size
        count = min(last - first, size - column)
        y, scale = floats_at(y_at + first * 4, count), scales[row]
        if bias_at != 0:
            bias = floats_at(bias_at + column * 4, count)
            for i in range(count):
                y[i] = y[i] * scale + bias[i]
        else:
            for i in range(count):
                y[i] *= scale
        first += count


@exact_kernel
def penalise(data):
    """logits [S, V] in place; P rows, each with a history of tokens [N] at stride, and one token more or none.

    counts [V], all 0 before and after: twice how often the output has a token, and one more once its logit is changed.
    """
    args = carray(data, (14,), np.int64)
    logits_at, vocab_size, num_rows, where, penalties = args[2], args[3], args[4], args[5], args[6]
    where, penalties = int64s_at(where, num_rows), floats_at(penalties, 3 * num_rows)
    tokens_at, stride, which = args[7], args[8], int64s_at(args[9], num_rows)
    num_known, num_prompts, awaited = (
        int64s_at(args[10], num_rows),
        int64s_at(args[11], num_rows),
        int64s_at(args[12], num_rows),
    )
    counts = int32s_at(args[13], vocab_size)
    for row in range(num_rows):
        logits = floats_at(logits_at + where[row] * vocab_size * 4, vocab_size)
        count, more = num_known[row], awaited[row]
        tokens = int32s_at(tokens_at + which[row] * stride * 4, count)
        repetition, frequency, presence = penalties[row], penalties[num_rows + row], penalties[2 * num_rows + row]
        for at in range(num_prompts[row], count):
            counts[tokens[at]] += 2
        if more >= 0:
            counts[more] += 2
        for at in range(count + 1):
            if at == count and more < 0:
                break
            token = tokens[at] if at < count else more
            seen = counts[token]
            if seen & 1:
                continue
            value = logits[token]
            value = value / repetition if value > 0 else value * repetition
            if seen > 0:
                value -= np.float32(np.float64(frequency) * np.float64(seen >> 1) + np.float64(presence))
            logits[token] = value
            counts[token] = seen | 1
        for at in range(count):
            counts[tokens[at]] = 0
        if more >= 0:
            counts[more] = 0
