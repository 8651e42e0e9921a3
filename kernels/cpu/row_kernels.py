"""Passes over rows, compiled, in float32 or bfloat16: norms, gates, and rotation with the store of K and V.

The file is loaded once for each of them, see compiled.load_kernels. Arithmetic is in float32.
"""

import numpy as np
from numba import carray

from .kernel_parts import exp, find_share, int64s_at, named_kernel
from .number_formats import element_of_file

NUM_BYTES, row_at, number_of, element_of = element_of_file(__name__)


@named_kernel(__name__)
def rms_norm(data):
    """x [T, N, D], row t at stride; weight [N, D]; residual of x's shape or none, added to x in place; out [T, N, D]."""
    args, numbers = carray(data, (11,), np.int64), carray(data, (11,), np.float64)
    x_at, residual_at, weight_at, out_at = args[2], args[3], args[4], args[5]
    num_rows, num_heads, size, stride = args[6], args[7], args[8], args[9]
    eps = np.float32(numbers[10])
    first, last = find_share(args, num_rows)
    for row in range(first, last):
        for head in range(num_heads):
            x = row_at(x_at + (row * stride + head * size) * NUM_BYTES, size)
            weight = row_at(weight_at + head * size * NUM_BYTES, size)
            out = row_at(out_at + (row * num_heads + head) * size * NUM_BYTES, size)
            total = np.float32(0)
            if residual_at != 0:
                residual = row_at(residual_at + (row * num_heads + head) * size * NUM_BYTES, size)
                for i in range(size):
                    x[i] = element_of(number_of(x[i]) + number_of(residual[i]))
                    value = number_of(x[i])
                    total += value * value
            else:
                for i in range(size):
                    value = number_of(x[i])
                    total += value * value
            # In 64 bits: with `afn` the root of 32 bits is the processor's estimate, refined, and it scales the whole row.
            factor = np.float32(1.0 / np.sqrt(np.float64(total) / size + np.float64(eps)))
            for i in range(size):
                out[i] = element_of(number_of(x[i]) * factor * number_of(weight[i]))


@named_kernel(__name__)
def gate(data):
    """out [T, I] = act(gate) * up of gate and up, rows t at strides; kind: 0 silu, 1 gelu by tanh, 2 clamped_swiglu."""
    args, numbers = carray(data, (12,), np.int64), carray(data, (12,), np.float64)
    gate_at, gate_stride, up_at, up_stride, out_at = args[2], args[3], args[4], args[5], args[6]
    num_rows, size, kind, alpha, limit = args[7], args[8], args[9], np.float32(numbers[10]), np.float32(numbers[11])
    first, last = find_share(args, num_rows * size)
    while first < last:
        row, column = first // size, first % size
        count = min(last - first, size - column)
        gates = row_at(gate_at + (row * gate_stride + column) * NUM_BYTES, count)
        ups = row_at(up_at + (row * up_stride + column) * NUM_BYTES, count)
        out = row_at(out_at + first * NUM_BYTES, count)
        if kind == 2:
            for i in range(count):
                x, up = number_of(gates[i]), number_of(ups[i])
                x = limit if x > limit else x
                up = limit if up > limit else up
                up = -limit if up < -limit else up
                out[i] = element_of(x / (np.float32(1) + exp(-alpha * x)) * (up + np.float32(1)))
        elif kind == 1:
            for i in range(count):
                x = number_of(gates[i])
                bent = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)  # 1 + tanh(u) is 2 sigmoid(2 u)
                out[i] = element_of(x / (np.float32(1) + exp(-bent)) * number_of(ups[i]))
        else:
            for i in range(count):
                x = number_of(gates[i])
                out[i] = element_of(x / (np.float32(1) + exp(-x)) * number_of(ups[i]))
        first += count


@named_kernel(__name__)
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
        cos, sin = row_at(cos_at + token * size * NUM_BYTES, size), row_at(sin_at + token * size * NUM_BYTES, size)
        for head in range(num_heads + num_kv_heads):
            at = qk_at + (token * qk_stride + head * size) * NUM_BYTES
            low, high = row_at(at, half), row_at(at + half * NUM_BYTES, half)
            if head < num_heads:
                to = q_at + (token * num_heads + head) * size * NUM_BYTES
            else:
                to = layer_at + (k_rows[token] * slot + (head - num_heads) * size) * NUM_BYTES
            out_low, out_high = row_at(to, half), row_at(to + half * NUM_BYTES, half)
            for i in range(half):
                a, b = number_of(low[i]), number_of(high[i])
                out_low[i] = element_of(a * number_of(cos[i]) + b * number_of(sin[i]))
                out_high[i] = element_of(b * number_of(cos[half + i]) + a * number_of(sin[half + i]))
        v, out = row_at(v_at + token * v_stride * NUM_BYTES, slot), row_at(layer_at + v_rows[token] * slot * NUM_BYTES, slot)
        for i in range(slot):
            out[i] = v[i]


