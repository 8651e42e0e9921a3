"""Part b: every kernel against its reference in bfloat16 and float16, with NaN in all memory that belongs to no sequence.

The interpreter has shown the same kernels right in float32 and float16; here they run as they are compiled, in the types that
they are for. A rehearsal takes the CPU's path in float32, at one shape.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from kvkeeper.engine_service.compute.penalties import apply_penalties
from kvkeeper.engine_service.ranks.block_copies import BlockMover
from kvkeeper.engine_service.values.sampling_params import SamplingParams, SamplingRow
from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.gates import gelu_and_mul, silu_and_mul
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.activations.rotary import rotary
from kvkeeper.kernels.attention.flashinfer_prefill import (
    HEAD_DIMS,
    FlashInferPlan,
    Wrappers,
    find_flashinfer,
    find_pages,
    make_workspace,
)
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.copy_blocks import copy_blocks
from kvkeeper.kernels.find_likeliest import find_likeliest
from kvkeeper.kernels.penalise_counted import penalise_counted
from kvkeeper.kernels.philox import uniforms_there
from kvkeeper.kernels.rotary_store_kv import rotary_store_kv
from kvkeeper.kernels.sampling import SamplingTensors, sample_rows
from kvkeeper.kernels.store_kv import store_kv
from kvkeeper.kernels.types import CountedTensors
from tests.gpu import family_kernels, float8_kernels, integer_kernels, recurrent_kernels, stored_kernels
from tests.gpu.checks import Check, guarded
from tests.gpu.kernel_cases import error, far_pool, locs_of, move_there_and_back
from tests.gpu.kernel_workers import run_cases
from tests.unit.kernels.worlds import World, make_counted, make_world, random_queries

# Outputs are of order one. What rounds is the result, and in attention the weights before they meet the values.
_MOST_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_LENGTHS = [1, 16, 17, 64, 65, 129, 150]
_QUERIES = [1, 2, 17, 1, 30, 66, 7]
_KEPT = [(0, 0), (4, 8), (0, 9), (16, 16), (1, 1), (64, 64), (4, 100)]
_SHARED = [300 + 11 * seq for seq in range(24)]
_GROUPS = [list(range(0, 24, 2)), [3, 5, 9, 11, 21]]  # what the first of each has in its first 256 tokens, all of it have
_SCALE = 0.2


def run(is_dry: bool) -> Iterator[Check]:
    """One check for each op, type and shape."""
    return run_cases(is_dry)


def all_cases(is_dry: bool) -> Iterator[tuple[str, Callable[[], Check]]]:
    """By name each check of this part, always in the same order."""
    device = "cpu" if is_dry else "cuda"
    for dtype in (torch.float32,) if is_dry else (torch.bfloat16, torch.float16):
        for name, case in _cases(dtype, device, (64,) if is_dry else (64, 80, 96, 128, 256), (16,) if is_dry else (16, 32, 64)):
            label = f"{name}_{str(dtype).removeprefix('torch.')}"
            yield label, partial(guarded, label, partial(_judged, label, dtype, case))


def is_device_lost() -> bool:
    """Whether an error has ended this process's use of the device: nothing after it says anything."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _judged(label: str, dtype: torch.dtype, case: Callable[[], float]) -> Check:
    found = case()
    return Check(label, found <= _MOST_ERROR[dtype], {"max_error": found})


