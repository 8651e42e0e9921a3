"""The work list of decode: which program takes which tiles of which sequence.

Sequences are cut into items of equal length, so that one long sequence among many short ones fills the device as well as many
long ones do. The number of items follows from shapes alone, and what each one is follows from the lengths, on the device: a
captured launch stays right for other lengths, and the host waits for nothing. Made once per step and window, for all layers.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .attention_tiles import NO_WINDOW
from .shared_prefix import SharedWork, plan_shared
from .sizes import cdiv, power_of_2

FEWEST_ITEM_TOKENS = 256  # below that, merging costs more than it gains
PROGRAMS_PER_MULTIPROCESSOR = 2
_SEQS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The work of S sequences.

    Attributes:
        items: int32 [W, 4]: sequence, first tile, end tile, and whether it is merged with others; sequence -1: nothing.
        runs: int32 [S, 2]: the first item of each sequence, and how many it has.
        shared: tiles that are in no item, because several sequences have them in common; None: not looked for.
    """

    items: torch.Tensor
    runs: torch.Tensor
    shared: SharedWork | None = None


def num_extra_items(num_seqs: int, num_kv_heads: int, most_tokens: int, num_multiprocessors: int) -> int:
    """How many items there are beside the one that each sequence has, for sequences of at most so many visible tokens.

    As many as fill the device by themselves, whatever the other sequences do; 0: none of these can be cut.
    """
    if most_tokens <= FEWEST_ITEM_TOKENS:
        return 0
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, num_kv_heads)
    return min(wanted, num_seqs * cdiv(most_tokens, FEWEST_ITEM_TOKENS))


def tile_tokens(head_dim: int) -> int:
    """Tokens of a tile of K and V as they are computed; docs/gpu has the times of others on an H200."""
    return 128 if power_of_2(head_dim) <= 128 else 32


@triton.jit
def visible_tiles(seq_len, sink_len, own_window, window, T: tl.constexpr):
    """First token of the window, number of sinks that it has left, and tiles of both, of one sequence or of several."""
    window = tl.where(own_window > 0, own_window, window)
    first = tl.maximum(seq_len - window, 0)
    num_sinks = tl.where(own_window > 0, tl.minimum(sink_len, first), 0)
    return first, num_sinks, tl.cdiv(num_sinks, T) + tl.cdiv(seq_len, T) - first // T


@triton.jit
def _tiles_at(len_ptr, sink_len_ptr, window_len_ptr, member_ptr, window, seqs, live, T: tl.constexpr):
    """Visible tiles of these sequences that they do not share."""
    seq_lens = tl.load(len_ptr + seqs, mask=live, other=0).to(tl.int32)
    sink_lens, own_windows = seq_lens * 0, seq_lens * 0
    if sink_len_ptr is not None:
        sink_lens = tl.load(sink_len_ptr + seqs, mask=live, other=0).to(tl.int32)
        own_windows = tl.load(window_len_ptr + seqs, mask=live, other=0).to(tl.int32)
    _, _, tiles = visible_tiles(seq_lens, sink_lens, own_windows, window, T)
    if member_ptr is not None:
        tiles -= tl.load(member_ptr + seqs * 4, mask=live, other=0)
    return tiles


