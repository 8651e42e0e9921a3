"""Penalties of what a sequence has seen, compiled, with numpy's arithmetic: see engine_service/compute/penalties.py."""

import numpy as np
from numba import carray

from .kernel_parts import exact_kernel, floats_at, int32s_at, int64s_at


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
