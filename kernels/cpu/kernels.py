"""The loops, compiled by numba for the CPU that they run on; the launchers in this folder call them.

Owns the arithmetic of the compiled path. Rules. A kernel is a C function of one pointer: to a row of 8-byte arguments, of
which the launcher knows the order. The first two are libgomp's omp_get_thread_num and omp_get_num_threads, or zeros where one
thread does it all; each thread takes its own share of the items. A kernel trusts its arguments. Numbers that are not finite
stay so: the engine looks for them in the logits, so no flag of fast arithmetic that forbids them is set.

All of it is in one file, because numba's cache on disk is renewed when the file of a kernel has changed, and asks for no
other.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

_FLAGS: Final = {"reassoc", "contract", "arcp", "nsz", "afn"}
_SIGNATURE: Final = types.void(types.voidptr)
_TILE: Final = 128  # keys of one pass: their scores stay in the first cache


def _can_keep() -> bool:
    """Whether numba finds a folder for what it compiles: beside this file, or the user's cache directory."""
    try:
        njit(cache=True)(lambda: None)
    except RuntimeError:
        return False
    return True


ARE_KEPT: Final = _can_keep()


def _kernel(function: Callable[[Any], None]) -> Any:
    """Compile now, or take it from disk. Where it cannot be kept there, it is compiled by every process."""
    options = {"fastmath": _FLAGS, "error_model": "numpy", "boundscheck": False}
    return cfunc(_SIGNATURE, cache=ARE_KEPT, **options)(function)


def _exact_kernel(function: Callable[[Any], None]) -> Any:
    """The same with the arithmetic of numpy, for what has to be equal bit by bit."""
    return cfunc(_SIGNATURE, cache=ARE_KEPT, error_model="numpy", boundscheck=False)(function)


_helper = njit(fastmath=_FLAGS, error_model="numpy", boundscheck=False)


@intrinsic
def _pointer(typing_context, address, like):
    """The pointer at an address, to elements of the type of `like`."""
    element = types.CPointer(like)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(element))

    return element(types.int64, like), generate