@triton.jit(do_not_specialize=["num_seqs", "num_extra", "window"])
def plan_kernel(
    len_ptr,
    sink_len_ptr,
    window_len_ptr,
    member_ptr,
    items_ptr,
    runs_ptr,
    num_seqs,
    num_extra,
    window,
    T: tl.constexpr,
    FEWEST_TILES: tl.constexpr,
    SEQS: tl.constexpr,
):
    """One item. An item has as many tiles as leave num_extra items beside the last one of each sequence."""
    item = tl.program_id(0)
    num_tiles = 0
    for begin in range(0, num_seqs, SEQS):
        seqs = begin + tl.arange(0, SEQS)
        num_tiles += tl.sum(_tiles_at(len_ptr, sink_len_ptr, window_len_ptr, member_ptr, window, seqs, seqs < num_seqs, T), 0)
    per_item = tl.maximum(tl.cdiv(num_tiles, num_extra), FEWEST_TILES)
    seq, first_item, num_items, own_tiles, own_items = 0, 0, 0, 0, 0
    for begin in range(0, num_seqs, SEQS):
        seqs = begin + tl.arange(0, SEQS)
        live = seqs < num_seqs
        tiles = _tiles_at(len_ptr, sink_len_ptr, window_len_ptr, member_ptr, window, seqs, live, T)
        counts = tl.where(live, tl.maximum(tl.cdiv(tiles, per_item), 1), 0)
        ends = num_items + tl.cumsum(counts, 0)
        is_passed = live & (ends <= item)
        is_own = live & (ends > item) & (ends - counts <= item)
        seq += tl.sum(is_passed.to(tl.int32), 0)
        first_item = tl.maximum(first_item, tl.max(tl.where(is_passed, ends, 0), 0))
        own_tiles += tl.sum(tl.where(is_own, tiles, 0), 0)
        own_items += tl.sum(tl.where(is_own, counts, 0), 0)
        num_items += tl.sum(counts, 0)
    begin, shared = (item - first_item) * per_item, 0
    end = tl.minimum(begin + per_item, own_tiles)
    if member_ptr is not None:
        shared = tl.load(member_ptr + seq * 4, mask=item < num_items, other=0)
    tl.store(items_ptr + item * 4, tl.where(item < num_items, seq, -1))
    tl.store(items_ptr + item * 4 + 1, begin + shared)
    tl.store(items_ptr + item * 4 + 2, end + shared)
    tl.store(items_ptr + item * 4 + 3, tl.where((own_items > 1) | (shared > 0), 1, 0))
    if (item == first_item) & (item < num_items):
        tl.store(runs_ptr + seq * 2, first_item)
        tl.store(runs_ptr + seq * 2 + 1, own_items)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_work(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_layer: torch.Tensor,
    window: int | None,
    retention: tuple[torch.Tensor, torch.Tensor] | None,
    tile: int,
    *,
    may_share: bool = False,
    tail_tables: torch.Tensor | None = None,
) -> DecodeWork | None:
    """The work list for the arguments of paged_attention_decode; None: each sequence is one item.

    tile: tokens of a tile of the kernel that takes the list. may_share: what sequences have in common is looked for, and is not
    in their items. tail_tables: see plan_shared.
    """
    num_seqs, (_, _, block_size, num_kv_heads, _) = seq_lens.shape[0], kv_layer.shape
    most_tokens = min(block_tables.shape[1] * block_size, window or NO_WINDOW)
    num_extra = num_extra_items(num_seqs, num_kv_heads, most_tokens, num_multiprocessors(seq_lens.device)) if num_seqs else 0
    if num_extra == 0:
        return None
    num_items, fewest_tiles = num_seqs + num_extra, FEWEST_ITEM_TOKENS // tile
    shared = None
    if may_share and window is None and retention is None:
        shared = plan_shared(block_tables, tail_tables, seq_lens, block_size, num_extra, tile, fewest_tiles)
    items = torch.empty((num_items, 4), dtype=torch.int32, device=seq_lens.device)
    runs = torch.empty((num_seqs, 2), dtype=torch.int32, device=seq_lens.device)
    sink_lens, window_lens = retention or (None, None)
    plan_kernel[(num_items,)](
        seq_lens,
        sink_lens,
        window_lens,
        None if shared is None else shared.members,
        items,
        runs,
        num_seqs,
        num_extra,
        window or NO_WINDOW,
        T=tile,
        FEWEST_TILES=fewest_tiles,
        SEQS=_SEQS_AT_ONCE,
        num_warps=4,
    )
    return DecodeWork(items, runs, shared)
