"""Decode and prefill attention over paged keys and values, compiled, in float32 or bfloat16.

The file is loaded once for each kind of number, see compiled.load_kernels. What a tile of keys is to some queries is in
attention_tiles.py. Threads share the keys that the queries of all KV heads see. In a decode, the sequences of a thread's share that
begin with the same blocks read these together (Hydragen, Juravsky et al., arXiv 2402.05099); their tables show which do.
"""

from typing import Final

import numpy as np
from numba import carray

from .attention_tiles import (
    MOST_QUERIES,
    SEE_ALL,
    TILE,
    attend_tile,
    begin_queries,
    begin_with,
    cut_memory,
    end_query,
    find_memory,
    pad,
    take_over,
    turn_query,
)
from .kernel_parts import find_share, floats_at, helper, int32s_at, kernel_of
from .number_formats import element_of_file, uint16s_at
from .tiles import BFLOAT16, FLOAT32, make_multiply

NUM_BYTES, row_at, number_of, element_of = element_of_file(__name__)
_LEAST_SHARED: Final = 32  # keys that are worth reading together
_PER_STEP: Final = 4 // NUM_BYTES
_multiply_keys = make_multiply(FLOAT32 if NUM_BYTES == 4 else BFLOAT16)


@helper
def _turn_query(memory, num_queries, place, q_at, size):
    """Write a query into column `place` of the turned ones, in steps of four bytes."""
    if NUM_BYTES == 4:
        turn_query(memory, num_queries, place, q_at, size)
    else:
        queries, q = pad(num_queries), row_at(q_at, size)
        turned = uint16s_at(memory[3], queries * size)
        for i in range(size):
            turned[(i // 2 * queries + place) * 2 + i % 2] = np.uint16(q[i])


@helper
def _read_values(values_at, at, count, slot_bytes, size, elements):
    for key in range(count):
        v, out = row_at(at + key * slot_bytes, size), floats_at(values_at + key * elements * 4, elements)
        for i in range(size):
            out[i] = number_of(v[i])
        for i in range(size, elements):
            out[i] = np.float32(0)


@helper
def _attend_keys(memory, num_queries, size, keys_at, layout, table, first, last, scale, cap, seen):
    """Let the queries attend to keys [first, last) of a table.

    layout: bytes of a block, from K to V, and of a slot, and tokens of a block. seen: see attend_tile.
    """
    block_bytes, side_bytes, slot_bytes, block_size = layout
    queries, elements, num_steps = pad(num_queries), pad(size), size // _PER_STEP
    for begin in range(first, last, TILE):
        end, place = min(begin + TILE, last), begin
        while place < end:
            offset = place % block_size
            run = min(block_size - offset, end - place)
            at = keys_at + np.int64(table[place // block_size]) * block_bytes + offset * slot_bytes
            scores_at, row_bytes = memory[0] + (place - begin) * queries * 4, queries * 4
            _multiply_keys(scores_at, row_bytes, at, slot_bytes, 4, memory[3], row_bytes, num_steps, run, queries, 0)
            _read_values(memory[1] + (place - begin) * elements * 4, at + side_bytes, run, slot_bytes, size, elements)
            place += run
        attend_tile(memory, num_queries, size, begin, end - begin, scale, cap, seen)


@helper
def _end_query(memory, num_queries, query, size, out_at):
    """Write what a query has attended to."""
    out, sums = row_at(out_at, size), end_query(memory, num_queries, query, size)
    for i in range(size):
        out[i] = element_of(sums[i])


@helper
def _end_queries(memory, num_queries, size, out_at, has_seen):
    """Write all queries of a sequence; zeros where they have seen no key."""
    for query in range(num_queries):
        to = out_at + query * size * NUM_BYTES
        if has_seen:
            _end_query(memory, num_queries, query, size, to)
        else:
            out = row_at(to, size)
            for i in range(size):
                out[i] = element_of(np.float32(0))


@helper
def _count_equal(first, second):
    """Equal entries at the beginning of two tables."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


@helper
def _find_members(members, is_done, first, last, tables_at, table_bytes, lens, plain, block_size):
    """Sequences of [first, last) that begin as `first` does, itself in front: how many, and the keys that they share."""
    members[0], longest = first, 0
    if not plain[first]:
        return 1, 0
    own = int32s_at(tables_at + first * table_bytes, np.int64(lens[first]) // block_size)
    for seq in range(first + 1, last):
        if plain[seq] and not is_done[seq]:
            other = int32s_at(tables_at + seq * table_bytes, np.int64(lens[seq]) // block_size)
            longest = max(longest, _count_equal(own, other))
    if longest * block_size < _LEAST_SHARED:
        return 1, 0
    count, common = 1, longest
    for seq in range(first + 1, last):
        if plain[seq] and not is_done[seq] and count < len(members):
            equal = _count_equal(own, int32s_at(tables_at + seq * table_bytes, np.int64(lens[seq]) // block_size))
            if 2 * equal >= longest:
                members[count], common = seq, min(common, equal)
                count += 1
    return count, common * block_size


@kernel_of(__name__)
def attend_decode(data):
    """out [S, N, D]: one query each, over its first keys, the sinks, and those from `starts` on; see the launcher.

    q [S, N, D] scores the latter, and another query like it the sinks.
    """
    args, numbers = carray(data, (23,), np.int64), carray(data, (23,), np.float64)
    q_at, q_bytes, sink_q_at, sink_q_bytes = args[2], args[3] * NUM_BYTES, args[4], args[5] * NUM_BYTES
    layer_at, tables_at, table_bytes = args[6], args[9], args[10] * 4
    num_seqs, num_heads, num_kv_heads, size, block_size = args[14], args[15], args[16], args[17], args[18]
    scale, cap, out_at, logits_at = np.float32(numbers[19]), np.float32(numbers[20]), args[21], args[22]
    group, head_bytes = num_heads // num_kv_heads, size * NUM_BYTES
    layout = args[7] * NUM_BYTES, args[8] * NUM_BYTES, num_kv_heads * head_bytes, block_size
    lens, starts, sinks = int32s_at(args[11], num_seqs), int32s_at(args[12], num_seqs), int32s_at(args[13], num_seqs)
    begins, plain, num_keys = np.empty(num_seqs, np.int64), np.empty(num_seqs, np.bool_), np.int64(0)
    for seq in range(num_seqs):
        begins[seq], plain[seq] = num_keys, starts[seq] == 0 and sinks[seq] == 0
        num_keys += np.int64(lens[seq]) - starts[seq] + sinks[seq]
    share_first, share_last = find_share(args, num_keys * num_kv_heads)
    share_last += share_last == num_keys * num_kv_heads  # the sequences without keys at the end
    most = max(MOST_QUERIES // group, 1)
    members, is_done = np.empty(most, np.int64), np.empty(num_seqs, np.bool_)
    spaces = np.zeros(find_memory(most * group, size) + find_memory(group, size), np.float32)
    own = cut_memory(spaces.ctypes.data + find_memory(most * group, size) * 4, group, size)
    for head in range(num_kv_heads):
        keys_at, head_at = layer_at + head * head_bytes, head * group * head_bytes
        own_logits_at, first = logits_at + head * group * 4, 0
        while first < num_seqs and head * num_keys + begins[first] < share_first:
            first += 1
        last = first
        while last < num_seqs and head * num_keys + begins[last] < share_last:
            is_done[last] = False
            last += 1
        for leader in range(first, last):
            if is_done[leader]:
                continue
            count, common = _find_members(members, is_done, leader, last, tables_at, table_bytes, lens, plain, block_size)
            shared = cut_memory(spaces.ctypes.data, count * group, size)
            if common > 0:
                begin_queries(shared, count * group, size)
                for place in range(count * group):
                    at = q_at + members[place // group] * q_bytes + head_at + place % group * head_bytes
                    _turn_query(shared, count * group, place, at, size)
                    if logits_at != 0:
                        begin_with(shared, count * group, place, place + 1, own_logits_at + place % group * 4)
                table = int32s_at(tables_at + leader * table_bytes, common // block_size)
                _attend_keys(shared, count * group, size, keys_at, layout, table, 0, common, scale, cap, SEE_ALL)
            for place in range(count):
                seq = members[place]
                is_done[seq] = True
                length, start, sink = np.int64(lens[seq]), np.int64(starts[seq]), np.int64(sinks[seq])
                table = int32s_at(tables_at + seq * table_bytes, (length + block_size - 1) // block_size)
                begin_queries(own, group, size)
                if common > 0:
                    take_over(own, group, shared, count * group, place * group, size)
                elif logits_at != 0:
                    begin_with(own, group, 0, group, own_logits_at)
                if sink > 0:
                    for query in range(group):
                        _turn_query(own, group, query, sink_q_at + seq * sink_q_bytes + head_at + query * head_bytes, size)
                    _attend_keys(own, group, size, keys_at, layout, table, 0, sink, scale, cap, SEE_ALL)
                for query in range(group):
                    _turn_query(own, group, query, q_at + seq * q_bytes + head_at + query * head_bytes, size)
                _attend_keys(own, group, size, keys_at, layout, table, max(start, common), length, scale, cap, SEE_ALL)
                to = out_at + seq * num_heads * head_bytes + head_at
                _end_queries(own, group, size, to, length > start)


@helper
def _count_keys(length, num_tokens, window, most):
    """Keys that the tiles of a sequence's queries see, of one KV head."""
    count = np.int64(0)
    for tile in range(0, num_tokens, most):
        position, tokens = length - num_tokens + tile, min(most, num_tokens - tile)
        count += position + tokens - max(np.int64(0), position - window + 1)
    return count


@kernel_of(__name__)
def attend_prefill(data):
    """out [T, N, D] of q [T, N, D]: sequence s has the queries [locs[s], locs[s + 1]), the last of its lens[s] tokens.

    Each sees the `window` keys up to its own. Threads share the keys that tiles of queries see.
    """
    args, numbers = carray(data, (22,), np.int64), carray(data, (22,), np.float64)
    q_at, q_bytes, layer_at, tables_at, table_bytes = args[2], args[3] * NUM_BYTES, args[4], args[7], args[8] * 4
    lens_at, locs_at, num_seqs, num_heads, num_kv_heads = args[9], args[10], args[11], args[12], args[13]
    size, block_size, window, out_at, logits_at = args[14], args[15], args[16], args[17], args[18]
    scale, cap = np.float32(numbers[19]), np.float32(numbers[20])
    group, head_bytes = num_heads // num_kv_heads, size * NUM_BYTES
    layout = args[5] * NUM_BYTES, args[6] * NUM_BYTES, num_kv_heads * head_bytes, block_size
    lens, locs = int32s_at(lens_at, num_seqs), int32s_at(locs_at, num_seqs + 1)
    most = max(MOST_QUERIES // group, 1)
    space = np.zeros(find_memory(most * group, size), np.float32)
    total = np.int64(0)
    for seq in range(num_seqs):
        total += _count_keys(np.int64(lens[seq]), np.int64(locs[seq + 1] - locs[seq]), window, most)
    share_first, share_last = find_share(args, total * num_kv_heads)
    begin = np.int64(0)
    for seq in range(num_seqs):
        length, num_tokens = np.int64(lens[seq]), np.int64(locs[seq + 1] - locs[seq])
        table = int32s_at(tables_at + seq * table_bytes, (length + block_size - 1) // block_size)
        for tile in range(0, num_tokens, most):
            tokens, position = min(most, num_tokens - tile), length - num_tokens + tile
            first, last = max(np.int64(0), position - window + 1), position + tokens
            for head in range(num_kv_heads):
                is_own = share_first <= begin < share_last
                begin += last - first
                if not is_own:
                    continue
                memory, num_queries = cut_memory(space.ctypes.data, tokens * group, size), tokens * group
                begin_queries(memory, num_queries, size)
                at = (locs[seq] + tile) * q_bytes + head * group * head_bytes
                for place in range(num_queries):
                    own_at = q_at + at + place // group * q_bytes + place % group * head_bytes
                    _turn_query(memory, num_queries, place, own_at, size)
                    if logits_at != 0:
                        begin_with(memory, num_queries, place, place + 1, logits_at + (head * group + place % group) * 4)
                keys_at, seen = layer_at + head * head_bytes, (position, group, window)
                _attend_keys(memory, num_queries, size, keys_at, layout, table, first, last, scale, cap, seen)
                for place in range(num_queries):
                    own = ((locs[seq] + tile + place // group) * num_heads + head * group + place % group) * head_bytes
                    _end_query(memory, num_queries, place, size, out_at + own)
