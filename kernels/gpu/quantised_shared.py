"""quantised_decode where many sequences share a prefix: shared_prefix.py's kernel, over stored K and V.

What is shared lies in stored blocks alone: where a sequence has a page of the tail, its own items begin. So nothing of the tail
is read here, and each member is given the numbers that it would read by itself.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .attention_tiles import begin_rows
from .shared_prefix import MEMBERS, SharedWork, members_at_once, rows_of_members
from .sizes import cdiv, power_of_2
from .stored_tiles import StoredPointers, find_tokens, take_stored


@triton.jit(do_not_specialize=["table_stride", "num_own"])
def quantised_shared_kernel(
    q_ptr,
    elements_ptr,
    scales_ptr,
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
    side_stride,
    scale_stride,
    scale_side_stride,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One KV head, AT_ONCE members of one item; rows, part and lse are shared_kernel's."""
    HALF: tl.constexpr = HEAD_DIM // 2
    M: tl.constexpr = AT_ONCE * GROUP_ROWS
    kv_head, item = tl.program_id(0), tl.program_id(1)
    size = tl.load(items_ptr + item * 4 + 1)
    first_member = tl.program_id(2) * AT_ONCE
    if first_member >= size:
        return
    place = tl.load(items_ptr + item * 4)
    begin, end = tl.load(items_ptr + item * 4 + 2), tl.load(items_ptr + item * 4 + 3)
    dims, num_heads = tl.arange(0, DH), tl.num_programs(0) * GROUP
    members, seqs, heads, is_live = rows_of_members(
        order_ptr + place, first_member, size, kv_head * GROUP, GROUP, GROUP_ROWS, AT_ONCE
    )
    wanted = is_live[:, None] & (dims < HALF)[None, :]
    q_ptrs = q_ptr + (seqs * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    q_low = tl.load(q_ptrs, mask=wanted, other=0.0).to(COMPUTE)
    q_high = tl.load(q_ptrs + HALF, mask=wanted, other=0.0).to(COMPUTE)
    table_ptr += tl.load(order_ptr + place).to(tl.int64) * table_stride
    low, high = tl.zeros([M, DH], tl.float32), tl.zeros([M, DH], tl.float32)
    most, total = begin_rows(logit_ptr, heads, is_live, begin == 0, M)
    for tile in range(begin, end):
        _tokens, live, blocks, pages, slots = find_tokens(table_ptr, None, tile, 0, end * T, T, BLOCK_SIZE)
        low, high, most, total = take_stored(
            low, high, most, total, q_low, q_high, live[None, :],
            elements_ptr, scales_ptr, None, blocks, pages, slots, live, kv_head,
            block_stride, side_stride, scale_stride, scale_side_stride, 0, 0,
            scale, cap, HAS_CAP, PACKED, FLOAT, MOST, KV_HEADS, HEAD_DIM, DH, COMPUTE,
        )  # fmt: skip
    part_heads = (num_own + item * MEMBERS + members).to(tl.int64) * num_heads + heads
    part_ptrs = part_ptr + part_heads[:, None] * HEAD_DIM + dims[None, :]
    divisor = (total * MOST)[:, None]
    tl.store(part_ptrs, low / divisor, mask=wanted)
    tl.store(part_ptrs + HALF, high / divisor, mask=wanted)
    tl.store(lse_ptr + part_heads, most + tl.log2(total), mask=is_live)


def read_shared(
    q: torch.Tensor,
    stored: StoredPointers,
    constants: dict[str, Any],
    block_tables: torch.Tensor,
    sink_logits: torch.Tensor | None,
    shared: SharedWork,
    part: torch.Tensor,
    lse: torch.Tensor,
    num_own: int,
    factors: tuple[float, float],
) -> None:
    """Launch quantised_shared_kernel for the items of `shared`. constants: of make_constants; factors: of Options."""
    group = constants["GROUP"]
    at_once = members_at_once(group)
    quantised_shared_kernel[constants["KV_HEADS"], shared.items.shape[0], cdiv(MEMBERS, at_once)](
        q,
        stored.elements,
        stored.scales,
        block_tables,
        sink_logits,
        shared.order,
        shared.items,
        part,
        lse,
        num_own,
        q.stride(0),
        block_tables.stride(0),
        *stored.strides[:4],
        *factors,
        **constants,
        GROUP_ROWS=power_of_2(group),
        AT_ONCE=at_once,
        MEMBERS=MEMBERS,
        num_warps=4 if constants["DH"] <= 64 else 8,
        num_stages=3,
    )
