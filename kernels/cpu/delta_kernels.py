"""Gated delta nets and Mamba 2, compiled, in float32 or bfloat16: a short convolution, and the rule of either.

The file is loaded once for each kind of number, see compiled.load_kernels. Threads share the key heads of all rows: an item is
the queries and keys of one head and the values of the value heads that it serves, with the convolution's inputs of those
numbers, so that no item reads what another one writes. A row's tokens are computed one by one, which on a CPU takes as many
operations as the chunked form; its matrices stay in a thread's own memory, cut into tiles, until a page is to have them. So the
result does not depend on where a row is cut, to the bit. Arithmetic is in float32.
"""

import numpy as np
from numba import carray

from ..types import STATE_CHUNK
from .delta_tiles import COLUMNS, copy_columns, pass_tile, pass_tile_of_channels
from .kernel_parts import exp, find_share, floats_at, get_or, helper, int64s_at, keep, named_kernel
from .number_formats import element_of_file

NUM_BYTES, row_at, number_of, element_of = element_of_file(__name__)


@helper
def _take_matrix(page_at, tiles_at, key_dim, value_dim, tile_bytes):
    """Copy a head's matrix [Dk, Dv] into tiles; from address 0, which is before the first token, zeros."""
    for key in range(key_dim):
        column, to, at = 0, tiles_at + key * COLUMNS * 4, page_at + key * value_dim * 4
        while column < value_dim:
            if page_at != 0 and column + COLUMNS <= value_dim:
                copy_columns(at + column * 4, to)
            else:
                tile = floats_at(to, COLUMNS)
                tile[:] = np.float32(0)
                if page_at != 0:
                    rest = floats_at(at + column * 4, value_dim - column)
                    for i in range(value_dim - column):
                        tile[i] = rest[i]
            column += COLUMNS
            to += tile_bytes


@helper
def _put_matrix(page_at, tiles_at, key_dim, value_dim, tile_bytes):
    """Copy it back."""
    for key in range(key_dim):
        column, origin, at = 0, tiles_at + key * COLUMNS * 4, page_at + key * value_dim * 4
        while column < value_dim:
            if column + COLUMNS <= value_dim:
                copy_columns(origin, at + column * 4)
            else:
                tile, rest = floats_at(origin, COLUMNS), floats_at(at + column * 4, value_dim - column)
                for i in range(value_dim - column):
                    rest[i] = tile[i]
            column += COLUMNS
            origin += tile_bytes


@helper
def _take_taps(weight_at, parts, taps, kernel, channels):
    """The convolution's weights of some channels [kernel, channels], of [C, kernel]."""
    own = 0
    for place, count in parts:
        weights = row_at(weight_at + place * kernel * NUM_BYTES, count * kernel)
        for i in range(count):
            for tap in range(kernel):
                taps[tap * channels + own + i] = number_of(weights[i * kernel + tap])
        own += count


@helper
def _take_inputs(address, parts, inputs):
    """The numbers of some channels of a row; from address 0, which is before the first token, zeros."""
    own = 0
    for place, count in parts:
        if address == 0:
            inputs[own : own + count] = np.float32(0)
        else:
            row = row_at(address + place * NUM_BYTES, count)
            for i in range(count):
                inputs[own + i] = number_of(row[i])
        own += count


@helper
def _put_inputs(address, parts, inputs):
    """Put them back."""
    own = 0
    for place, count in parts:
        row = row_at(address + place * NUM_BYTES, count)
        for i in range(count):
            row[i] = element_of(inputs[own + i])
        own += count


@helper
def _convolve(window, taps, biases, made, num_tokens, kernel, channels):
    """made [T, channels] = silu of biases and the sums of window [kernel - 1 + T, channels] by taps [kernel, channels]."""
    for token in range(num_tokens):
        out = made[token * channels : (token + 1) * channels]
        out[:] = biases
        for tap in range(kernel):
            weights, inputs = taps[tap * channels : (tap + 1) * channels], window[(token + tap) * channels :]
            for i in range(channels):
                out[i] += weights[i] * inputs[i]
        for i in range(channels):
            out[i] = out[i] / (np.float32(1) + exp(-out[i]))


@helper
def _norm(heads, to, size, factor):
    """Write `factor` times the head, at length 1, to `to`, whose numbers behind it stay."""
    total = np.float32(0)
    for i in range(size):
        total += heads[i] * heads[i]
    scale = np.float32(factor / np.sqrt(np.float64(total) + 1e-6))
    for i in range(size):
        to[i] = heads[i] * scale


@helper
def _find_step(gate, bias):
    """The softplus of both."""
    x = np.float64(gate) + np.float64(bias)
    return x if x > 20.0 else np.log1p(np.exp(x))