@intrinsic
def _ask(typing_context, address):
    """Call the C function int f(void) at an address."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(ir.IntType(32), [])
        answer = builder.call(builder.inttoptr(arguments[0], function.as_pointer()), [])
        return builder.sext(answer, ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _float_of_bits(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _prefetch(typing_context, address):
    """Ask for the cache line at an address; the address may be any."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        )
        builder.call(function, [builder.inttoptr(arguments[0], pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@_helper
def _floats(address, count):
    return carray(_pointer(address, np.float32(0)), (count,))


@_helper
def _int64s(address, count):
    return carray(_pointer(address, np.int64(0)), (count,))


@_helper
def _int32s(address, count):
    return carray(_pointer(address, np.int32(0)), (count,))


@_helper
def _bytes(address, count):
    return carray(_pointer(address, np.int8(0)), (count,))


@_helper
def _share(args, num_items):
    """The items of this thread, half-open."""
    if args[0] == 0:
        return 0, num_items
    idx, count = _ask(args[0]), _ask(args[1])
    return num_items * idx // count, num_items * (idx + 1) // count


@_helper
def _exp(x):
    """e^x within 2e-7 of it, from a polynomial, because a call of the C library's would keep a loop from being vectorised."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@_kernel
def rms_norm(data):
    """x [T, N, D], row t at stride; weight [N, D]; residual of x's shape or none, added to x in place; out [T, N, D]."""
    args, numbers = carray(data, (12,), np.int64), carray(data, (12,), np.float64)
    x_at, residual_at, weight_at, out_at = args[2], args[3], args[4], args[5]
    num_rows, num_heads, size, stride = args[6], args[7], args[8], args[9]
    eps = np.float32(numbers[10])
    first, last = _share(args, num_rows)
    for row in range(first, last):
        for head in range(num_heads):
            x = _floats(x_at + (row * stride + head * size) * 4, size)
            weight = _floats(weight_at + head * size * 4, size)
            out = _floats(out_at + (row * num_heads + head) * size * 4, size)
            total = np.float32(0)
            if residual_at != 0:
                residual = _floats(residual_at + (row * num_heads + head) * size * 4, size)
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


@_kernel
def gate(data):
    """out [T, I] = act(gate) * up of gate_up [T, 2 I]; kind: 0 silu, 1 gelu by tanh, 2 clamped_swiglu."""
    args, numbers = carray(data, (9,), np.int64), carray(data, (9,), np.float64)
    gate_up_at, out_at, num_rows, size, kind = args[2], args[3], args[4], args[5], args[6]
    alpha, limit = np.float32(numbers[7]), np.float32(numbers[8])
    first, last = _share(args, num_rows * size)
    while first < last:
        row, column = first // size, first % size
        count = min(last - first, size - column)
        gates = _floats(gate_up_at + (row * 2 * size + column) * 4, count)
        ups = _floats(gate_up_at + (row * 2 * size + size + column) * 4, count)
        out = _floats(out_at + first * 4, count)
        if kind == 2:
            for i in range(count):
                x, up = gates[i], ups[i]
                x = limit if x > limit else x
                up = limit if up > limit else up
                up = -limit if up < -limit else up
                out[i] = x / (np.float32(1) + _exp(-alpha * x)) * (up + np.float32(1))
        elif kind == 1:
            for i in range(count):
                x = gates[i]
                bent = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)  # 1 + tanh(u) is 2 sigmoid(2 u)
                out[i] = x / (np.float32(1) + _exp(-bent)) * ups[i]
        else:
            for i in range(count):
                x = gates[i]
                out[i] = x / (np.float32(1) + _exp(-x)) * ups[i]
        first += count


@_kernel
def rotary_store_kv(data):
    """Rotate qk [T, N + M, D], copy its queries to q [T, N, D], and keys and v [T, M, D] to rows of slots."""
    args = carray(data, (16,), np.int64)
    qk_at, qk_stride, v_at, v_stride, cos_at, sin_at, q_at = args[2], args[3], args[4], args[5], args[6], args[7], args[8]
    layer_at, k_rows_at, v_rows_at = args[9], args[10], args[11]
    num_tokens, num_heads, num_kv_heads, size = args[12], args[13], args[14], args[15]
    half, slot = size // 2, num_kv_heads * size
    k_rows, v_rows = _int64s(k_rows_at, num_tokens), _int64s(v_rows_at, num_tokens)
    first, last = _share(args, num_tokens)
    for token in range(first, last):
        cos, sin = _floats(cos_at + token * size * 4, size), _floats(sin_at + token * size * 4, size)
        for head in range(num_heads + num_kv_heads):
            at = qk_at + (token * qk_stride + head * size) * 4
            low, high = _floats(at, half), _floats(at + half * 4, half)
            if head < num_heads:
                to = q_at + (token * num_heads + head) * size * 4
            else:
                to = layer_at + (k_rows[token] * slot + (head - num_heads) * size) * 4
            out_low, out_high = _floats(to, half), _floats(to + half * 4, half)
            for i in range(half):
                a, b = low[i], high[i]
                out_low[i] = a * cos[i] + b * sin[i]
                out_high[i] = b * cos[half + i] + a * sin[half + i]
        v, out = _floats(v_at + token * v_stride * 4, slot), _floats(layer_at + v_rows[token] * slot * 4, slot)
        for i in range(slot):
            out[i] = v[i]


@_helper
def _run_of_slots(base, table, position, last, block_stride, block_size, slot):
    """The run of neighbouring slots that begins at a position: its address, the way to the next block's, and its end."""
    index, offset = position // block_size, position % block_size
    block = np.int64(table[index])
    following = np.int64(table[min(index + 1, len(table) - 1)])
    at = base + (block * block_stride + offset * slot) * 4
    return at, (following - block) * block_stride * 4, position + min(block_size - offset, last - position)


@_helper
def _prefetch_rows(at, slot, size):
    """Ask for the head at an address and for the same head of the next three slots."""
    for row in range(4):
        for line in range(0, size, 16):
            _prefetch(at + (row * slot + line) * 4)


@_helper
def _scores(scores, q_at, keys_at, table, first, last, block_stride, block_size, slot, size, heads, group):
    """scores [heads * group, _TILE] of the heads' queries and the keys of positions [first, last)."""
    position = first
    while position < last:
        at, ahead, end = _run_of_slots(keys_at, table, position, last, block_stride, block_size, slot)
        while position + 4 <= end:
            for head in range(heads):
                _prefetch_rows(at + ahead + head * size * 4, slot, size)
                k0, k1 = _floats(at + head * size * 4, size), _floats(at + (slot + head * size) * 4, size)
                k2, k3 = _floats(at + (2 * slot + head * size) * 4, size), _floats(at + (3 * slot + head * size) * 4, size)
                for member in range(head * group, head * group + group):
                    q = _floats(q_at + member * size * 4, size)
                    s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                    for i in range(size):
                        s0 += q[i] * k0[i]
                        s1 += q[i] * k1[i]
                        s2 += q[i] * k2[i]
                        s3 += q[i] * k3[i]
                    place = member * _TILE + position - first
                    scores[place] = s0
                    scores[place + 1] = s1
                    scores[place + 2] = s2
                    scores[place + 3] = s3
            at += slot * 16
            position += 4
        while position < end:
            for head in range(heads):
                k = _floats(at + head * size * 4, size)
                for member in range(head * group, head * group + group):
                    q = _floats(q_at + member * size * 4, size)
                    total = np.float32(0)
                    for i in range(size):
                        total += q[i] * k[i]
                    scores[member * _TILE + position - first] = total
            at += slot * 4
            position += 1


@njit(fastmath=True, error_model="numpy", boundscheck=False)
def _highest(scores):
    """The greatest score, or any number among scores of which one is not finite: their exponentials are not finite either."""
    highest = scores[0]
    for i in range(1, len(scores)):
        highest = max(highest, scores[i])
    return highest


@njit(fastmath=True, error_model="numpy", boundscheck=False)
def _greatest_magnitude(row):
    """Any number for a row that is not finite."""
    greatest = np.float32(0)
    for i in range(len(row)):
        greatest = max(greatest, abs(row[i]))
    return greatest


@_helper
def _tanh(x):
    """Small ones from a series: in the quotient most of their digits would be lost."""
    square = x * x
    series = np.float32(62 / 2835) * square - np.float32(17 / 315)
    series = (series * square + np.float32(2 / 15)) * square - np.float32(1 / 3)
    small = x + x * square * series
    large = np.float32(1) - np.float32(2) / (_exp(np.float32(2) * x) + np.float32(1))
    return small if square < np.float32(1 / 16) else large


@_helper
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
        value = _exp(scores[i] - highest)
        scores[i] = value
        total += value
    return highest, total


@_helper
def _weigh(scores, out_at, values_at, table, first, last, block_stride, block_size, slot, size, heads, group):
    """Add to out [heads * group, size] the values of positions [first, last) times their scores."""
    position = first
    while position < last:
        at, ahead, end = _run_of_slots(values_at, table, position, last, block_stride, block_size, slot)
        while position + 4 <= end:
            for head in range(heads):
                _prefetch_rows(at + ahead + head * size * 4, slot, size)
                v0, v1 = _floats(at + head * size * 4, size), _floats(at + (slot + head * size) * 4, size)
                v2, v3 = _floats(at + (2 * slot + head * size) * 4, size), _floats(at + (3 * slot + head * size) * 4, size)
                for member in range(head * group, head * group + group):
                    out = _floats(out_at + member * size * 4, size)
                    place = member * _TILE + position - first
                    w0, w1, w2, w3 = scores[place], scores[place + 1], scores[place + 2], scores[place + 3]
                    for i in range(size):
                        out[i] += w0 * v0[i] + w1 * v1[i] + w2 * v2[i] + w3 * v3[i]
            at += slot * 16
            position += 4
        while position < end:
            for head in range(heads):
                v = _floats(at + head * size * 4, size)
                for member in range(head * group, head * group + group):
                    out = _floats(out_at + member * size * 4, size)
                    weight = scores[member * _TILE + position - first]
                    for i in range(size):
                        out[i] += weight * v[i]
            at += slot * 4
            position += 1


@_helper
def _scale(row_at, size, factor):
    row = _floats(row_at, size)
    for i in range(size):
        row[i] *= factor


@_helper
def _count_keys(lens, window):
    """The keys that the queries of all sequences see."""
    count = np.int64(0)
    for seq in range(len(lens)):
        count += min(np.int64(lens[seq]), window)
    return count


@_helper
def _share_of_keys(args, num_keys):
    """As _share, of keys; the last share has the sequences without keys at the end."""
    first, last = _share(args, num_keys)
    return first, last + 1 if last == num_keys else last


@_helper
def _own_heads(begin, num_keys, num_kv_heads, first, last):
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


@_helper
def _begin_rows(highest, totals, logits_at, row_at, num_rows, size):
    """Rows that have seen no key, or where there are logits of sinks a key without a value."""
    logits = _floats(logits_at, num_rows)
    for row in range(num_rows):
        highest[row], totals[row] = np.float32(-np.inf), np.float32(0)
        if logits_at != 0:
            highest[row], totals[row] = logits[row], np.float32(1)
    zeros = _floats(row_at, num_rows * size)
    for i in range(num_rows * size):
        zeros[i] = np.float32(0)


@_helper
def _weights(scores, count, highest, totals, row_at, num_rows, size, scale, cap, have_seen):
    """Of `count` scores of each row in place their weights, and what the rows have seen scaled down to the new highest."""
    for row in range(num_rows):
        place = row * _TILE
        own, total = _exponentials(scores[place : place + count], highest[row], scale, cap)
        if have_seen and own > highest[row]:
            factor = _exp(highest[row] - own)
            totals[row] *= factor
            _scale(row_at + row * size * 4, size, factor)
        highest[row] = own
        totals[row] += total


@_helper
def _end_rows(totals, row_at, num_rows, size):
    for row in range(num_rows):
        _scale(row_at + row * size * 4, size, np.float32(1) / totals[row])


@_kernel
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
    lens, starts, sinks = _int32s(args[11], num_seqs), _int32s(args[12], num_seqs), _int32s(args[13], num_seqs)
    num_keys = np.int64(0)
    for seq in range(num_seqs):
        num_keys += np.int64(lens[seq]) - starts[seq] + sinks[seq]
    share_first, share_last = _share_of_keys(args, num_keys * num_kv_heads)
    scores = np.empty(num_heads * _TILE, np.float32)
    highest, totals = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
    begin = np.int64(0)
    for seq in range(num_seqs):
        length, start, sink = np.int64(lens[seq]), np.int64(starts[seq]), np.int64(sinks[seq])
        first_head, heads = _own_heads(begin, length - start + sink, num_kv_heads, share_first, share_last)
        begin += (length - start + sink) * num_kv_heads
        if heads == 0:
            continue
        own_heads = first_head * group
        row_at, keys_at = out_at + (seq * num_heads + own_heads) * size * 4, layer_at + first_head * size * 4
        values_at = keys_at + kv_stride * 4
        table = _int32s(tables_at + seq * table_stride * 4, (length + block_size - 1) // block_size)
        own_logits_at = logits_at + own_heads * 4 if logits_at != 0 else logits_at
        _begin_rows(highest, totals, own_logits_at, row_at, heads * group, size)
        have_seen = logits_at != 0
        for part in range(2):
            if part == 0:
                query_at, position, end = sink_q_at + (seq * sink_q_stride + own_heads * size) * 4, np.int64(0), sink
            else:
                query_at, position, end = q_at + (seq * q_stride + own_heads * size) * 4, start, length
            for first in range(position, end, _TILE):
                last = min(first + _TILE, end)
                _scores(scores, query_at, keys_at, table, first, last, block_stride, block_size, slot, size, heads, group)
                _weights(scores, last - first, highest, totals, row_at, heads * group, size, scale, cap, have_seen)
                _weigh(scores, row_at, values_at, table, first, last, block_stride, block_size, slot, size, heads, group)
                have_seen = True
        if length > start:
            _end_rows(totals, row_at, heads * group, size)


@_helper
def _add_columns(sums, columns_at, x):
    """Add to sums [W] the columns of a block, [I, W], times the elements of x [I]."""
    width, column = len(sums), 0
    while column + 4 <= len(x):
        at = columns_at + column * width * 4
        w0, w1 = _floats(at, width), _floats(at + width * 4, width)
        w2, w3 = _floats(at + width * 8, width), _floats(at + width * 12, width)
        x0, x1, x2, x3 = x[column], x[column + 1], x[column + 2], x[column + 3]
        for i in range(width):
            sums[i] += (w0[i] * x0 + w1[i] * x1) + (w2[i] * x2 + w3[i] * x3)
        column += 4
    while column < len(x):
        w, x0 = _floats(columns_at + column * width * 4, width), x[column]
        for i in range(width):
            sums[i] += w[i] * x0
        column += 1


@_kernel
def multiply_row(data):
    """out [O] = W x [I] + bias or none, of W in blocks, [ceil(O / width), room, width]."""
    args = carray(data, (10,), np.int64)
    x_at, blocks_at, width, room, bias_at, out_at = args[2], args[3], args[4], args[5], args[6], args[7]
    num_in, num_out = args[8], args[9]
    x, sums = _floats(x_at, num_in), np.empty(width, np.float32)
    first, last = _share(args, (num_out + width - 1) // width)
    for block in range(first, last):
        begin = block * width
        for i in range(width):
            sums[i] = np.float32(0)
        _add_columns(sums, blocks_at + begin * room * 4, x)
        count = min(width, num_out - begin)
        out = _floats(out_at + begin * 4, count)
        if bias_at != 0:
            bias = _floats(bias_at + begin * 4, count)
            for i in range(count):
                out[i] = sums[i] + bias[i]
        else:
            for i in range(count):
                out[i] = sums[i]


@_helper
def _scale_row(x, out, least):
    """Write x [D], divided by the greatest of its magnitudes, but not by less than `least`; answer by which."""
    scale, poison = max(_greatest_magnitude(x), least), np.float32(0)
    factor = np.float32(1) / scale
    for i in range(len(x)):
        poison += x[i] * np.float32(0)  # not a number where x is not finite
        out[i] = x[i] * factor
    return scale + poison


@_helper
def _dot_bytes(x, at):
    """The sum of products of x [I], int16, and of 8-bit integers [I]. Casts keep it in 32 bits, in which it is exact."""
    w, total = _bytes(at, len(x)), np.int32(0)
    for i in range(len(x)):
        total = np.int32(total + np.int32(np.int32(x[i]) * np.int32(w[i])))
    return total


@njit(fastmath={"contract"}, error_model="numpy", boundscheck=False)
def _unscale_in_order(out, factors, scale, bias_at):
    """In place out [W] * factors [W] * scale + bias [W] or none, in this order: FBGEMM's, and that of unscale_rows."""
    if bias_at != 0:
        bias = _floats(bias_at, len(out))
        for i in range(len(out)):
            out[i] = out[i] * factors[i] * scale + bias[i]
    else:
        for i in range(len(out)):
            out[i] = out[i] * factors[i] * scale


@_kernel
def multiply_row_int8(data):
    """out [O] = W x [I] * factors [O] + bias or none, of 8-bit W [O, I]; `levels` on either side of 0 for x."""
    args, numbers = carray(data, (12,), np.int64), carray(data, (12,), np.float64)
    x_at, weight_at, factors_at, bias_at, out_at = args[2], args[3], args[4], args[5], args[6]
    num_in, num_out = args[7], args[8]
    levels, zero, least = np.float32(numbers[9]), np.float32(numbers[10]), np.float32(numbers[11])
    scaled, integers = np.empty(num_in, np.float32), np.empty(num_in, np.int16)
    scale = _scale_row(_floats(x_at, num_in), scaled, least)
    for i in range(num_in):
        level = np.rint(scaled[i] * levels + zero) - zero  # in one rounding, as FBGEMM has it
        level = level if level > -levels else -levels
        integers[i] = np.int16(np.int32(min(level, levels)))
    first, last = _share(args, num_out)
    out = _floats(out_at + first * 4, last - first)
    for i in range(last - first):
        out[i] = np.float32(_dot_bytes(integers, weight_at + (first + i) * num_in))
    _unscale_in_order(out, _floats(factors_at + first * 4, last - first), scale, bias_at + first * 4 if bias_at != 0 else 0)


@_kernel
def scale_rows(data):
    """out [T, D]: x [T, D], each row divided by the greatest of its magnitudes, but not by less than `least`; scales [T]."""
    args, least = carray(data, (8,), np.int64), np.float32(carray(data, (8,), np.float64)[7])
    x_at, out_at, scales_at, num_rows, size = args[2], args[3], args[4], args[5], args[6]
    scales = _floats(scales_at, num_rows)
    first, last = _share(args, num_rows)
    for row in range(first, last):
        x, out = _floats(x_at + row * size * 4, size), _floats(out_at + row * size * 4, size)
        scales[row] = _scale_row(x, out, least)


@_kernel
def unscale_rows(data):
    """y [T, D] in place: each row times its scale, plus bias [D] or none."""
    args = carray(data, (7,), np.int64)
    y_at, scales_at, bias_at, num_rows, size = args[2], args[3], args[4], args[5], args[6]
    scales = _floats(scales_at, num_rows)
    first, last = _share(args, num_rows * size)
    while first < last:
        row, column = first // size, first % size
        count = min(last - first, size - column)
        y, scale = _floats(y_at + first * 4, count), scales[row]
        if bias_at != 0:
            bias = _floats(bias_at + column * 4, count)
            for i in range(count):
                y[i] = y[i] * scale + bias[i]
        else:
            for i in range(count):
                y[i] *= scale
        first += count


@_exact_kernel
def penalise(data):
    """logits [S, V] in place; P rows, each with a history of tokens [N] at stride, and one token more or none.

    counts [V], all 0 before and after: twice how often the output has a token, and one more once its logit is changed.
    """
    args = carray(data, (14,), np.int64)
    logits_at, vocab_size, num_rows, where, penalties = args[2], args[3], args[4], args[5], args[6]
    where, penalties = _int64s(where, num_rows), _floats(penalties, 3 * num_rows)
    tokens_at, stride, which = args[7], args[8], _int64s(args[9], num_rows)
    num_known, num_prompts, awaited = _int64s(args[10], num_rows), _int64s(args[11], num_rows), _int64s(args[12], num_rows)
    counts = _int32s(args[13], vocab_size)
    for row in range(num_rows):
        logits = _floats(logits_at + where[row] * vocab_size * 4, vocab_size)
        count, more = num_known[row], awaited[row]
        tokens = _int32s(tokens_at + which[row] * stride * 4, count)
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
