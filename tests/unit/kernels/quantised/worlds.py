"""Tiny arenas of stored K and V, some of it in pages of a tail, beside the same numbers in plain blocks; poison in all else."""

from dataclasses import dataclass

import torch

from kvkeeper.kernels.quantised.formats import FORMATS, quantise
from kvkeeper.kernels.quantised.layout import QuantisedLayer, QuantisedLayout, get_layer


@dataclass(frozen=True, slots=True)
class StoredWorld:
    """The layer under test, the tables of its sequences, and exact [S, len] K and V that they were stored from.

    A token with a page has it as it is, and other numbers as stored.
    """

    layout: QuantisedLayout
    view: torch.Tensor
    layer: QuantisedLayer
    block_tables: torch.Tensor
    tail_tables: torch.Tensor | None
    seq_lens: torch.Tensor


def make_stored(
    seq_lens: list[int],
    name: str,
    *,
    tails: list[tuple[int, int]] | None = None,
    block_size: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> StoredWorld:
    """Random K and V of the given lengths in layer 1 of 3. tails: the entries [first, end) of each sequence with pages."""
    generator = torch.Generator().manual_seed(seed)
    layout = QuantisedLayout(3, num_kv_heads, head_dim, block_size, FORMATS[name], dtype, 0 if tails is None else 2)
    used = [-(-length // block_size) for length in seq_lens]
    num_blocks = 2 * sum(used) + 3
    view = layout.view(torch.full((num_blocks * layout.block_bytes,), 0x7F, dtype=torch.uint8))
    if layout.kv_format.scale_bytes:
        get_layer(view, layout, 1).scales.fill_(0x7FC0)
    layer = get_layer(view, layout, 1)
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    width = max([*used, 1])
    tables, pages = torch.zeros(len(seq_lens), width, dtype=torch.int32), torch.zeros(len(seq_lens), width, dtype=torch.int32)
    for seq, (length, count) in enumerate(zip(seq_lens, used, strict=True)):
        tables[seq, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        if tails is not None:
            first, end = tails[seq]
            pages[seq, first:end] = torch.tensor([ids.pop() for _ in range(first, end)], dtype=torch.int32)
            assert layer.tail is not None
            layer.tail[pages[seq, first:end].long()] = torch.nan
        for position in range(length):
            values = torch.randn(2, num_kv_heads, head_dim, generator=generator).to(dtype)
            at, offset = int(tables[seq, position // block_size]), position % block_size
            page = int(pages[seq, position // block_size])
            if page and layer.tail is not None:
                layer.tail[page, :, offset] = values
                values = values + 5  # wrong, so that it shows where it is read
            elements, scales = quantise(values, layout.kv_format)
            layer.elements[at, :, offset] = elements
            if layout.kv_format.scale_bytes:
                layer.scales[at, :, offset] = scales
    return StoredWorld(layout, view, layer, tables, None if tails is None else pages, torch.tensor(seq_lens, dtype=torch.int32))


def as_numbers(world: StoredWorld) -> tuple[torch.Tensor, torch.Tensor]:
    """The same K and V as a plain layer of numbers [num_blocks, 2, block_size, ...], and its tables; read token by token."""
    layout, size = world.layout, world.layout.block_size
    counts = [-(-int(length) // size) for length in world.seq_lens]
    plain = torch.full((sum(counts) + 1, 2, size, layout.num_kv_heads, layout.head_dim), torch.nan, dtype=layout.dtype)
    tables, following = torch.zeros_like(world.block_tables), 1
    for seq, count in enumerate(counts):
        for entry in range(count):
            tables[seq, entry] = following
            for offset in range(min(size, int(world.seq_lens[seq]) - entry * size)):
                plain[following, :, offset] = _token(world, seq, entry, offset)
            following += 1
    return plain, tables


def _token(world: StoredWorld, seq: int, entry: int, offset: int) -> torch.Tensor:
    """K and V [2, num_kv_heads, head_dim] by the words of quantised/formats.py and layout.py."""
    layer, layout = world.layer, world.layout
    if world.tail_tables is not None and layer.tail is not None and (page := int(world.tail_tables[seq, entry])):
        return layer.tail[page, :, offset]
    block = int(world.block_tables[seq, entry])
    raw, element = layer.elements[block, :, offset].contiguous(), layout.kv_format.dtype
    if not layout.kv_format.scale_bytes:
        assert element is not None
        return raw.view(element).to(layout.dtype)
    scale = (layer.scales[block, :, offset].int() << 16).view(torch.float32)[..., None]
    if element is None:  # two share a byte
        numbers = torch.cat((raw & 15, raw >> 4), -1).float() - 8
    else:
        numbers = raw.view(element).float()
    return (numbers * scale).to(layout.dtype)