@helper
def _find_softplus(x):
    """The same of one number, within 2e-7 of it, in a loop that is vectorised: log(1 + u) is 2 artanh(u / (2 + u))."""
    u = exp(-abs(x))
    s = u / (np.float32(2) + u)
    t = s * s
    p = np.float32(1 / 13) * t + np.float32(1 / 11)
    p = p * t + np.float32(1 / 9)
    p = p * t + np.float32(1 / 7)
    p = p * t + np.float32(1 / 5)
    p = p * t + np.float32(1 / 3)
    p = p * t + np.float32(1)
    return (x if x > np.float32(0) else np.float32(0)) + np.float32(2) * s * p


@helper
def _decay_channels(gates, biases, log, least, q, k, own_k, decays, size):
    """What each dimension keeps goes to `decays`; keys go on to own_k, and q and k become those that read what is kept."""
    rate = np.float32(np.exp(np.float64(log)))
    for i in range(size):
        x = number_of(gates[i]) + biases[i]
        if least < np.float32(0):
            decays[i] = exp(least / (np.float32(1) + exp(-rate * x)))
        else:
            decays[i] = exp(-rate * _find_softplus(x))
    for i in range(size):
        own_k[i] = k[i]
        q[i], k[i] = q[i] * decays[i], k[i] * decays[i]


@helper
def _find_decay(step, log):
    """How much of a head's matrix a token keeps."""
    return np.float32(np.exp(-np.exp(np.float64(log)) * step))


