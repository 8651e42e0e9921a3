"""Products of rows and a weight, compiled: out = W x + b, of rows of float32 or bfloat16.

The file is loaded once for each of them, see compiled.load_kernels. A weight lies in blocks of `width` outputs, [blocks, steps,
width, numbers of a step]: see tiles.py. Threads share the outputs, in slices of a block, and take them as they get to them.
"""

from typing import Final

import numpy as np
from numba import carray

from .kernel_parts import floats_at, get_or, helper, int64s_at, keep, named_kernel, order_by_expert, take_share
from .number_formats import element_of_file
from .tiles import BFLOAT16, DEEP, FLOAT32, PANEL, find_slice, make_multiply

NUM_BYTES, row_at, number_of, element_of = element_of_file(__name__)
_PER_STEP: Final = 4 // NUM_BYTES
_multiply = make_multiply(FLOAT32 if NUM_BYTES == 4 else BFLOAT16)


@helper
def _multiply_slice(sums_at, x_at, num_rows, num_in, blocks, bias_at, out_at, order_at, num_out, begin, size):
    """The outputs [begin, begin + size) of rows. blocks: address, width and room of a weight. sums_at: PANEL times size.

    order_at: int64 [rows], where each row's outputs go; 0: in order.
    """
    blocks_at, width, room = blocks
    row_bytes, num_steps, step_bytes = num_in * NUM_BYTES, num_in // _PER_STEP, width * 4
    weights_at = blocks_at + begin // width * width * room * NUM_BYTES + begin % width * 4
    count, bias = min(size, num_out - begin), row_at(bias_at, num_out)
    for row in range(0, num_rows, PANEL):
        rows, done = min(np.int64(PANEL), num_rows - row), np.int64(0)
        while done < num_steps:
            steps, of_x = min(np.int64(DEEP), num_steps - done), x_at + row * row_bytes + done * 4
            of_weights = weights_at + done * step_bytes
            _multiply(sums_at, size * 4, of_x, row_bytes, 4, of_weights, step_bytes, steps, rows, size, done)
            done += steps
        for own in range(rows):
            total = floats_at(sums_at + own * size * 4, count)
            place = get_or(order_at, row + own, row + own)
            out = row_at(out_at + (place * num_out + begin) * NUM_BYTES, count)
            if bias_at != 0:
                for i in range(count):
                    out[i] = element_of(total[i] + number_of(bias[begin + i]))
            else:
                for i in range(count):
                    out[i] = element_of(total[i])


@named_kernel(__name__)
def multiply(data):
    """out [T, O] = x [T, I] W^T + bias [O] or none, of W in blocks, [ceil(O / width), room / per step, width, per step]."""
    args = carray(data, (12,), np.int64)
    x_at, num_rows, num_in, blocks, bias_at, out_at, num_out = args[2], args[3], args[4], args[5:8], args[8], args[9], args[10]
    size, taken_at = find_slice(args, blocks[1], num_out), args.ctypes.data + 11 * 8
    sums, of_weight = np.empty(PANEL * size, np.float32), (blocks[0], blocks[1], blocks[2])
    num_slices = (num_out + size - 1) // size
    first, last = take_share(args, taken_at, num_slices)
    while first < last:
        for begin in range(first * size, last * size, size):
            _multiply_slice(sums.ctypes.data, x_at, num_rows, num_in, of_weight, bias_at, out_at, 0, num_out, begin, size)
        first, last = take_share(args, taken_at, num_slices)
    keep(sums)
    keep(args)


@named_kernel(__name__)
def multiply_experts(data):
    """out [T K, O] of x [T, I] or [T K, I]: each row times the weights of its K experts; addresses [E, 2] of blocks and biases.

    Threads share the outputs of all experts. Rows of one expert are copied to lie together.
    """
    args = carray(data, (13,), np.int64)
    x_at, chosen_at, num_pairs, per_row, num_in, table_at = args[2], args[3], args[4], args[5], args[6], args[7]
    width, room, out_at, num_out, taken_at = args[8], args[9], args[10], args[11], args.ctypes.data + 12 * 8
    size, row_bytes = find_slice(args, width, num_out), num_in * NUM_BYTES
    sums, own = np.empty(PANEL * size, np.float32), np.empty(num_pairs * row_bytes, np.uint8)
    order, begins = order_by_expert(int64s_at(chosen_at, num_pairs))
    num_slices, addresses = (num_out + size - 1) // size, int64s_at(table_at, 2 * (len(begins) - 1))
    end_item, num_items = 0, np.sum(begins[1:] > begins[:-1]) * num_slices
    first, last = take_share(args, taken_at, num_items)
    for expert in range(len(begins) - 1):
        count, blocks = begins[expert + 1] - begins[expert], (addresses[2 * expert], width, room)
        begin_item, end_item = end_item, end_item + num_slices * (count > 0)
        if first >= end_item:
            continue
        for row in range(count):
            own_row = row_at(own.ctypes.data + row * row_bytes, num_in)
            own_row[:] = row_at(x_at + order[begins[expert] + row] // per_row * row_bytes, num_in)
        ends = addresses[2 * expert + 1], out_at, order.ctypes.data + begins[expert] * 8, num_out
        while first < min(last, end_item):
            begin = (first - begin_item) * size
            _multiply_slice(sums.ctypes.data, own.ctypes.data, count, num_in, blocks, *ends, begin, size)
            first += 1
            if first == last:
                first, last = take_share(args, taken_at, num_items)
    keep(sums)
    keep(order)
    keep(own)
    keep(args)
