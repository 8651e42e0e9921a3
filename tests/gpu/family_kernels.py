"""Cases of part b for kernels of some families alone: experts, attention over latents, and logits of sinks."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.gates import clamped_swiglu
from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.activations.linear_weight import LinearWeight
from kvkeeper.kernels.attention.latent_attention import latent_attention_decode, latent_attention_prefill, latent_layer
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.store_latent import store_latent
from tests.gpu.kernel_cases import error, far_pool, locs_of
from tests.unit.kernels.worlds import make_latents, make_world, random_queries

_LENGTHS = [1, 16, 17, 64, 65, 129, 150, 700]
_QUERIES = [1, 2, 17, 1, 30, 66, 7, 3]
_SCALE = 0.2


def cases(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """By name the largest error of each."""
    for label, counts in {"few": [0, 3, 0, 0, 17, 1], "many": [700, 0, 65]}.items():
        yield f"experts_{label}", partial(_experts, dtype, device, counts)
    yield "clamped_swiglu", partial(_swiglu, dtype, device)
    for heads, latent, rope in ((128, 512, 64), (16, 512, 64), (40, 256, 32)):
        shape = (heads, latent, rope) if device != "cpu" else (heads // 8, 64, 16)
        yield f"latent_decode_h{heads}_d{latent}", partial(_latent, dtype, device, *shape, with_queries=False)
        yield f"latent_prefill_h{heads}_d{latent}", partial(_latent, dtype, device, *shape, with_queries=True)
    shape = (16, 512, 64) if device != "cpu" else (2, 64, 16)
    yield "latent_decode_far", partial(_latent, dtype, device, *shape, with_queries=False, is_far=True)
    yield "latent_prefill_far", partial(_latent, dtype, device, *shape, with_queries=True, is_far=True)
    prefix = 300 if device == "cpu" else 3100  # so long that its keys are split over several programs
    long = partial(_latent, dtype, device, *shape, with_queries=True, lengths=[prefix, 20], queries=[17, 2])
    yield "latent_prefill_short_suffix", long
    yield "store_latent", partial(_store, dtype, device)
    yield "store_latent_far", partial(_store, dtype, device, is_far=True)
    for label, window in {"": None, "_window": 33}.items():
        yield f"decode_logits{label}", partial(_logits, dtype, device, window, with_queries=False)
        yield f"prefill_logits{label}", partial(_logits, dtype, device, window, with_queries=True)


def _experts(dtype: torch.dtype, device: str, counts: list[int]) -> float:
    num_in, num_out = 200, 136
    x = (torch.randn(sum(counts), num_in) / num_in**0.5).to(dtype)
    data, bias = torch.randn(len(counts), num_out, num_in).to(dtype), torch.randn(len(counts), num_out).to(dtype)
    starts = locs_of(counts)
    expected = reference.grouped_linear(x, LinearWeight(data, bias), starts)
    return error(grouped_linear(x.to(device), LinearWeight(data.to(device), bias.to(device)), starts.to(device)), expected)


def _swiglu(dtype: torch.dtype, device: str) -> float:
    gate_up = torch.randn(40, 2 * 360).to(dtype)
    return error(clamped_swiglu(gate_up.to(device), 1.702, 7.0), reference.clamped_swiglu(gate_up, 1.702, 7.0))


def _latent(
    dtype: torch.dtype,
    device: str,
    heads: int,
    latent: int,
    rope: int,
    *,
    with_queries: bool,
    lengths: list[int] = _LENGTHS,
    queries: list[int] = _QUERIES,
    is_far: bool = False,
) -> float:
    world = make_latents(lengths, latent=latent, rope=rope, block_size=16, dtype=dtype)
    locs = locs_of(queries)
    q = random_queries(int(locs[-1]) if with_queries else len(lengths), heads, latent + rope, dtype)
    op, oracle = (
        (latent_attention_prefill, reference.latent_attention_prefill)
        if with_queries
        else (latent_attention_decode, reference.latent_attention_decode)
    )
    rest = [world.seq_lens, *([locs] if with_queries else [])]
    scale = (latent + rope) ** -0.5
    expected = oracle(q, world.layer, world.block_tables, *rest, scale=scale, latent=latent)
    pool, first = far_pool(world.arena, device) if is_far else (world.arena.to(device), 0)
    moved = [each.to(device) for each in (world.block_tables + first, *rest)]
    found = op(q.to(device), latent_layer(pool[:, world.layout.num_layers // 2]), *moved, scale=scale, latent=latent)
    return error(found, expected)


def _store(dtype: torch.dtype, device: str, *, is_far: bool = False) -> float:
    layout = KvLayout(3, 1, 576, dtype, 16, is_latent=True)
    arena = layout.view(torch.zeros(9 * layout.block_bytes, dtype=torch.uint8))
    pool, first = far_pool(arena, device) if is_far else (arena.to(device, copy=True), 0)
    latent, rope = torch.randn(40, 512).to(dtype), torch.randn(40, 2, 64)[:, 1].to(dtype)
    slots = torch.randperm(8 * 16)[:40].int() + 16
    slots[3] = -1
    reference.store_latent(latent, rope, latent_layer(arena[:, 1]), slots)
    moved = torch.where(slots >= 0, slots + 16 * first, slots).to(device)
    store_latent(latent.to(device), rope.to(device), latent_layer(pool[:, 1]), moved)
    return error(pool[first:], arena)


def _logits(dtype: torch.dtype, device: str, window: int | None, *, with_queries: bool) -> float:
    world, locs = make_world(_LENGTHS, block_size=16, head_dim=64, dtype=dtype), locs_of(_QUERIES)
    q = random_queries(int(locs[-1]) if with_queries else len(_LENGTHS), 8, 64, dtype)
    op, oracle = (
        (paged_attention_prefill, reference.paged_attention_prefill)
        if with_queries
        else (paged_attention_decode, reference.paged_attention_decode)
    )
    logits = torch.linspace(-3, 6, 8)
    tensors = [q, world.layer, world.block_tables, world.seq_lens, *([locs] if with_queries else [])]
    expected = oracle(*tensors, scale=_SCALE, window=window, sink_logits=logits)
    moved = [each.to(device) for each in tensors]
    return error(op(*moved, scale=_SCALE, window=window, sink_logits=logits.to(device)), expected)
