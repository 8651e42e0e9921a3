"""Decode where many sequences share a prefix: its keys are read once for sixteen of them, not once for each.

After Hydragen (arXiv 2402.05099) and FlashInfer's cascade inference. Sequences share memory where their tables name the same
blocks. The device finds that out once per step, from tables and lengths alone, so that a captured launch stays right for other
sequences. Those with the same block behind the fewest tokens that are worth sharing are a group, and what all of a group have
in common is its prefix; of stored K and V it ends where one of them reads a page of the tail instead. Its members are cut into
rows of sixteen. An item is one row's pass over some tiles of the prefix, with the heads of all its members as one matrix and
without a mask, because all of them see all of it. Each item writes a part for each member, and these are merged with the parts
of what the members have to themselves. quantised_shared.py has the kernel for stored K and V.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .attention_tiles import begin_rows, slot_offsets, take_tile, tile_scores
from .sizes import aligned, power_of_2

MEMBERS = 16  # of a row
FEWEST_MEMBERS = 4  # of a group: fewer read the prefix from the cache of the device, at little cost
FEWEST_SHARED_TOKENS = 256  # below that, merging costs more than it gains
_FEWEST_SEQS = 16  # of a step that is looked through: one launch more in each layer costs little there
_MOST_ROWS_AT_ONCE = 64  # of one matrix
_SEQS_AT_ONCE = 256
_BLOCKS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class SharedWork:
    """The work of S sequences, in the order of their groups.

    Attributes:
        order: int32 [S], the sequences.
        members: int32 [S, 4], of each sequence: tiles of the prefix that it shares, its place in `order`, its place in its row,
            and how many the row has.
        items: int32 [W, 4]: the place in `order` of the row's first member, its members, first and end tile; none: nothing.
        runs: int32 [S, 2], by the place of a row's first member: the first item of the row, and how many it has.
    """

    order: torch.Tensor
    members: torch.Tensor
    items: torch.Tensor
    runs: torch.Tensor


@triton.jit(do_not_specialize=["table_stride"])
def leader_kernel(
    table_ptr,
    tail_table_ptr,
    len_ptr,
    leader_ptr,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    KEY: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One sequence: the first one with the same block at KEY, and the tokens that they have in common, to leader [S, 2].

    Blocks count that are full, because nothing is written to them any more, and that it does not read from a page instead.
    """
    seq = tl.program_id(0)
    own = table_ptr + seq.to(tl.int64) * table_stride
    num_full = (tl.load(len_ptr + seq).to(tl.int32) - 1) // BLOCK_SIZE
    leader, common = seq, num_full * 0
    if num_full > KEY:
        key = tl.load(own + KEY)
        for begin in range(0, seq, SEQS):
            others = begin + tl.arange(0, SEQS)
            live = others < seq
            lens = tl.load(len_ptr + others, mask=live, other=0).to(tl.int32)
            live &= (lens - 1) // BLOCK_SIZE > KEY
            keys = tl.load(table_ptr + others.to(tl.int64) * table_stride + KEY, mask=live, other=-1)
            leader = tl.minimum(leader, tl.min(tl.where(live & (keys == key), others, seq), 0))
        theirs = table_ptr + leader.to(tl.int64) * table_stride
        num_full = tl.minimum(num_full, (tl.load(len_ptr + leader).to(tl.int32) - 1) // BLOCK_SIZE)
        common = num_full
        for begin in range(0, num_full, BLOCKS):
            blocks = begin + tl.arange(0, BLOCKS)
            live = blocks < num_full
            differ = tl.load(own + blocks, mask=live, other=0) != tl.load(theirs + blocks, mask=live, other=0)
            if tail_table_ptr is not None:  # the leader's pages end what it has in common with itself
                differ |= tl.load(tail_table_ptr + seq.to(tl.int64) * table_stride + blocks, mask=live, other=0) > 0
            common = tl.minimum(common, tl.min(tl.where(differ, blocks, num_full), 0))
    tl.store(leader_ptr + seq * 2, leader)
    tl.store(leader_ptr + seq * 2 + 1, common * BLOCK_SIZE)


@triton.jit(do_not_specialize=["num_seqs"])
def group_kernel(
    leader_ptr,
    order_ptr,
    member_ptr,
    num_seqs,
    T: tl.constexpr,
    FEWEST_MEMBERS: tl.constexpr,
    FEWEST_TOKENS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SEQS: tl.constexpr,
):
    """One sequence: its group, to order and members of SharedWork."""
    seq = tl.program_id(0)
    leader = tl.load(leader_ptr + seq * 2)
    shared = tl.load(leader_ptr + seq * 2 + 1)
    size, rank, before = 0, 0, 0
    for begin in range(0, num_seqs, SEQS):
        others = begin + tl.arange(0, SEQS)
        live = others < num_seqs
        leaders = tl.load(leader_ptr + others * 2, mask=live, other=-1)
        common = tl.load(leader_ptr + others * 2 + 1, mask=live, other=0)
        same = live & (leaders == leader)
        size += tl.sum(same.to(tl.int32), 0)
        rank += tl.sum((same & (others < seq)).to(tl.int32), 0)
        before += tl.sum((live & (leaders < leader)).to(tl.int32), 0)
        shared = tl.minimum(shared, tl.min(tl.where(same, common, 1 << 30), 0))
    is_worth = (size >= FEWEST_MEMBERS) & (shared >= FEWEST_TOKENS)
    place = before + rank
    tl.store(order_ptr + place, seq)
    tl.store(member_ptr + seq * 4, tl.where(is_worth, shared // T, 0))
    tl.store(member_ptr + seq * 4 + 1, place)
    tl.store(member_ptr + seq * 4 + 2, rank % MEMBERS)
    tl.store(member_ptr + seq * 4 + 3, tl.minimum(size - rank // MEMBERS * MEMBERS, MEMBERS))


@triton.jit(do_not_specialize=["num_seqs", "num_extra"])
def plan_shared_kernel(
    member_ptr,
    items_ptr,
    runs_ptr,
    num_seqs,
    num_extra,
    FEWEST_TILES: tl.constexpr,
    SEQS: tl.constexpr,
):
    """One item. An item has as many tiles as leave num_extra items beside the last one of each row; see plan_kernel."""
    item = tl.program_id(0)
    num_tiles = 0
    for begin in range(0, num_seqs, SEQS):
        seqs = begin + tl.arange(0, SEQS)
        num_tiles += tl.sum(_tiles_of_rows(member_ptr, seqs, seqs < num_seqs), 0)
    per_item = tl.maximum(tl.cdiv(num_tiles, num_extra), FEWEST_TILES)
    num_items, first_item, own_tiles, own_items, place, size = 0, 0, 0, 0, 0, 0
    for begin in range(0, num_seqs, SEQS):
        seqs = begin + tl.arange(0, SEQS)
        live = seqs < num_seqs
        tiles = _tiles_of_rows(member_ptr, seqs, live)
        counts = tl.cdiv(tiles, per_item)
        ends = num_items + tl.cumsum(counts, 0)
        is_own = (ends > item) & (ends - counts <= item)
        first_item += tl.sum(tl.where(is_own, ends - counts, 0), 0)
        own_tiles += tl.sum(tl.where(is_own, tiles, 0), 0)
        own_items += tl.sum(tl.where(is_own, counts, 0), 0)
        place += tl.sum(tl.load(member_ptr + seqs * 4 + 1, mask=is_own, other=0), 0)
        size += tl.sum(tl.load(member_ptr + seqs * 4 + 3, mask=is_own, other=0), 0)
        num_items += tl.sum(counts, 0)
    first_tile = (item - first_item) * per_item
    tl.store(items_ptr + item * 4, place)
    tl.store(items_ptr + item * 4 + 1, size)
    tl.store(items_ptr + item * 4 + 2, first_tile)
    tl.store(items_ptr + item * 4 + 3, tl.minimum(first_tile + per_item, own_tiles))
    if (own_items > 0) & (item == first_item):
        tl.store(runs_ptr + place * 2, first_item)
        tl.store(runs_ptr + place * 2 + 1, own_items)


@triton.jit
def _tiles_of_rows(member_ptr, seqs, live):
    """Tiles that a row's first member stands for; 0 for the other sequences."""
    tiles = tl.load(member_ptr + seqs * 4, mask=live, other=0)
    return tl.where(tl.load(member_ptr + seqs * 4 + 2, mask=live, other=1) == 0, tiles, 0)


@triton.jit
def rows_of_members(
    order_ptr, first_member, size, first_head, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Member, sequence and head of each row of a matrix, and whether the row is a member's.

    The matrix is for AT_ONCE members of an item of `size`.
    """
    rows = tl.arange(0, AT_ONCE * GROUP_ROWS)
    members, in_group = first_member + rows // GROUP_ROWS, rows % GROUP_ROWS
    live = (members < size) & (in_group < GROUP)
    seqs = tl.load(order_ptr + members, mask=live, other=0).to(tl.int64)
    return members, seqs, first_head + in_group, live


@triton.jit(do_not_specialize=["table_stride", "num_own"])
def shared_kernel(
    q_ptr,
    layer_ptr,
    table_ptr,
    logit_ptr,
    order_ptr,
    items_ptr,
    part_ptr,
    lse_ptr,
    num_own,
    q_stride,
    table_stride,
    block_stride,
    kv_stride,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SLOT_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One KV head, AT_ONCE members of one item: GROUP_ROWS rows of a matrix each, of which the first GROUP are heads.

    part: float32 [W, MEMBERS, H, HEAD_DIM] and lse [W, MEMBERS, H], as decode_kernel's and behind num_own of those.
    """
    kv_head, item = tl.program_id(0), tl.program_id(1)
    size = tl.load(items_ptr + item * 4 + 1)
    first_member = tl.program_id(2) * AT_ONCE
    if first_member >= size:
        return
    place = tl.load(items_ptr + item * 4)
    begin, end = tl.load(items_ptr + item * 4 + 2), tl.load(items_ptr + item * 4 + 3)
    dims, num_heads = tl.arange(0, D), tl.num_programs(0) * GROUP
    members, seqs, heads, live = rows_of_members(
        order_ptr + place, first_member, size, kv_head * GROUP, GROUP, GROUP_ROWS, AT_ONCE
    )
    wanted = live[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (seqs * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :], mask=wanted, other=0.0).to(COMPUTE)
    table_ptr += tl.load(order_ptr + place).to(tl.int64) * table_stride
    k_ptr = layer_ptr + kv_head * HEAD_DIM
    acc = tl.zeros([AT_ONCE * GROUP_ROWS, D], tl.float32)
    most, total = begin_rows(logit_ptr, heads, live, begin == 0, AT_ONCE * GROUP_ROWS)
    for tile in range(begin, end):
        _, offsets = slot_offsets(table_ptr, tile, end * T, block_stride, T, BLOCK_SIZE, SLOT_LEN)
        ptrs = k_ptr + offsets[:, None] + dims[None, :]
        k = tl.load(ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0).to(COMPUTE)
        v = tl.load(ptrs + kv_stride, mask=(dims < HEAD_DIM)[None, :], other=0.0).to(COMPUTE)
        acc, most, total = take_tile(acc, most, total, tile_scores(q, k, scale, cap, HAS_CAP), v, COMPUTE)
    part_heads = (num_own + item * MEMBERS + members).to(tl.int64) * num_heads + heads
    tl.store(part_ptr + part_heads[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=wanted)
    tl.store(lse_ptr + part_heads, most + tl.log2(total), mask=live)


def plan_shared(
    block_tables: torch.Tensor,
    tail_tables: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_size: int,
    num_extra: int,
    tile: int,
    fewest_tiles: int,
) -> SharedWork | None:
    """What sequences share; None where it is not looked for. num_extra, tile, fewest_tiles: as of the work list.

    On a device, for sequences that see all their tokens. tail_tables: with the strides of block_tables, see QuantisedRows.
    """
    num_seqs, width = block_tables.shape
    key = -(-FEWEST_SHARED_TOKENS // block_size) - 1
    if num_seqs < _FEWEST_SEQS or width <= key + 1:
        return None
    num_items = num_extra + num_seqs // FEWEST_MEMBERS
    sizes = [aligned(size) for size in (2 * num_seqs, num_seqs, 4 * num_seqs, 4 * num_items, 2 * num_seqs)]
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=seq_lens.device)
    leaders, order, members, items, runs = memory.split(sizes)
    seqs = {"SEQS": _SEQS_AT_ONCE, "num_warps": 4}
    leader_kernel[(num_seqs,)](
        block_tables,
        tail_tables,
        seq_lens,
        leaders,
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        KEY=key,
        BLOCKS=_BLOCKS_AT_ONCE,
        **seqs,
    )
    group_kernel[(num_seqs,)](
        leaders,
        order,
        members,
        num_seqs,
        T=tile,
        FEWEST_MEMBERS=FEWEST_MEMBERS,
        FEWEST_TOKENS=FEWEST_SHARED_TOKENS,
        MEMBERS=MEMBERS,
        **seqs,
    )
    plan_shared_kernel[(num_items,)](members, items, runs, num_seqs, num_extra, FEWEST_TILES=fewest_tiles, **seqs)
    return SharedWork(order, members.view(-1, 4), items.view(-1, 4), runs.view(-1, 2))


def members_at_once(group: int) -> int:
    """How many members of a row are taken at once, for so many query heads of one KV head."""
    return max(min(_MOST_ROWS_AT_ONCE // power_of_2(group), MEMBERS), 1)