@named_kernel(__name__)
def gated_norm(data):
    """out [T, H, D] = x [T, H, D], each head's root mean square 1, times weight [D] and silu of gate, row t at stride.

    is_behind: the weight is [H, D], and the root mean square is 1 of what is gated. is_sigmoid: the gate's sigmoid, no silu.
    """
    args, numbers = carray(data, (13,), np.int64), carray(data, (13,), np.float64)
    x_at, gate_at, weight_at, out_at = args[2], args[3], args[4], args[5]
    num_rows, num_heads, size, stride, is_behind, is_sigmoid = args[6], args[7], args[8], args[9], args[10], args[11]
    eps = numbers[12]
    weight = row_at(weight_at, size)
    gated = np.empty(size * is_behind, np.float32)
    first, last = find_share(args, num_rows * num_heads)
    for item in range(first, last):
        row, head = item // num_heads, item % num_heads
        x, out = row_at(x_at + item * size * NUM_BYTES, size), row_at(out_at + item * size * NUM_BYTES, size)
        gates = row_at(gate_at + (row * stride + head * size) * NUM_BYTES, size)
        total = np.float32(0)
        if is_behind != 0:
            weight = row_at(weight_at + head * size * NUM_BYTES, size)
            for i in range(size):
                g = number_of(gates[i])
                gated[i] = number_of(x[i]) * g / (np.float32(1) + exp(-g))
                total += gated[i] * gated[i]
            factor = np.float32(1.0 / np.sqrt(np.float64(total) / size + eps))
            for i in range(size):
                out[i] = element_of(gated[i] * factor * number_of(weight[i]))
            continue
        for i in range(size):
            total += number_of(x[i]) * number_of(x[i])
        factor = np.float32(1.0 / np.sqrt(np.float64(total) / size + eps))
        for i in range(size):
            g = number_of(gates[i])
            top = np.float32(1) if is_sigmoid != 0 else g
            out[i] = element_of(number_of(x[i]) * factor * number_of(weight[i]) * top / (np.float32(1) + exp(-g)))


@named_kernel(__name__)
def weigh_by_sigmoid(data):
    """out [T, I] = x [T, I] times the sigmoid of gate [T, I] or [T, 1], row t at stride."""
    args = carray(data, (9,), np.int64)
    x_at, gate_at, out_at, num_rows, size, width, stride = args[2:]
    first, last = find_share(args, num_rows)
    for row in range(first, last):
        x, out = row_at(x_at + row * size * NUM_BYTES, size), row_at(out_at + row * size * NUM_BYTES, size)
        gates = row_at(gate_at + row * stride * NUM_BYTES, width)
        for i in range(size):
            out[i] = element_of(number_of(x[i]) / (np.float32(1) + exp(-number_of(gates[i if width > 1 else 0]))))


@named_kernel(__name__)
def add(data):
    """out [N] = x [N] + other [N], and that times the number at `scale`, where there is one."""
    args = carray(data, (7,), np.int64)
    first, last = find_share(args, args[6])
    x, other = row_at(args[2] + first * NUM_BYTES, last - first), row_at(args[3] + first * NUM_BYTES, last - first)
    out, scale = row_at(args[5] + first * NUM_BYTES, last - first), np.float32(1)
    if args[4] != 0:
        scale = number_of(row_at(args[4], 1)[0])
    for i in range(last - first):
        out[i] = element_of(number_of(element_of(number_of(x[i]) + number_of(other[i]))) * scale)


@named_kernel(__name__)
def square_of_relu(data):
    """out [N] = the square of x [N] where it is positive, else 0; what is not a number stays so."""
    args = carray(data, (5,), np.int64)
    first, last = find_share(args, args[4])
    x, out = row_at(args[2] + first * NUM_BYTES, last - first), row_at(args[3] + first * NUM_BYTES, last - first)
    for i in range(last - first):
        value = number_of(x[i])
        out[i] = element_of(np.float32(0) if value < np.float32(0) else value * value)
