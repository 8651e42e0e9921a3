"""A mapped arena as torch sees it: the blocks of a rank on its device, and its shares of the blocks of the host tier."""

import dataclasses
import math
from typing import Any

import torch

from kvkeeper.client.arena import Arena
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.host_blocks import HostBlocks
from kvkeeper.kernels.quantised.layout import QuantisedLayout


def arena_tensor(arena: Arena) -> torch.Tensor:
    """The arena, uint8 [arena_bytes], without a copy."""
    if arena.is_on_device:
        lent = arena.device_bytes()
        return torch.as_tensor(lent, device=torch.device("cuda", lent.device))
    return torch.from_numpy(arena.array)


def host_blocks(arena: Arena, block_bytes: int, rank: int, num_ranks: int) -> torch.Tensor:
    """The rank's share of each block of the host tier, uint8 [num_host_blocks, block_bytes], without a copy.

    block_bytes: of one block of one rank there; 1 where there is no host tier.
    """
    return torch.from_numpy(arena.host_array).view(-1, num_ranks, block_bytes)[:, rank]


def make_packing(layout: KvLayout | QuantisedLayout, host_format: str) -> HostBlocks | None:
    """How the host tier keeps blocks of this layout, where it does in a format of few bits; empty: as they are."""
    if not host_format:
        return None
    dtype = layout.dtype
    if isinstance(layout, QuantisedLayout):
        assert layout.kv_format.dtype is not None and not layout.kv_format.scale_bytes, "blocks with scales stay as they are"
        dtype = layout.kv_format.dtype
    sides = layout.num_layers * 2, layout.block_size, layout.num_kv_heads, layout.head_dim
    if isinstance(layout, KvLayout) and layout.others:  # no block names its group, so they have one way
        head_dim = math.gcd(layout.head_dim, *(shape.head_dim for shape in layout.others))
        sides = 1, 1, layout.block_bytes // (layout.dtype.itemsize * head_dim), head_dim
    return HostBlocks(*sides, dtype, FORMATS[host_format])


def packing_fields(packing: HostBlocks | None) -> dict[str, Any] | None:
    """The same as values of JSON, for another rank, whose blocks have the same shape."""
    if packing is None:
        return None
    fields = {field.name: getattr(packing, field.name) for field in dataclasses.fields(packing)}
    return fields | {"dtype": str(packing.dtype).removeprefix("torch."), "kv_format": packing.kv_format.name}


def packing_from(fields: dict[str, Any] | None) -> HostBlocks | None:
    """What packing_fields was given."""
    if fields is None:
        return None
    return HostBlocks(**fields | {"dtype": getattr(torch, fields["dtype"]), "kv_format": FORMATS[fields["kv_format"]]})
