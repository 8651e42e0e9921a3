"""Gated short convolutions, compiled, in float32 or bfloat16.

The file is loaded once for each kind of number, see compiled.load_kernels. Threads share the channels of all rows: an item is
some channels of one row, which nothing else reads or writes, so a page may be read and written in one step.
"""

import numpy as np
from numba import carray

from .kernel_parts import find_share, get_or, helper, int64s_at, named_kernel
from .number_formats import element_of_file

NUM_BYTES, row_at, number_of, element_of = element_of_file(__name__)
_CHANNELS = 256  # of an item


@helper
def _round(number):
    """As the kind of number has it."""
    return number_of(element_of(number))


@named_kernel(__name__)
def short_conv(data):
    """Rows of tokens through their states. short_conv.py says what each argument is."""
    args = carray(data, (16,), np.int64)
    mixed_at, weight_at, bias_at, out_at, window_at, stride = args[2], args[3], args[4], args[5], args[6], args[7]
    reads_at, starts_at, firsts_at, lens_at, writes_at = args[8], args[9], args[10], args[11], args[12]
    num_rows, channels, kernel = args[13], args[14], args[15]
    before, num_parts = kernel - 1, (channels + _CHANNELS - 1) // _CHANNELS
    taps, held = np.empty((kernel, _CHANNELS), np.float32), np.empty((kernel, _CHANNELS), np.float32)
    total, reads = np.empty(_CHANNELS, np.float32), int64s_at(reads_at, num_rows)
    first_item, last_item = find_share(args, num_rows * num_parts)
    taps_of = np.int64(-1)
    for item in range(first_item, last_item):
        part, row = item // num_rows, item % num_rows
        place = part * _CHANNELS
        count = min(_CHANNELS, channels - place)
        if taps_of != part:
            taps_of = part
            weights = row_at(weight_at + place * kernel * NUM_BYTES, count * kernel)
            for tap in range(kernel):
                for i in range(count):
                    taps[tap, i] = number_of(weights[i * kernel + tap])
        page, slot = reads[row], np.int64(0)  # held[slot] is the oldest input
        for tap in range(before):
            inputs = row_at(window_at + (page * stride + tap * channels + place) * NUM_BYTES, count)
            for i in range(count):
                held[tap, i] = number_of(inputs[i]) if page > 0 else np.float32(0)
        for chunk in range(get_or(starts_at, row, row), get_or(starts_at, row + 1, row + 1)):
            first = get_or(firsts_at, chunk, chunk)
            for token in range(first, first + get_or(lens_at, chunk, np.int64(1))):
                mixed = mixed_at + (3 * token * channels + place) * NUM_BYTES
                firsts, seconds = row_at(mixed, count), row_at(mixed + channels * NUM_BYTES, count)
                thirds = row_at(mixed + 2 * channels * NUM_BYTES, count)
                out = row_at(out_at + (token * channels + place) * NUM_BYTES, count)
                newest = held[(slot + before) % kernel]
                for i in range(count):
                    newest[i] = _round(number_of(firsts[i]) * number_of(thirds[i]))
                if bias_at == 0:
                    total[:count] = np.float32(0)
                else:
                    biases = row_at(bias_at + place * NUM_BYTES, count)
                    for i in range(count):
                        total[i] = number_of(biases[i])
                for tap in range(kernel):
                    inputs, weights = held[(slot + tap) % kernel], taps[tap]
                    for i in range(count):
                        total[i] += inputs[i] * weights[i]
                for i in range(count):
                    out[i] = element_of(number_of(seconds[i]) * _round(total[i]))
                slot = (slot + 1) % kernel
            page = int64s_at(writes_at, chunk + 1)[chunk]
            for tap in range(before if page > 0 else 0):
                inputs = row_at(window_at + (page * stride + tap * channels + place) * NUM_BYTES, count)
                for i in range(count):
                    inputs[i] = element_of(held[(slot + tap) % kernel, i])