def _cases(
    dtype: torch.dtype, device: str, head_dims: tuple[int, ...], block_sizes: tuple[int, ...]
) -> Iterator[tuple[str, Callable[[], float]]]:
    for head_dim in head_dims:
        for block_size in block_sizes:
            shape = f"d{head_dim}_b{block_size}"
            yield f"decode_{shape}", partial(_attention, dtype, device, head_dim, block_size)
            yield f"prefill_{shape}", partial(_attention, dtype, device, head_dim, block_size, queries=_QUERIES)
        yield f"store_kv_d{head_dim}", partial(_store, dtype, device, head_dim)
        yield f"rotary_d{head_dim}", partial(_rotary, dtype, device, head_dim)
    for group in (1, 2, 8):
        yield f"decode_group{group}", partial(_attention, dtype, device, 128, 16, group=group)
    bent: dict[str, dict[str, Any]]
    bent = {"window": {"window": 70}, "cap": {"soft_cap": 5.0}, "both": {"window": 33, "soft_cap": 0.5}}
    for label, options in bent.items():
        yield f"decode_{label}", partial(_attention, dtype, device, 128, 16, **options)
        yield f"prefill_{label}", partial(_attention, dtype, device, 128, 16, queries=_QUERIES, **options)
    yield "decode_retention", partial(_attention, dtype, device, 128, 16, kept=_KEPT)
    yield "prefill_retention", partial(_attention, dtype, device, 128, 16, queries=_QUERIES, kept=_KEPT)
    yield "copy_blocks", partial(_copy, dtype, device)
    for label, num_bytes in (("small", 4096), ("large", 1 << 20)):
        yield f"move_blocks_{label}", partial(_move, device, num_bytes)
    for length in (64, 1000, 4096):
        yield f"rms_norm_{length}", partial(_norm, dtype, device, length)
        yield f"gates_{length}", partial(_gates, dtype, device, length)
    yield "sampling", partial(_sampling, device, 4096)
    yield "sampling_large", partial(_sampling, device, 9000 if device == "cpu" else 131_072)
    yield "uniforms", partial(_uniforms, device)
    yield "likeliest", partial(_likeliest, device, 9000 if device == "cpu" else 131_072)
    yield "penalties", partial(_penalties, device)
    yield "penalties_counted", partial(_penalties_counted, device)
    yield "rotary_store_kv", partial(_rotary_store, dtype, device, with_norm=False)
    yield "rotary_store_kv_norm", partial(_rotary_store, dtype, device, with_norm=True)
    long = [700, 40] if device == "cpu" else [5000, 1, 700, 3001]
    for group in (4, 7):
        yield f"decode_items_group{group}", partial(_attention, dtype, device, 128, 16, group=group, lengths=long)
    yield "decode_items_window", partial(_attention, dtype, device, 64, 16, lengths=long, window=600)
    short = [100 + seq % 90 for seq in range(5 if device == "cpu" else 63)]
    yield "decode_one_long", partial(_attention, dtype, device, 128, 16, lengths=[900 if device == "cpu" else 6000, *short])
    yield "decode_shared_prefix", partial(_attention, dtype, device, 128, 16, lengths=_SHARED, shared=_GROUPS)
    yield "decode_shared_prefix_cap", partial(_attention, dtype, device, 256, 16, lengths=_SHARED, shared=_GROUPS, soft_cap=5.0)
    yield "decode_shared_prefix_group8", partial(_attention, dtype, device, 64, 64, group=8, lengths=_SHARED, shared=_GROUPS)
    prefix = [300, 20] if device == "cpu" else [4017, 20]
    yield "prefill_short_suffix", partial(_attention, dtype, device, 128, 16, lengths=prefix, queries=[17, 1])
    yield "prefill_one_token", partial(_attention, dtype, device, 128, 16, lengths=prefix, queries=[1, 1])
    wide = 200 if device == "cpu" else 3000
    split: dict[str, dict[str, Any]]
    split = {"window": {"window": wide}, "retention": {"kept": [(16, wide), (0, 0)]}, "cap": {"soft_cap": 5.0}}
    for label, options in split.items():
        yield (
            f"prefill_short_suffix_{label}",
            partial(_attention, dtype, device, 128, 16, lengths=prefix, queries=[17, 2], **options),
        )
    yield "prefill_short_suffix_d256", partial(_attention, dtype, device, 256, 16, lengths=prefix, queries=[40, 1])
    yield from stored_kernels.cases(dtype, device, head_dims)
    yield from family_kernels.cases(dtype, device)
    yield from recurrent_kernels.cases(dtype, device)
    yield from integer_kernels.cases(dtype, device)
    yield from float8_kernels.cases(dtype, device)
    for group in (2, 8):  # heads of Gemma 4's full layers
        yield f"decode_d512_group{group}", partial(_attention, dtype, device, 512, 16, group=group)
        yield f"prefill_d512_group{group}", partial(_attention, dtype, device, 512, 16, group=group, queries=_QUERIES)
    yield "decode_shared_prefix_d512", partial(_attention, dtype, device, 512, 16, lengths=_SHARED, shared=_GROUPS)
    yield "prefill_short_suffix_d512", partial(_attention, dtype, device, 512, 16, lengths=prefix, queries=[40, 1])
    flashinfer = find_flashinfer(wanted=device == "cuda" and dtype is not torch.float32)
    if not flashinfer.why_not:
        for head_dim in HEAD_DIMS:
            yield f"prefill_flashinfer_d{head_dim}", partial(_flashinfer, dtype, device, head_dim, flashinfer.package)
        for label, options in bent.items():
            yield f"prefill_flashinfer_{label}", partial(_flashinfer, dtype, device, 128, flashinfer.package, **options)
    for op in ("decode", "prefill", "store_kv", "rotary_store_kv", "copy_blocks"):
        yield f"{op}_far", partial(_far, dtype, device, op)


