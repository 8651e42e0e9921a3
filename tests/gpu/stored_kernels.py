"""Cases of part b for K and V in few bits: what is stored, and attention over stored blocks and pages, on a device."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kvkeeper.engine_service.ranks.block_copies import BlockMover, copies_for
from kvkeeper.kernels import reference
from kvkeeper.kernels.quantised.attention import plan_rows, quantised_decode, quantised_prefill
from kvkeeper.kernels.quantised.formats import FORMATS, quantise
from kvkeeper.kernels.quantised.host_blocks import HostBlocks
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from kvkeeper.kernels.quantised.store import plan_slots, store_quantised
from tests.gpu.kernel_cases import FAR_ELEMENTS, error, far_pool, locs_of, move_there_and_back
from tests.unit.kernels.quantised.worlds import as_numbers, make_stored
from tests.unit.kernels.worlds import random_queries

_LENGTHS = [1, 16, 17, 64, 65, 129, 150]
_QUERIES = [1, 2, 17, 1, 30, 66, 7]
_TAILS = [(0, 1), (0, 0), (1, 2), (2, 4), (0, 5), (5, 8), (8, 10)]
_SPLIT: dict[str, dict[str, Any]] = {"int8": {}, "int4": {"window": 2500}, "fp8": {"soft_cap": 5.0}}  # of short suffixes
_SCALE = 0.2
_FAR_BYTES = 2 * FAR_ELEMENTS  # of blocks: the scales and the tail's elements have two bytes each


def cases(dtype: torch.dtype, device: str, head_dims: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], float]]]:
    """By name the largest error of each format, op and head dim."""
    for name in ("int8", "int4", "fp8"):
        for head_dim in head_dims:
            yield f"stored_decode_{name}_d{head_dim}", partial(_attention, name, dtype, device, head_dim, None)
            yield f"stored_prefill_{name}_d{head_dim}", partial(_attention, name, dtype, device, head_dim, _QUERIES)
        yield f"stored_prefill_short_suffix_{name}", partial(_short_suffix, name, dtype, device)
        yield f"stored_decode_shared_prefix_{name}", partial(_shared_prefix, name, dtype, device)
        yield f"stored_store_{name}", partial(_store, name, dtype, device)
        yield f"stored_swap_{name}", partial(_swap, name, dtype, device)
        yield f"stored_decode_{name}_far", partial(_attention, name, dtype, device, 64, None, is_far=True)
        yield f"stored_prefill_{name}_far", partial(_attention, name, dtype, device, 64, _QUERIES, is_far=True)
        yield f"stored_store_{name}_far", partial(_store, name, dtype, device, is_far=True)


def _moved(view: torch.Tensor, device: str, *, is_far: bool) -> tuple[torch.Tensor, int]:
    """The blocks on the device, and the number of the first of them."""
    return far_pool(view, device, _FAR_BYTES) if is_far else (view.to(device, copy=True), 0)


def _short_suffix(name: str, dtype: torch.dtype, device: str) -> float:
    """Few queries on a prefix so long that its keys are split over several programs."""
    prefix = 300 if device == "cpu" else 3100
    tails = [(prefix // 16 - 14, prefix // 16), (0, 1)]
    return _attention(name, dtype, device, 64, [17, 2], lengths=[prefix, 20], tails=tails, **_SPLIT[name])


def _shared_prefix(name: str, dtype: torch.dtype, device: str) -> float:
    """Two groups of sequences with a prefix in common, read once for sixteen; the longest reads some of it from its tail."""
    num_blocks = 2 if device == "cpu" else 18
    lengths = [16 * num_blocks + 32 + 7 * seq for seq in range(20)]
    tails = [(length // 16 - 1, -(-length // 16)) for length in lengths[:-1]] + [(num_blocks - 1, num_blocks + 5)]
    groups = [(list(range(0, 20, 2)), num_blocks), ([3, 5, 9, 11, 19], num_blocks)]
    return _attention(name, dtype, device, 128, None, lengths=lengths, tails=tails, groups=groups)


def _attention(
    name: str,
    dtype: torch.dtype,
    device: str,
    head_dim: int,
    queries: list[int] | None,
    *,
    lengths: list[int] = _LENGTHS,
    tails: list[tuple[int, int]] = _TAILS,
    groups: list[tuple[list[int], int]] | None = None,
    is_far: bool = False,
    **options: Any,
) -> float:
    """groups: sequences, and how many blocks they have in common."""
    world = make_stored(lengths, name, tails=tails, block_size=16, head_dim=head_dim, dtype=dtype)
    for members, num_blocks in groups or ():
        world.block_tables[members[1:], :num_blocks] = world.block_tables[members[0], :num_blocks]
    plain, tables = as_numbers(world)
    pool, first = _moved(world.view, device, is_far=is_far)
    layer, locs = get_layer(pool, world.layout, 1), None
    assert world.tail_tables is not None
    if queries is None:
        q = random_queries(len(lengths), 8, head_dim, dtype)
        expected = reference.paged_attention_decode(q, plain, tables, world.seq_lens, scale=_SCALE, **options)
    else:
        locs = locs_of(queries)
        q = random_queries(int(locs[-1]), 8, head_dim, dtype)
        expected = reference.paged_attention_prefill(q, plain, tables, world.seq_lens, locs, scale=_SCALE, **options)
        locs = locs.to(device)
    pages = torch.where(world.tail_tables > 0, world.tail_tables + first, 0)
    blocks, pages, lens = (tensor.to(device) for tensor in (world.block_tables + first, pages, world.seq_lens))
    rows = plan_rows(blocks, pages, lens, locs, layer)
    op = quantised_decode if queries is None else quantised_prefill
    return error(op(q.to(device), layer, rows, scale=_SCALE, **options), expected)


def _store(name: str, dtype: torch.dtype, device: str, *, is_far: bool = False) -> float:
    """Infinite where a bit of what is stored differs."""
    layout = QuantisedLayout(2, 3, 64, 16, FORMATS[name], dtype, tail_layers=1)
    view = layout.view(torch.zeros(9 * layout.block_bytes, dtype=torch.uint8))
    there, first = _moved(view, device, is_far=is_far)
    k, v = random_queries(80, 3, 64, dtype).view(2, 40, 3, 64)
    slots, pages = torch.randperm(4 * 16)[:40] + 16, torch.randperm(3 * 16)[:40] + 5 * 16
    slots[::7], pages[::5] = -1, -1
    layer, moved = get_layer(view, layout, 1), get_layer(there, layout, 1)
    elements, scales = quantise(torch.stack((k, v), 1), layout.kv_format)
    for row, (slot, page) in enumerate(zip(slots.tolist(), pages.tolist(), strict=True)):
        if slot >= 0:
            layer.elements[slot // 16, :, slot % 16], layer.scales[slot // 16, :, slot % 16] = elements[row], scales[row]
        if page >= 0 and layer.tail is not None:
            layer.tail[page // 16, :, page % 16] = torch.stack((k[row], v[row]))
    stored, kept = (torch.where(own >= 0, own + 16 * first, own).to(device) for own in (slots, pages))
    store_quantised(k.to(device), v.to(device), moved, plan_slots(stored, kept, moved))
    return 0.0 if torch.equal(there[first:].cpu(), view) else float("inf")


def _swap(name: str, dtype: torch.dtype, device: str) -> float:
    """To a host tier of few bits and back, on a stream beside the current one. Infinite where a bit differs."""
    packing = HostBlocks(4, 16, 2, 64, dtype, FORMATS[name])
    blocks = random_queries(40 * 4, 16 * 2, 64, dtype).flatten().view(40, -1).view(torch.uint8)
    there, host = blocks.to(device, copy=True), torch.zeros((40, packing.block_bytes), dtype=torch.uint8)
    host = host if device == "cpu" else host.pin_memory()
    hosts, failed = move_there_and_back(BlockMover(there, host, copies_for(packing, there.device, host)), device)
    packed = packing.pack(blocks[:20])
    is_same = torch.equal(host[hosts], packed) and torch.equal(there[20:].cpu(), packing.unpack(packed))
    return 0.0 if is_same and not failed else float("inf")