@named_kernel(__name__)
def delta_rule(data):
    """Rows of tokens through their states. delta.py says what each argument is."""
    args, numbers = carray(data, (31,), np.int64), carray(data, (31,), np.float64)
    mixed_at, mixed_stride, gates_at, gates_stride, weight_at = args[2], args[3], args[4], args[5], args[6]
    bias_at, log_at, out_at = args[7], args[8], args[9]
    memory_at, memory_stride, conv_at, conv_stride = args[10], args[11], args[12], args[13]
    reads_at, starts_at, firsts_at, lens_at, writes_at = args[14], args[15], args[16], args[17], args[18]
    num_rows, num_keys, each, key_dim, value_dim, kernel = args[19], args[20], args[21], args[22], args[23], args[24]
    conv_bias_at, skip_at, channels_at, channels_stride = args[25], args[26], args[27], args[28]
    least, most = numbers[29], numbers[30]
    is_scan, has_channels = skip_at != 0, channels_at != 0
    values, num_heads, height, before = each * value_dim, num_keys * each, key_dim + key_dim % 2, kernel - 1
    channels, row_len = 2 * key_dim + values, 2 * num_keys * key_dim + num_heads * value_dim
    num_tiles = (value_dim + COLUMNS - 1) // COLUMNS
    tile_len = (height + 1) * COLUMNS  # with a row of room, so that tiles do not share the same places of the cache
    matrix_len, head_len = num_tiles * tile_len, key_dim * value_dim
    tiles = np.zeros(each * matrix_len, np.float32)
    taps, conv_biases = np.empty(kernel * channels, np.float32), np.zeros(channels, np.float32)
    window = np.empty((before + STATE_CHUNK) * channels, np.float32)
    made = np.empty(STATE_CHUNK * channels, np.float32)
    # Each token's query and key; where channels decay, these as they read what was before, the key itself, and the decays.
    width_turned = (4 if has_channels else 2) * height
    turned = np.zeros(STATE_CHUNK * width_turned, np.float32)
    # Each token's query times its key; by head what it keeps, and what it corrects, or adds.
    scales = np.empty((2 * each + 1) * STATE_CHUNK, np.float32)
    vectors = np.zeros(3 * COLUMNS, np.float32)
    tiles_at, turned_at, deltas_at = tiles.ctypes.data, turned.ctypes.data, vectors.ctypes.data
    held_at, made_at = deltas_at + 4 * COLUMNS, deltas_at + 8 * COLUMNS
    deltas, held, read = floats_at(deltas_at, COLUMNS), floats_at(held_at, COLUMNS), floats_at(made_at, COLUMNS)
    biases = floats_at(bias_at, num_heads * key_dim if has_channels else num_heads)
    logs, reads = floats_at(log_at, num_heads), int64s_at(reads_at, num_rows)
    first_item, last_item = find_share(args, num_rows * num_keys)
    taps_of = np.int64(-1)
    for item in range(first_item, last_item):
        head, row = item // num_rows, item % num_rows
        parts = (
            (head * key_dim, key_dim),
            ((num_keys + head) * key_dim, key_dim),
            (2 * num_keys * key_dim + head * values, values),
        )
        if taps_of != head:
            taps_of = head
            _take_taps(weight_at, parts, taps, kernel, channels)
            if is_scan:
                _take_inputs(conv_bias_at, parts, conv_biases)
        page = reads[row]
        for i in range(before):
            at = conv_at + (page * conv_stride + i * row_len) * NUM_BYTES
            _take_inputs(at if page > 0 else 0, parts, window[i * channels :])
        for number in range(each):
            at = memory_at + (page * memory_stride + (head * each + number) * head_len) * 4
            _take_matrix(at if page > 0 else 0, tiles_at + number * matrix_len * 4, key_dim, value_dim, tile_len * 4)
        for chunk in range(get_or(starts_at, row, row), get_or(starts_at, row + 1, row + 1)):
            first, count = get_or(firsts_at, chunk, chunk), get_or(lens_at, chunk, np.int64(1))
            for token in range(count):
                _take_inputs(
                    mixed_at + (first + token) * mixed_stride * NUM_BYTES, parts, window[(before + token) * channels :]
                )
            _convolve(window, taps, conv_biases, made, count, kernel, channels)
            for token in range(count):
                own = turned[token * width_turned :]
                q, k = own, own[height:]
                if is_scan:
                    for i in range(key_dim):
                        q[i], k[i] = made[token * channels + i], made[token * channels + key_dim + i]
                else:
                    _norm(made[token * channels :], q, key_dim, 1.0 / np.sqrt(np.float64(key_dim)))
                    _norm(made[token * channels + key_dim :], k, key_dim, 1.0)
                overlap = np.float32(0)
                for i in range(key_dim):
                    overlap += q[i] * k[i]
                scales[token] = overlap
                gates = row_at(gates_at + (first + token) * gates_stride * NUM_BYTES, 2 * num_heads)
                if has_channels:
                    at = channels_at + ((first + token) * channels_stride + head * key_dim) * NUM_BYTES
                    own_biases, bound = biases[head * key_dim :], np.float32(least)
                    row_gates, own_k, kept = row_at(at, key_dim), own[2 * height :], own[3 * height :]
                    _decay_channels(row_gates, own_biases, logs[head], bound, q, k, own_k, kept, key_dim)
                    scales[STATE_CHUNK + token] = np.float32(1)
                for number in range(each):
                    value_head = head * each + number
                    if not has_channels:
                        gate = number_of(gates[value_head if is_scan else num_heads + value_head])
                        step = _find_step(gate, biases[value_head])
                        if is_scan:
                            step = least if step < least else most if step > most else step
                            scales[(2 * number + 2) * STATE_CHUNK + token] = np.float32(step)
                        scales[(2 * number + 1) * STATE_CHUNK + token] = _find_decay(step, logs[value_head])
                        if is_scan:
                            continue
                    scales[(2 * number + 2) * STATE_CHUNK + token] = np.float32(1) / (
                        np.float32(1) + exp(-number_of(gates[value_head]))
                    )
            for number in range(each):
                skip = floats_at(skip_at, num_heads)[head * each + number] if is_scan else np.float32(0)
                decays, betas = scales[(2 * number + 1) * STATE_CHUNK :], scales[(2 * number + 2) * STATE_CHUNK :]
                for tile in range(num_tiles):
                    tile_at, column = tiles_at + (number * matrix_len + tile * tile_len) * 4, tile * COLUMNS
                    width, q_at = min(COLUMNS, value_dim - column), turned_at
                    deltas[:] = np.float32(0)
                    pass_tile(tile_at, height, np.float32(1), q_at, deltas_at, q_at + 4 * height, q_at, held_at, made_at)
                    for token in range(count):
                        v = made[token * channels + 2 * key_dim + number * value_dim + column :]
                        place = ((first + token) * num_heads + head * each + number) * value_dim + column
                        out = row_at(out_at + place * NUM_BYTES, width)
                        if is_scan:
                            for i in range(width):
                                deltas[i] = v[i] * betas[token]
                                out[i] = element_of(decays[token] * read[i] + scales[token] * deltas[i] + skip * v[i])
                        else:
                            for i in range(width):
                                deltas[i] = (v[i] - decays[token] * held[i]) * betas[token]
                                out[i] = element_of(decays[token] * read[i] + scales[token] * deltas[i])
                        k_at, decays_at = q_at + (8 if has_channels else 4) * height, q_at + 12 * height
                        q_at += 4 * width_turned if token + 1 < count else 0
                        read_at = q_at + 4 * height
                        if has_channels:
                            pass_tile_of_channels(tile_at, height, decays_at, k_at, deltas_at, read_at, q_at, held_at, made_at)
                        else:
                            pass_tile(tile_at, height, decays[token], k_at, deltas_at, read_at, q_at, held_at, made_at)
            page = int64s_at(writes_at, chunk + 1)[chunk]
            for i in range(before):
                inputs = window[i * channels : (i + 1) * channels]
                for channel in range(channels):
                    inputs[channel] = window[(count + i) * channels + channel]
                if page > 0:
                    _put_inputs(conv_at + (page * conv_stride + i * row_len) * NUM_BYTES, parts, inputs)
            for number in range(each if page > 0 else 0):
                at = memory_at + (page * memory_stride + (head * each + number) * head_len) * 4
                _put_matrix(at, tiles_at + number * matrix_len * 4, key_dim, value_dim, tile_len * 4)
    keep(tiles)
    keep(turned)
    keep(vectors)
