"""Decode and prefill attention over paged keys and values, compiled, in float32 or bfloat16.

The file is loaded once for each kind of number, see compiled.load_kernels. attention_tiles.py has what a tile of keys is to
some queries. In a decode, threads share the keys that the queries of all KV heads see, and the sequences of a thread's share
that begin with the same blocks read these together (Hydragen, Juravsky et al., arXiv 2402.05099); their tables show which do.
"""

from typing import Final

import numpy as np
from numba import carray

from .attention_tiles import MOST_QUERIES, SEE_ALL, TILE, begin_queries, count_own, end_query, take_over, weigh_scores
from .kernel_parts import find_share, helper, int32s_at, int64s_at, keep, named_kernel, prefetch, take_share
from .key_tiles import make_scores, make_sums
from .number_formats import element_of_file
from .tiles import BFLOAT16, FLOAT32, LANES

NUM_BYTES, row_at, number_of, element_of = element_of_file(__name__)
_PER_WORD: Final = 4 // NUM_BYTES
_score_keys = make_scores(FLOAT32 if NUM_BYTES == 4 else BFLOAT16)
_add_values = make_sums(FLOAT32 if NUM_BYTES == 4 else BFLOAT16)


@helper
def count_common(num_queries):
    """Floats of a thread for scores [queries, TILE], and the addresses of the keys of two tiles."""
    return (num_queries + 4) * TILE


