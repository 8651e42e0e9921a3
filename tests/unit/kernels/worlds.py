"""Tiny arenas for kernel tests: random sequences in scattered blocks, and NaN in every unwritten slot."""

from dataclasses import dataclass, replace

import torch

from kvkeeper.kernels.attention.latent_attention import latent_layer
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.penalise_counted import ONE_MORE
from kvkeeper.kernels.types import CountedTensors


@dataclass(frozen=True, slots=True)
class World:
    """An arena with random used slots; its other slots, blocks and layers are NaN."""

    layout: KvLayout
    arena: torch.Tensor
    layer: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor


def make_world(
    seq_lens: list[int],
    *,
    block_size: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    num_layers: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> World:
    """Write random K and V of the given lengths to layer 1, in shuffled blocks; poison everything else."""
    generator = torch.Generator().manual_seed(seed)
    used = [-(-n // block_size) for n in seq_lens]
    layout = KvLayout(num_layers, num_kv_heads, head_dim, dtype, block_size)
    num_blocks = sum(used) + 3
    arena = layout.view(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)).fill_(float("nan"))
    layer = arena[:, num_layers // 2]
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(seq_lens), max([*used, 1]), dtype=torch.int32)
    for seq, (seq_len, num_used) in enumerate(zip(seq_lens, used, strict=True)):
        tables[seq, :num_used] = torch.tensor([ids.pop() for _ in range(num_used)], dtype=torch.int32)
        for i in range(seq_len):
            values = torch.randn(2, num_kv_heads, head_dim, generator=generator)
            layer[tables[seq, i // block_size], :, i % block_size] = values.to(dtype)
    return World(layout, arena, layer, tables, torch.tensor(seq_lens, dtype=torch.int32))


def make_latents(
    seq_lens: list[int], *, latent: int, rope: int, block_size: int = 4, dtype: torch.dtype = torch.float32
) -> World:
    """The same with a latent vector and a rotated key of each token; `layer` is of latent_layer."""
    world = make_world(seq_lens, block_size=block_size, num_kv_heads=1, head_dim=latent + rope, dtype=dtype)
    layout = replace(world.layout, is_latent=True)
    arena = world.arena[:, :, :1].contiguous()
    layer = latent_layer(arena[:, layout.num_layers // 2])
    return World(layout, arena, layer, world.block_tables, world.seq_lens)


def random_queries(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Queries [num_tokens, num_heads, head_dim]."""
    return torch.randn(num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(99)).to(dtype)


def edge_lengths(block_size: int, most_blocks: int = 3) -> list[int]:
    """k*B - 1, k*B and k*B + 1 for k in 1..most_blocks, without 0."""
    return [n for k in range(1, most_blocks + 1) for n in (k * block_size - 1, k * block_size, k * block_size + 1) if n]


def make_counted(
    *, vocab_size: int, dtype: torch.dtype = torch.int16, num_rows: int = 5
) -> tuple[torch.Tensor, torch.Tensor, CountedTensors]:
    """For penalise_counted: all kinds of penalties, one row that counts nothing, and at the end one that has none."""
    generator = torch.Generator().manual_seed(vocab_size)
    counts = torch.randint(0, 8, (num_rows + 2, vocab_size), generator=generator).to(dtype)
    counts[counts > 5] = 0
    counts[-1] = 0
    slots = torch.randperm(num_rows + 1, generator=generator)[:num_rows]
    slots[-1] = num_rows + 1
    addends = torch.full((num_rows,), ONE_MORE)
    addends[[1, -1]] = 0
    penalties = torch.rand(3, num_rows, generator=generator).float() + 0.5
    penalties[1:] -= 1
    penalties[:, -1] = torch.tensor([1.0, 0.0, 0.0])
    tokens = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    return logits, counts, CountedTensors(slots, tokens, addends, penalties.double())
