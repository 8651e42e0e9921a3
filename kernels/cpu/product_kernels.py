"""Products of rows and a weight, compiled: out = W x + b, of rows of float32 or bfloat16.

The file is loaded once for each of them, see compiled.load_kernels. A weight lies in blocks of `width` outputs, [blocks, steps,
width, numbers of a step]: see tiles.py. Threads share the outputs, in slices of a block.
"""

from typing import Final

import numpy as np
from numba import carray

from .kernel_parts import find_share, floats_at, keep, named_kernel
from .number_formats import element_of_file
from .tiles import BFLOAT16, DEEP, FLOAT32, PANEL, find_slice, make_multiply

NUM_BYTES, row_at, number_of, element_of = element_of_file(__name__)
_PER_STEP: Final = 4 // NUM_BYTES
_multiply = make_multiply(FLOAT32 if NUM_BYTES == 4 else BFLOAT16)


@named_kernel(__name__)
def multiply(data):
    """out [T, O] = x [T, I] W^T + bias [O] or none, of W in blocks, [ceil(O / width), room / per step, width, per step]."""
    args = carray(data, (11,), np.int64)
    x_at, num_rows, num_in, blocks_at, width, room = args[2], args[3], args[4], args[5], args[6], args[7]
    bias_at, out_at, num_out = args[8], args[9], args[10]
    size, row_bytes = find_slice(args, width, num_out), num_in * NUM_BYTES
    num_steps, step_bytes = num_in // _PER_STEP, width * 4
    sums = np.empty(PANEL * size, np.float32)
    sums_at, bias = sums.ctypes.data, row_at(bias_at, num_out)
    first, last = find_share(args, (num_out + size - 1) // size)
    for begin in range(first * size, last * size, size):
        weights_at = blocks_at + begin // width * width * room * NUM_BYTES + begin % width * 4
        count = min(size, num_out - begin)
        for row in range(0, num_rows, PANEL):
            rows, done = min(np.int64(PANEL), num_rows - row), np.int64(0)
            while done < num_steps:
                steps, of_x = min(np.int64(DEEP), num_steps - done), x_at + row * row_bytes + done * 4
                of_weights = weights_at + done * step_bytes
                _multiply(sums_at, size * 4, of_x, row_bytes, 4, of_weights, step_bytes, steps, rows, size, done)
                done += steps
            for own in range(rows):
                total = floats_at(sums_at + own * size * 4, count)
                out = row_at(out_at + ((row + own) * num_out + begin) * NUM_BYTES, count)
                if bias_at != 0:
                    for i in range(count):
                        out[i] = element_of(total[i] + number_of(bias[begin + i]))
                else:
                    for i in range(count):
                        out[i] = element_of(total[i])
    keep(sums)