@helper
def _list_keys(list_at, keys_at, layout, table, first, last):
    """Write the addresses of the keys [first, last), a tile at most, of the first head; the last one's again up to the end."""
    block_bytes, _, slot_bytes, block_size = layout
    addresses, place = int64s_at(list_at, TILE), first
    while place < last:
        offset = place % block_size
        at = keys_at + np.int64(table[place // block_size]) * block_bytes + offset * slot_bytes
        end = min(place + block_size - offset, last)
        for key in range(end - place):
            addresses[place - first + key] = at + key * slot_bytes
        place = end
    for key in range(max(last - first, 1), TILE):
        addresses[key] = addresses[key - 1]


@helper
def _prefetch(list_at, first, last, offset, head_bytes):
    """Ask for what lies behind some of the addresses of a list."""
    addresses = int64s_at(list_at, TILE)
    for key in range(first, last):
        for line in range(0, head_bytes, 64):
            prefetch(addresses[key] + offset + line)


@helper
def _attend_keys(common_at, own_at, num_heads, queries, size, keys_at, layout, table, first, last, scale, cap, seen):
    """Let the queries of some KV heads attend to keys [first, last) of a table.

    own_at: of the first head's memory; the others' are behind it. queries: of each head how many, the address of a list of
    theirs, and bytes from one head's to the next one's. keys_at: of the first head's keys in the first block. layout: bytes of
    a block, from K to V, and of a slot, and tokens of a block. seen: see weigh_scores.
    """
    num_queries, queries_at, next_bytes = queries
    side_bytes, head_bytes, own_bytes = layout[1], size * NUM_BYTES, count_own(num_queries, size) * 4
    scores_at, num_words = common_at, size // _PER_WORD
    list_at, next_at = common_at + num_queries * TILE * 4, common_at + (num_queries + 2) * TILE * 4
    if first < last:
        _list_keys(list_at, keys_at, layout, table, first, min(first + TILE, last))
    for begin in range(first, last, TILE):
        end, lists = min(begin + TILE, last), int64s_at(list_at, TILE)
        count, following = end - begin, min(end + TILE, last)
        if end < last:
            _list_keys(next_at, keys_at, layout, table, end, following)
        for head in range(num_heads):
            for key in range(0, count, LANES):
                _prefetch(list_at, key, min(key + LANES, count), side_bytes, head_bytes)
                to = scores_at + key * 4
                _score_keys(queries_at, head * next_bytes, num_queries, list_at + key * 8, num_words, to, TILE * 4)
            weigh_scores(scores_at, own_at + head * own_bytes, num_queries, size, begin, count, scale, cap, seen)
            for key in range(0, count, LANES):
                keys = min(LANES, count - key)
                if head + 1 < num_heads:
                    _prefetch(list_at, key, key + keys, head_bytes, head_bytes)
                elif end < last:
                    _prefetch(next_at, key, key + keys, 0, head_bytes)
            for key in range(TILE):
                lists[key] += side_bytes
            row_bytes = (own_bytes // 4 // num_queries - 2) * 4
            _add_values(own_at + head * own_bytes, row_bytes, scores_at, TILE * 4, list_at, count, num_queries, size)
            for key in range(TILE):
                lists[key] += head_bytes - side_bytes
        list_at, next_at = next_at, list_at


@helper
def _end_queries(own_at, num_queries, first, last, size, out_at, has_seen):
    """Write what queries [first, last) have attended to; zeros where they have seen no key."""
    for query in range(first, last):
        out = row_at(out_at + (query - first) * size * NUM_BYTES, size)
        if has_seen:
            found = end_query(own_at, num_queries, query, size)
            for i in range(size):
                out[i] = element_of(found[i])
        else:
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
def _find_members(members, may_share, first, tables_at, table_bytes, lens, block_size):
    """Sequences that begin as `first` does, itself in front: how many, and the keys that they share.

    It is whole tiles that they share, so that a sequence's keys are cut into the same tiles with others and without.
    """
    members[0], longest = first, 0
    if not may_share[first]:
        return 1, 0
    own = int32s_at(tables_at + first * table_bytes, np.int64(lens[first]) // block_size)
    for seq in range(first + 1, len(lens)):
        if may_share[seq]:
            other = int32s_at(tables_at + seq * table_bytes, np.int64(lens[seq]) // block_size)
            longest = max(longest, _count_equal(own, other))
    if longest * block_size < TILE:
        return 1, 0
    count, common = 1, longest
    for seq in range(first + 1, len(lens)):
        if may_share[seq] and count < len(members):
            equal = _count_equal(own, int32s_at(tables_at + seq * table_bytes, np.int64(lens[seq]) // block_size))
            if 2 * equal >= longest:
                members[count], common = seq, min(common, equal)
                count += 1
    return count, common * block_size // TILE * TILE


@helper
def _find_own_heads(begin, num_keys, num_kv_heads, first, last):
    """The first KV head of a thread and how many it takes, of a sequence whose heads have num_keys keys each from `begin` on.

    Keys of all sequences and KV heads are in a row; a thread takes the heads whose first key is in its share.
    """
    heads, first_head = 0, 0
    for head in range(num_kv_heads):
        if first <= begin < last:
            if heads == 0:
                first_head = head
            heads += 1
        begin += num_keys
    return first_head, heads


@named_kernel(__name__)
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
    begins, num_keys = np.empty(num_seqs + 1, np.int64), np.int64(0)
    for seq in range(num_seqs):
        begins[seq] = num_keys
        num_keys += (np.int64(lens[seq]) - starts[seq] + sinks[seq]) * num_kv_heads
    begins[num_seqs] = num_keys
    share_first, share_last = find_share(args, num_keys)
    share_last += share_last == num_keys  # the sequences without keys at the end
    # It is whole sequences that share: a thread's first or last one may have but some heads in its share.
    may_share = np.empty(num_seqs, np.bool_)
    for seq in range(num_seqs):
        is_whole = share_first <= begins[seq] and begins[seq + 1] <= share_last
        may_share[seq] = is_whole and starts[seq] == 0 and sinks[seq] == 0
    most, own_bytes = max(MOST_QUERIES // group, 1), count_own(group, size) * 4
    members, is_done, num_common = np.empty(most, np.int64), np.zeros(num_seqs, np.bool_), count_common(most * group)
    space = np.empty(num_common + num_kv_heads * (count_own(most * group, size) + count_own(group, size)), np.float32)
    common_at, queries = space.ctypes.data, np.empty(most * group, np.int64)
    shared_at = common_at + num_common * 4
    own_at, queries_at = shared_at + num_kv_heads * count_own(most * group, size) * 4, queries.ctypes.data
    for leader in range(num_seqs):
        keys = (begins[leader + 1] - begins[leader]) // num_kv_heads
        head, heads = _find_own_heads(begins[leader], keys, num_kv_heads, share_first, share_last)
        if heads == 0 or is_done[leader]:
            continue
        count, shared = _find_members(members, may_share, leader, tables_at, table_bytes, lens, block_size)
        keys_at, first_bytes, own_logits_at = layer_at + head * head_bytes, head * group * head_bytes, np.int64(0)
        num_queries, of_shared = count * group, count_own(count * group, size) * 4
        if logits_at != 0:
            own_logits_at = logits_at + head * group * 4
        if shared > 0:
            for own in range(heads):
                logits_of_head = own_logits_at + own * group * 4 if logits_at != 0 else logits_at
                begin_queries(shared_at + own * of_shared, num_queries, size, group, logits_of_head)
            for query in range(num_queries):
                queries[query] = q_at + members[query // group] * q_bytes + first_bytes + query % group * head_bytes
            num_blocks, of_each = (shared + block_size - 1) // block_size, group * head_bytes
            table = int32s_at(tables_at + leader * table_bytes, num_blocks)
            of_all = num_queries, queries_at, of_each
            _attend_keys(common_at, shared_at, heads, of_all, size, keys_at, layout, table, 0, shared, scale, cap, SEE_ALL)
        for place in range(count):
            seq = members[place]
            is_done[seq], may_share[seq] = True, False
            length, start, sink = np.int64(lens[seq]), np.int64(starts[seq]), np.int64(sinks[seq])
            table = int32s_at(tables_at + seq * table_bytes, (length + block_size - 1) // block_size)
            for own in range(heads):
                if shared > 0:
                    take_over(own_at + own * own_bytes, group, shared_at + own * of_shared, num_queries, place * group, size)
                else:
                    logits_of_head = own_logits_at + own * group * 4 if logits_at != 0 else logits_at
                    begin_queries(own_at + own * own_bytes, group, size, group, logits_of_head)
            of_seq, first = (group, queries_at, group * head_bytes), max(start, shared)
            for query in range(group):
                queries[query] = sink_q_at + seq * sink_q_bytes + first_bytes + query * head_bytes
            _attend_keys(common_at, own_at, heads, of_seq, size, keys_at, layout, table, 0, sink, scale, cap, SEE_ALL)
            for query in range(group):
                queries[query] = q_at + seq * q_bytes + first_bytes + query * head_bytes
            _attend_keys(common_at, own_at, heads, of_seq, size, keys_at, layout, table, first, length, scale, cap, SEE_ALL)
            for own in range(heads):
                to = out_at + seq * num_heads * head_bytes + first_bytes + own * group * head_bytes
                _end_queries(own_at + own * own_bytes, group, 0, group, size, to, length > start)
    keep(space)
    keep(queries)


@named_kernel(__name__)
def attend_prefill(data):
    """out [T, N, D] of q [T, N, D]: sequence s has the queries [locs[s], locs[s + 1]), the last of its lens[s] tokens.

    Each sees the `window` keys up to its own. Threads take tiles of queries of a KV head as they get to them.
    """
    args, numbers = carray(data, (22,), np.int64), carray(data, (21,), np.float64)
    q_at, q_bytes, layer_at, tables_at, table_bytes = args[2], args[3] * NUM_BYTES, args[4], args[7], args[8] * 4
    lens_at, locs_at, num_seqs, num_heads, num_kv_heads = args[9], args[10], args[11], args[12], args[13]
    size, block_size, window, out_at, logits_at = args[14], args[15], args[16], args[17], args[18]
    scale, cap, taken_at = np.float32(numbers[19]), np.float32(numbers[20]), args.ctypes.data + 21 * 8
    group, head_bytes = num_heads // num_kv_heads, size * NUM_BYTES
    layout = args[5] * NUM_BYTES, args[6] * NUM_BYTES, num_kv_heads * head_bytes, block_size
    lens, locs = int32s_at(lens_at, num_seqs), int32s_at(locs_at, num_seqs + 1)
    most = max(MOST_QUERIES // group, 1)
    space = np.empty(count_common(most * group) + count_own(most * group, size), np.float32)
    common_at, queries = space.ctypes.data, np.empty(most * group, np.int64)
    own_at = common_at + count_common(most * group) * 4
    item, num_items = np.int64(0), np.int64(0)
    for seq in range(num_seqs):
        num_items += (np.int64(locs[seq + 1] - locs[seq]) + most - 1) // most * num_kv_heads
    share_first, share_last = take_share(args, taken_at, num_items)
    for seq in range(num_seqs):
        length, num_tokens = np.int64(lens[seq]), np.int64(locs[seq + 1] - locs[seq])
        table = int32s_at(tables_at + seq * table_bytes, (length + block_size - 1) // block_size)
        for tile in range(0, num_tokens, most):
            tokens, position = min(most, num_tokens - tile), length - num_tokens + tile
            first, last = max(np.int64(0), position - window + 1), position + tokens
            for head in range(num_kv_heads):
                if item == share_last:
                    share_first, share_last = take_share(args, taken_at, num_items)
                is_own = share_first <= item < share_last
                item += 1
                if not is_own:
                    continue
                num_queries, logits_of_head = tokens * group, np.int64(0)
                if logits_at != 0:
                    logits_of_head = logits_at + head * group * 4
                begin_queries(own_at, num_queries, size, group, logits_of_head)
                first_row = (np.int64(locs[seq]) + tile) * q_bytes + head * group * head_bytes
                for query in range(num_queries):
                    queries[query] = q_at + first_row + query // group * q_bytes + query % group * head_bytes
                of_head, seen = (num_queries, queries.ctypes.data, np.int64(0)), (position, group, window)
                keys_at = layer_at + head * head_bytes
                _attend_keys(common_at, own_at, 1, of_head, size, keys_at, layout, table, first, last, scale, cap, seen)
                for token in range(tokens):
                    to = out_at + ((locs[seq] + tile + token) * num_heads + head * group) * head_bytes
                    _end_queries(own_at, num_queries, token * group, (token + 1) * group, size, to, True)
    keep(space)
    keep(queries)
    keep(args)