def _attention(
    dtype: torch.dtype,
    device: str,
    head_dim: int,
    block_size: int,
    *,
    group: int = 4,
    lengths: list[int] | None = None,
    queries: list[int] | None = None,
    kept: list[tuple[int, int]] | None = None,
    shared: list[list[int]] | None = None,
    **options: Any,
) -> float:
    """shared: sequences that have their first 256 tokens in common."""
    lengths = lengths or _LENGTHS
    world = make_world(lengths, block_size=block_size, head_dim=head_dim, dtype=dtype)
    for members in shared or ():
        world.block_tables[members[1:], : 256 // block_size] = world.block_tables[members[0], : 256 // block_size]
    num_tokens = len(lengths) if queries is None else sum(queries)
    both = random_queries(2 * num_tokens, 2 * group, head_dim, dtype)
    tensors = [both[:num_tokens], world.layer, world.block_tables, world.seq_lens]
    if queries is not None:
        tensors.append(locs_of(queries))
    name = "paged_attention_decode" if queries is None else "paged_attention_prefill"
    retention = None if kept is None else tuple(torch.tensor(column, dtype=torch.int32) for column in zip(*kept, strict=True))
    q_sink = None if kept is None else both[num_tokens:]
    expected = getattr(reference, name)(*tensors, scale=_SCALE, retention=retention, q_sink=q_sink, **options)
    there = [tensor.to(device) for tensor in _with_layer(world, tensors, device)]
    sinks = None if retention is None else (retention[0].to(device), retention[1].to(device))
    op = paged_attention_decode if queries is None else paged_attention_prefill
    sunk = None if q_sink is None else q_sink.to(device)
    return error(op(*there, scale=_SCALE, retention=sinks, q_sink=sunk, **options), expected)


def _flashinfer(dtype: torch.dtype, device: str, head_dim: int, package: Any, **options: Any) -> float:
    """FlashInfer's prefill over our blocks, against the reference."""
    world, queries = make_world(_LENGTHS, block_size=16, head_dim=head_dim, dtype=dtype), _QUERIES
    q, locs = random_queries(sum(queries), 8, head_dim, dtype), locs_of(queries)
    args = world.layer, world.block_tables, world.seq_lens, locs
    expected = reference.paged_attention_prefill(q, *args, scale=_SCALE, **options)
    pages = find_pages(args[1].numpy(), args[2].numpy(), args[3].numpy(), 16, options.get("window"))
    workspace = make_workspace(torch.device(device), 4, head_dim)
    plan = FlashInferPlan(Wrappers(package, workspace), pages, torch.from_numpy(pages.pages).to(device))
    there = [tensor.to(device) for tensor in _with_layer(world, [q, *args], device)]
    return error(paged_attention_prefill(*there, scale=_SCALE, **options, plan=plan), expected)


def _with_layer(world: World, tensors: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """The layer as a view of its arena there too, with the strides of one."""
    return [tensors[0], world.arena.to(device)[:, world.layout.num_layers // 2], *tensors[2:]]


def _store(dtype: torch.dtype, device: str, head_dim: int) -> float:
    arenas = [make_world([200], block_size=16, head_dim=head_dim, dtype=dtype).arena for _ in range(2)]
    slots = torch.randperm(arenas[0].shape[0] * 16)[:100].int()
    slots[::7] = -1
    k, v = random_queries(200, 2, head_dim, dtype).view(2, 100, 2, head_dim)
    reference.store_kv(k, v, arenas[0][:, 1], slots)
    there = arenas[1].to(device)
    store_kv(k.to(device), v.to(device), there[:, 1], slots.to(device))
    return error(there.nan_to_num(7), arenas[0].nan_to_num(7))


def _rotary_store(dtype: torch.dtype, device: str, *, with_norm: bool) -> float:
    """Queries that are answered, and keys and values that are stored, with and without the norm before."""
    worlds = [make_world([90], block_size=16, head_dim=128, dtype=dtype) for _ in range(2)]
    qkv = random_queries(40, 12, 128, dtype)
    qk, v, weight = qkv[:, :10], qkv[:, 10:], random_queries(1, 10, 128, dtype)[0]
    angles = torch.linspace(0, 6, 40 * 64).view(40, 64)
    cos, sin = (torch.cat(pair, 1).to(dtype) for pair in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))
    slots = torch.randperm(worlds[0].arena.shape[0] * 16)[:40].int()
    slots[::7] = -1
    turned = reference.rotary(reference.rms_norm(qk, weight, 1e-5)[0] if with_norm else qk, cos, sin)
    reference.store_kv(turned[:, 8:], v, worlds[0].layer, slots)
    there = worlds[1].arena.to(device)
    qk, v, cos, sin = (tensor.to(device) for tensor in (qk, v, cos, sin))
    norm = (weight.to(device), 1e-5) if with_norm else None
    layer = there[:, worlds[1].layout.num_layers // 2]
    q = rotary_store_kv(qk, v, cos, sin, layer, slots.to(device), norm=norm)
    return max(error(q, turned[:, :8]), error(there.nan_to_num(7), worlds[0].arena.nan_to_num(7))) / 2  # rounded twice


def _far(dtype: torch.dtype, device: str, op: str) -> float:
    """The op on blocks beyond 2^31 elements of a pool; a rehearsal's pool is small."""
    world = make_world([100, 37], block_size=16, head_dim=128, num_kv_heads=8, dtype=dtype)
    pool, far = far_pool(world.arena, device)
    layer = pool[:, world.layout.num_layers // 2]
    if op == "copy_blocks":
        copy_blocks(pool, [(far + 1, far + 2), (far + 3, 1)])
        reference.copy_blocks(world.arena, [(1, 2)])
        found = torch.stack((pool[far + 2], pool[1]))
        return error(found.nan_to_num(7), world.arena[[2, 3]].nan_to_num(7))
    if op in ("store_kv", "rotary_store_kv"):
        slots = torch.tensor([16 * 1 + 3, 16 * 2], dtype=torch.int64)
        k, v = random_queries(4, 8, 128, dtype).view(2, 2, 8, 128)
        reference.store_kv(k, v, world.layer, slots)
        k, v, slots = (tensor.to(device) for tensor in (k, v, slots + 16 * far))
        if op == "store_kv":
            store_kv(k, v, layer, slots)
        else:  # turned by nothing, so that what is stored are the same bits
            still = torch.ones(2, 128, dtype=dtype, device=device)
            rotary_store_kv(torch.cat((k, k), 1), v, still, still * 0, layer, slots)
        return error(layer[far:].nan_to_num(7), world.layer.nan_to_num(7))
    tables, lens = (world.block_tables + far).to(device), world.seq_lens.to(device)
    if op == "decode":
        q = random_queries(2, 16, 128, dtype)
        expected = reference.paged_attention_decode(q, world.layer, world.block_tables, world.seq_lens, scale=_SCALE)
        return error(paged_attention_decode(q.to(device), layer, tables, lens, scale=_SCALE), expected)
    q, locs = random_queries(25, 16, 128, dtype), locs_of([20, 5])
    expected = reference.paged_attention_prefill(q, world.layer, world.block_tables, world.seq_lens, locs, scale=_SCALE)
    return error(paged_attention_prefill(q.to(device), layer, tables, lens, locs.to(device), scale=_SCALE), expected)


def _rotary(dtype: torch.dtype, device: str, head_dim: int) -> float:
    x = random_queries(40, 6, head_dim, dtype)
    angles = torch.linspace(0, 6, 20 * head_dim).view(40, head_dim // 2)
    cos = torch.cat((angles.cos(), angles.cos()), 1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    expected = reference.rotary(x, cos, sin)
    return error(rotary(x.to(device), cos.to(device), sin.to(device)), expected)


def _copy(dtype: torch.dtype, device: str) -> float:
    arena = make_world([500], block_size=16, head_dim=64, dtype=dtype).arena.nan_to_num(3)
    pairs = [(1, 2), (2, 3), (4, 1), (5, 6), (7, 8), (8, 9)]
    there = arena.to(device, copy=True)
    copy_blocks(there, pairs)
    reference.copy_blocks(arena, pairs)
    return error(there, arena)


def _move(device: str, block_bytes: int) -> float:
    """Many blocks to the host tier and back, on a stream beside the current one, as a step does it."""
    host = torch.zeros(40, block_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    blocks = torch.randint(0, 256, (40, block_bytes), dtype=torch.uint8)
    there = blocks.to(device, copy=True)
    hosts, failed = move_there_and_back(BlockMover(there, host), device)
    if failed:
        return float("inf")
    return max(error(there[20:], blocks[:20]), error(host[hosts], blocks[:20]))


def _norm(dtype: torch.dtype, device: str, length: int) -> float:
    x, residual = random_queries(80, 1, length, dtype).view(2, 40, length)
    weight = random_queries(1, 1, length, dtype).view(length)
    expected = reference.rms_norm(x.clone(), weight, 1e-5, residual)
    found = rms_norm(x.to(device, copy=True), weight.to(device), 1e-5, residual.to(device))
    return max(error(own, other) for own, other in zip(found, expected, strict=True))


def _gates(dtype: torch.dtype, device: str, length: int) -> float:
    x = random_queries(40, 1, 2 * length, dtype).view(40, 2 * length)
    pairs = [(op(x.to(device)), getattr(reference, op.__name__)(x)) for op in (silu_and_mul, gelu_and_mul)]
    return max(error(own, other) for own, other in pairs)


def _likeliest(device: str, vocab_size: int) -> float:
    """Rows with many logits that are equal, and some that are not finite: other tokens than on the host are an error of one."""
    logits = torch.randint(-4, 9, (67, vocab_size), generator=torch.Generator().manual_seed(4)).float()
    logits[3, 7], logits[5, 0], logits[8] = float("nan"), float("inf"), float("-inf")
    return error(find_likeliest(logits.to(device))[1].float(), find_likeliest(logits)[1].float())


def _penalties(device: str) -> float:
    """Logits of histories that repeat themselves, penalised there and on the host, which have to be the same."""
    rng, num_rows, vocab_size = np.random.default_rng(4), 16, 3000
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.4)
    histories = [rng.integers(0, vocab_size // 10, 40 * row).astype(np.int32) for row in range(num_rows)]
    rows = [SamplingRow(params, 0, 0, history, len(history) // 2) for history in histories]
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(4)) * 5
    return error(apply_penalties(logits.to(device), rows), apply_penalties(logits, rows))


def _penalties_counted(device: str) -> float:
    """The same bits by counts that stay there, and the same counts."""
    errors = []
    for dtype in (torch.int16, torch.int32):
        logits, counts, rows = make_counted(vocab_size=3000, dtype=dtype, num_rows=64)
        there = counts.clone().to(device)
        expected = penalise_counted(logits, counts, rows)
        found = penalise_counted(logits.to(device), there, CountedTensors(*(column.to(device) for column in rows)))
        errors += [error(found, expected), error(there.float(), counts.float())]
    return max(errors)


def _uniforms(device: str) -> float:
    numbers = torch.randint(-(2**63), 2**63 - 1, (3, 300), generator=torch.Generator().manual_seed(1))
    return error(uniforms_there(numbers.to(device)), uniforms_there(numbers)) * 1e9  # the same bits, or far too large


def _sampling(device: str, vocab_size: int) -> float:
    """Share of rows that draw another token than the CPU does: the same number decides, up to the last bits of sums.

    A small vocabulary is one program's, a large one that of several.
    """
    logits = random_queries(256, 1, vocab_size).view(256, vocab_size) * 3
    columns = [torch.full((256,), value, dtype=torch.float64) for value in (0.8, 40, 0.9, 0.02, 1.0)]
    columns[1] = columns[1].long()
    columns[1][::3], columns[2][::5], columns[3][::2] = 0, 1.0, 0.0
    uniforms = torch.rand(256, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = sample_rows(logits, SamplingTensors(*columns), uniforms)
    there = SamplingTensors(*(column.to(device) for column in columns))
    found = sample_rows(logits.to(device), there, uniforms.to(device)).cpu()
    return float((found != expected).double().mean()) / 1e3  # one row of 256 may differ
