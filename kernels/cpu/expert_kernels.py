"""How rows choose among experts, and how what experts give is added up, compiled; their products are in product_kernels.py.

The file is loaded once for each kind of number, see compiled.load_kernels. Arithmetic is in float32.
"""

import numpy as np
from numba import carray

from .kernel_parts import exp, find_share, floats_at, int64s_at, named_kernel
from .number_formats import element_of_file

NUM_BYTES, row_at, number_of, element_of = element_of_file(__name__)


@named_kernel(__name__)
def choose(data):
    """The K experts of each row with the greatest merits, the first of equal ones, and their shares; see the launcher."""
    args, numbers = carray(data, (14,), np.int64), carray(data, (14,), np.float64)
    logits_at, correction_at, scales_at, shares_at, chosen_at = args[2], args[3], args[4], args[5], args[6]
    num_rows, count, num_chosen, is_sigmoid, is_renormalised = args[7], args[8], args[9], args[10], args[11]
    scores, merits = np.empty(count, np.float32), np.empty(count, np.float32)
    first, last = find_share(args, num_rows)
    for row in range(first, last):
        logits, total = row_at(logits_at + row * count * NUM_BYTES, count), np.float32(0)
        highest = np.float32(0)
        for i in range(count * (1 - is_sigmoid)):
            highest = number_of(logits[i]) if i == 0 else max(highest, number_of(logits[i]))
        for i in range(count):
            scores[i] = exp(number_of(logits[i]) - highest)
            total += scores[i]
        for i in range(count):
            scores[i] /= np.float32(1) + scores[i] if is_sigmoid else total
            merits[i] = scores[i]
            if correction_at != 0:
                merits[i] += floats_at(correction_at, count)[i]
        chosen, shares = int64s_at(chosen_at + row * num_chosen * 8, num_chosen), np.float32(0)
        for place in range(num_chosen):
            best, found = 0, np.float32(-np.inf)
            for i in range(count):
                if merits[i] > found or merits[i] != merits[i]:  # what is not a number is not lost
                    best, found = i, merits[i]
            chosen[place], merits[best] = best, np.float32(-np.inf)
            shares += scores[best]
        factor = np.float32(numbers[12])
        if is_renormalised != 0:
            factor /= shares + np.float32(numbers[13])
        out = row_at(shares_at + row * num_chosen * NUM_BYTES, num_chosen)
        for place in range(num_chosen):
            share = scores[chosen[place]] * factor
            if scales_at != 0:
                share *= number_of(row_at(scales_at, count)[chosen[place]])
            out[place] = element_of(share)


@named_kernel(__name__)
def mix(data):
    """out [T, H]: rows [T, K, H], each times its share [T, K], added up."""
    args = carray(data, (8,), np.int64)
    rows_at, shares_at, out_at, num_rows, num_chosen, size = args[2], args[3], args[4], args[5], args[6], args[7]
    sums, shares = np.empty(size, np.float32), row_at(shares_at, num_rows * num_chosen)
    first, last = find_share(args, num_rows)
    for row in range(first, last):
        sums[:] = np.float32(0)
        for pair in range(row * num_chosen, (row + 1) * num_chosen):
            given, share = row_at(rows_at + pair * size * NUM_BYTES, size), number_of(shares[pair])
            for i in range(size):
                sums[i] += number_of(given[i]) * share
        out = row_at(out_at + row * size * NUM_BYTES, size)
        for i in range(size):
            out[i] = element_of(sums[i])
