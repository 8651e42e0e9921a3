"""Every launch that is compiled: the wrappers, called with tensors of a real model's shapes that have no memory."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from kvkeeper.engine_service.model.chunked import decode_in_chunks
from kvkeeper.kernels.activations.gates import clamped_swiglu, gelu_and_mul, silu_and_mul
from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_float8 import quantise_rows
from kvkeeper.kernels.activations.linear_integers import IntegerWeight
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.activations.rotary import rotary
from kvkeeper.kernels.attention.latent_attention import latent_attention_decode, latent_attention_prefill, latent_layer
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.copy_blocks import copy_blocks, move_blocks
from kvkeeper.kernels.device_integers import DeviceIntegers, allocate_integers
from kvkeeper.kernels.find_likeliest import find_likeliest
from kvkeeper.kernels.gpu import decode_work
from kvkeeper.kernels.gpu import paged_attention_prefill as paged_attention_prefill_kernels
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.penalise_counted import penalise_counted
from kvkeeper.kernels.philox import uniforms_there
from kvkeeper.kernels.quantised.attention import quantised_decode, quantised_prefill
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from kvkeeper.kernels.quantised.store import store_quantised
from kvkeeper.kernels.recurrent.delta_rule import delta_decode, delta_prefill
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.recurrent.short_conv import short_conv
from kvkeeper.kernels.rotary_store_kv import rotary_store_kv
from kvkeeper.kernels.sampling import SamplingTensors, sample_rows
from kvkeeper.kernels.store_kv import store_kv
from kvkeeper.kernels.store_latent import store_latent
from kvkeeper.kernels.types import (
    STATE_CHUNK,
    ChannelRule,
    ConvInputs,
    CountedTensors,
    DeltaInputs,
    DeltaState,
    LinearWeight,
    QuantisedRows,
    QuantisedSlots,
    ScanRule,
    StateChunks,
    StateRows,
)
from tests.unit.kernels.gpu.pretend import PretendCuda, nowhere

LAUNCHES: dict[str, Callable[[], object]] = {}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_BLOCKS, _NUM_LAYERS = 20_000, 32


def kind_of(launch: str) -> str:
    """Its name without the words that have digits: sizes, dtypes, formats."""
    return " ".join(word for word in launch.split() if word.isalpha() or "_" in word)


def _arena(head_dim: int, block_size: int, dtype: torch.dtype, num_kv_heads: int = 8) -> torch.Tensor:
    layout = KvLayout(_NUM_LAYERS, num_kv_heads, head_dim, dtype, block_size)
    return nowhere(_NUM_BLOCKS, *layout.view_shape, dtype=dtype)


def _ints(*shape: int) -> torch.Tensor:
    return nowhere(*shape, dtype=torch.int32)


def _store(head_dim: int, num_tokens: int, dtype: torch.dtype) -> None:
    layer = _arena(head_dim, 16, dtype)[:, 1]
    qkv = nowhere(num_tokens, 48 * head_dim, dtype=dtype)
    k, v = (qkv[:, first * head_dim : (first + 8) * head_dim].unflatten(1, (8, head_dim)) for first in (32, 40))
    store_kv(k, v, layer, _ints(num_tokens))


def _rotary(head_dim: int, dtype: torch.dtype) -> None:
    qkv, table = nowhere(4096, 48, head_dim, dtype=dtype), nowhere(4096, head_dim, dtype=dtype)
    rotary(qkv[:, :40], table, table)
    norm = (nowhere(40, head_dim, dtype=dtype), 1e-5)
    for own_norm in (None, norm):
        layer = _arena(head_dim, 16, dtype)[:, 1]
        rotary_store_kv(qkv[:, :40], qkv[:, 40:], table, table, layer, _ints(4096), norm=own_norm)


def _rows(length: int, dtype: torch.dtype) -> None:
    x, weight = nowhere(4096, length, dtype=dtype), nowhere(length, dtype=dtype)
    rms_norm(x, weight, 1e-5)
    rms_norm(x, weight, 1e-5, x)
    silu_and_mul(x)
    gelu_and_mul(x)


def _head_norm(head_dim: int, dtype: torch.dtype, num_tokens: int = 4096) -> None:
    rms_norm(nowhere(num_tokens, 48, head_dim, dtype=dtype)[:, :40], nowhere(40, head_dim, dtype=dtype), 1e-5)


def _attend(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    num_seqs: int = 8,
    num_queries: int | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    logits: bool = False,
    width: int | None = None,
    num_heads: int = 32,
    num_kv_heads: int = 8,
) -> None:
    """Decode, or with num_queries prefill."""
    q = nowhere(num_queries or num_seqs, num_heads, head_dim, dtype=dtype)
    tensors = (
        q,
        _arena(head_dim, block_size, dtype, num_kv_heads)[:, 1],
        _ints(num_seqs, width or 8192 // block_size),
        _ints(num_seqs),
    )
    options = {"scale": 0.1, "window": window, "soft_cap": cap}
    options |= {"retention": (_ints(num_seqs), _ints(num_seqs)), "q_sink": q} if sinks else {}
    options |= {"sink_logits": nowhere(32, dtype=torch.float32)} if logits else {}
    if num_queries is None:
        paged_attention_decode(*tensors, **options)
    else:
        paged_attention_prefill(*tensors, _ints(num_seqs + 1), **options)


def _group(num_rows: int, dtype: torch.dtype) -> None:
    """The experts of gpt-oss, 20 billion parameters: 32 of them, 4 for each token."""
    starts, hidden = _ints(33), 2880
    for num_in, num_out in ((hidden, 2 * hidden), (hidden, hidden)):
        weight = LinearWeight(nowhere(32, num_out, num_in, dtype=dtype), nowhere(32, num_out, dtype=dtype))
        grouped_linear(nowhere(num_rows, num_in, dtype=dtype), weight, starts)
    clamped_swiglu(nowhere(num_rows, 2 * hidden, dtype=dtype), 1.702, 7.0)


def integers_of(bits: Literal[8, 4], *shape: int) -> IntegerWeight:
    """A weight [O, I] of integers, or several [E, O, I], with biases."""
    blocks = allocate_integers(bits, torch.Size(shape), torch.device("meta"))
    there = (None if each is None else each.as_subclass(PretendCuda) for each in blocks[1:])
    return IntegerWeight(DeviceIntegers(bits, *there), nowhere(*shape[:-1]), shape[-1], shape[-2])


def _integers(num_rows: int, bits: Literal[8, 4], dtype: torch.dtype) -> None:
    """The last product of an MLP of Llama-3.1-8B."""
    linear(nowhere(num_rows, 14336, dtype=dtype), integers_of(bits, 4096, 14336))


def _group_integers(num_rows: int, bits: Literal[8, 4], dtype: torch.dtype) -> None:
    """The last products of the experts of gpt-oss."""
    grouped_linear(nowhere(num_rows, 2880, dtype=dtype), integers_of(bits, 32, 2880, 2880), _ints(33))


def _latent(
    num_heads: int, latent: int, rope: int, dtype: torch.dtype, *, num_seqs: int = 16, num_queries: int = 0, width: int = 512
) -> None:
    """Decode, or with num_queries prefill, of latents."""
    layout = KvLayout(_NUM_LAYERS, 1, latent + rope, dtype, 16, is_latent=True)
    view = nowhere(_NUM_BLOCKS, *layout.view_shape, dtype=dtype)[:, 1]
    layer = latent_layer(view).as_subclass(type(view))
    q = nowhere(num_queries or num_seqs, num_heads, latent + rope, dtype=dtype)
    tensors = (q, layer, _ints(num_seqs, width), _ints(num_seqs))
    if num_queries:
        latent_attention_prefill(*tensors, _ints(num_seqs + 1), scale=0.1, latent=latent)
    else:
        latent_attention_decode(*tensors, scale=0.1, latent=latent)


def _store_latent(latent: int, rope: int, dtype: torch.dtype) -> None:
    layout = KvLayout(_NUM_LAYERS, 1, latent + rope, dtype, 16, is_latent=True)
    layer = latent_layer(nowhere(_NUM_BLOCKS, *layout.view_shape, dtype=dtype)[:, 1])
    turned = nowhere(64, 129, rope, dtype=dtype)[:, -1]
    store_latent(nowhere(64, latent, dtype=dtype), turned, layer, _ints(64))


def _stored(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    *,
    num_seqs: int = 8,
    num_queries: int | None = None,
    num_tokens: int | None = None,
    tail: int = 16,
    logits: bool = False,
    width: int = 512,
) -> None:
    """Decode of K and V in few bits, or with num_queries prefill, or with num_tokens their store. tail: layers of a page."""
    layout = QuantisedLayout(_NUM_LAYERS, 8, head_dim, 16, FORMATS[name], dtype, tail)
    layer = get_layer(nowhere(_NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8), layout, 1)
    has_tail = bool(tail)
    if num_tokens is not None:
        slots = nowhere(num_tokens, dtype=torch.int64)
        where = QuantisedSlots(slots, slots if has_tail else None)
        store_quantised(*(nowhere(num_tokens, 8, head_dim, dtype=dtype) for _ in range(2)), layer, where)
        return
    tables = _ints(num_seqs, width)
    rows = QuantisedRows(tables, tables if has_tail else None, _ints(num_seqs), _ints(num_seqs + 1) if num_queries else None)
    q = nowhere(num_queries or num_seqs, 32, head_dim, dtype=dtype)
    own = nowhere(32, dtype=torch.float32) if logits else None
    (quantised_prefill if num_queries else quantised_decode)(q, layer, rows, scale=0.1, sink_logits=own)


def _sample(vocab_size: int) -> None:
    doubles = [nowhere(128, dtype=torch.float64) for _ in range(5)]
    params = SamplingTensors(doubles[0], nowhere(128, dtype=torch.int64), *doubles[1:4])
    sample_rows(nowhere(128, vocab_size, dtype=torch.float32), params, doubles[4])


def _penalise(counts: torch.dtype, num_rows: int = 128) -> None:
    """The columns are of a captured step: parts of larger memory."""
    longs = nowhere(3, 256, dtype=torch.int64)[:, :num_rows]
    logits, rows = nowhere(num_rows, 131_072, dtype=torch.float32), nowhere(257, 131_072, dtype=counts)
    penalise_counted(logits, rows, CountedTensors(*longs, nowhere(3, 256, dtype=torch.float64)[:, :num_rows]))


def _find_likeliest(num_rows: int) -> None:
    find_likeliest(nowhere(num_rows, 131_072, dtype=torch.float32))


def _attend_chunks(num_seqs: int, width: int) -> None:
    """Decode of Llama 4: 5 queries for each head of K and V, tables of a chunk of 8192 tokens, gathered from wider ones."""
    q, layer = nowhere(num_seqs, 40, 128), _arena(128, 16, torch.bfloat16)[:, 1]
    tables, lens = decode_in_chunks(_ints(num_seqs, width), _ints(num_seqs), 8192, 16)
    paged_attention_decode(q, layer, tables, lens, scale=0.1)


def _delta(
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    num_rows: int = 16,
    num_chunks: int = 0,
    is_scan: bool = False,
    has_channels: bool = False,
    least: float | None = None,
) -> None:
    """Decode of a gated delta net with 16 heads of keys and 32 of values, or with num_chunks prefill of full chunks.

    is_scan: of Mamba 2, with 8 heads of keys and 64 of values. has_channels: of Kimi Delta Attention, with 32 of each.
    """
    num_keys, num_heads = (8, 64) if is_scan else (32, 32) if has_channels else (16, 32)
    channels, num_tokens = 2 * num_keys * key_dim + num_heads * value_dim, num_chunks * STATE_CHUNK or num_rows
    projected = nowhere(num_tokens, channels + num_heads * value_dim, dtype=dtype)
    numbers = [nowhere(num_heads, dtype=torch.float32) for _ in range(3)]
    gates = nowhere(num_tokens, num_heads if is_scan or has_channels else 2 * num_heads, dtype=dtype)
    rule = None
    if has_channels:
        numbers[0] = nowhere(num_heads * key_dim, dtype=torch.float32)
        rule = ChannelRule(nowhere(num_tokens, num_heads * key_dim, dtype=dtype), least)
    scan = ScanRule(nowhere(channels, dtype=dtype), numbers[2], 0.0, math.inf) if is_scan else None
    inputs = DeltaInputs(projected[:, :channels], gates, nowhere(channels, 4, dtype=dtype), *numbers[:2], scan, rule)
    block = nowhere(_NUM_BLOCKS, 3 * num_heads * key_dim * value_dim, dtype=torch.float32)
    memory = block[:, : num_heads * key_dim * value_dim].unflatten(1, (num_heads, key_dim, value_dim))
    state = DeltaState(memory, nowhere(_NUM_BLOCKS, 9 * channels, dtype=dtype)[:, : 3 * channels].unflatten(1, (3, channels)))
    out = nowhere(num_tokens, num_heads, value_dim, dtype=dtype)
    rows, more, chunks = (nowhere(count, dtype=torch.int64) for count in (num_rows, num_rows + 1, num_chunks))
    if num_chunks:
        delta_prefill(inputs, state, StateChunks(rows, more, *[chunks] * 4), out)
    else:
        delta_decode(inputs, state, StateRows(None, rows, rows), out)
    heads, weight = (out.view(num_tokens, num_keys, -1), (num_keys, 512)) if is_scan else (out, (value_dim,))
    gated_norm(heads, projected[:, channels:], nowhere(*weight, dtype=dtype), 1e-6, is_sigmoid=has_channels)


def _short_conv(channels: int, dtype: torch.dtype, *, num_rows: int = 16, num_chunks: int = 0) -> None:
    """Decode of a short convolution over three tokens, or with num_chunks prefill of full chunks."""
    num_tokens = num_chunks * STATE_CHUNK or num_rows
    inputs = ConvInputs(nowhere(num_tokens, 3 * channels, dtype=dtype), nowhere(channels, 3, dtype=dtype), None)
    window = nowhere(_NUM_BLOCKS, 9 * channels, dtype=dtype)[:, : 2 * channels].unflatten(1, (2, channels))
    rows, more, chunks = (nowhere(count, dtype=torch.int64) for count in (num_rows, num_rows + 1, num_chunks))
    given = StateChunks(rows, more, *[chunks] * 4) if num_chunks else StateRows(None, rows, rows)
    short_conv(inputs, window, given, nowhere(num_tokens, channels, dtype=dtype))


def _add(name: str, launch: Callable[..., object], *args: object, **options: object) -> None:
    LAUNCHES[name] = lambda: launch(*args, **options)


# Every head dim in bfloat16. What else a kernel may differ in is compiled where it can cost most, not in every combination:
# block sizes and float16 at the common head dim, splits at the common one and the largest (80 and 96 are padded to the tile of
# 128), features at that one and the largest, where registers are scarcest.
decode_work.num_multiprocessors = paged_attention_prefill_kernels.num_multiprocessors = lambda device: 132
_HEAD_DIMS, _COMMON, _LARGEST = (64, 80, 96, 128, 256), 128, 256
for head_dim in _HEAD_DIMS:
    for label, dtype in DTYPES.items() if head_dim == _COMMON else [("bf16", torch.bfloat16)]:
        for num_tokens in (64, 4096):
            _add(f"store_kv d{head_dim} t{num_tokens} {label}", _store, head_dim, num_tokens, dtype)
        for block_size in (16, 32, 64) if (head_dim, label) == (_COMMON, "bf16") else (16,):
            _add(f"decode d{head_dim} b{block_size} {label}", _attend, head_dim, block_size, dtype)
            _add(f"prefill d{head_dim} b{block_size} {label}", _attend, head_dim, block_size, dtype, num_queries=8192)
for head_dim in (_COMMON, _LARGEST):
    base = (head_dim, 16, torch.bfloat16)
    _add(f"decode whole d{head_dim}", _attend, *base, num_seqs=256, width=16)  # without a work list
    _add(f"prefill few d{head_dim}", _attend, *base, num_queries=64, width=16)
    _add(f"prefill split d{head_dim}", _attend, *base, num_seqs=1, num_queries=64)
# Full layers of Gemma 4: heads of 512, few of K and V.
for num_heads, num_kv_heads in ((32, 4), (16, 1), (8, 2)):
    base = (512, 16, torch.bfloat16)
    of = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    heads = f"h{num_heads}/{num_kv_heads} d512"
    _add(f"decode {heads}", _attend, *base, **of)
    _add(f"decode shared {heads}", _attend, *base, num_seqs=32, **of)
    _add(f"prefill {heads}", _attend, *base, num_queries=8192, **of)
    if num_kv_heads != 2:  # with four queries for each head of K and V, a split takes four registers too many
        _add(f"prefill split {heads}", _attend, *base, num_seqs=1, num_queries=64, **of)
for head_dim in (64, _COMMON, _LARGEST):
    _add(f"decode shared d{head_dim}", _attend, head_dim, 16, torch.bfloat16, num_seqs=32)  # what many have in common
_add(f"decode shared cap d{_LARGEST}", _attend, _LARGEST, 16, torch.bfloat16, num_seqs=32, cap=30.0)
_FEATURES: dict[str, dict] = {
    "cap": {"cap": 30.0},
    "sinks": {"sinks": True},
    "cap sinks": {"cap": 30.0, "sinks": True},
    "window": {"window": 1024},
    "cap window": {"cap": 30.0, "window": 1024},
}
for label, features in _FEATURES.items():
    for head_dim in (_COMMON, _LARGEST):
        _add(f"prefill {label} d{head_dim}", _attend, head_dim, 16, torch.bfloat16, num_queries=8192, **features)
        if "window" not in features:  # decode has one kernel for any window
            _add(f"decode {label} d{head_dim}", _attend, head_dim, 16, torch.bfloat16, **features)
for label, features in {"logits": {}, "logits window": {"window": 128}}.items():
    _add(f"prefill {label} d64", _attend, 64, 16, torch.bfloat16, num_queries=8192, logits=True, **features)
_add("decode logits d64", _attend, 64, 16, torch.bfloat16, logits=True)
_add("decode logits whole d64", _attend, 64, 16, torch.bfloat16, num_seqs=256, width=16, logits=True)
_add("prefill logits split d64", _attend, 64, 16, torch.bfloat16, num_seqs=1, num_queries=64, logits=True)
_add("decode logits shared d64", _attend, 64, 16, torch.bfloat16, num_seqs=32, logits=True)
_add("decode chunks", _attend_chunks, 8, 4096)
for num_rows in (64, 1024, 32768):
    _add(f"experts of {num_rows} rows bf16", _group, num_rows, torch.bfloat16)
_add("experts of 1024 rows fp16", _group, 1024, torch.float16)
for bits in (8, 4):
    for num_rows in (1, 64, 4096):
        _add(f"integers int{bits} of {num_rows} rows bf16", _integers, num_rows, bits, torch.bfloat16)
    for num_rows in (64, 32768):
        _add(f"experts of integers int{bits} of {num_rows} rows bf16", _group_integers, num_rows, bits, torch.bfloat16)
_add("integers int4 of 1 rows fp16", _integers, 1, 4, torch.float16)
for length in (1024, 4096, 28672):
    _add(f"quantise rows of {length} bf16", lambda length=length: quantise_rows(nowhere(64, length)))
_LATENTS = ((128, 512, 64, "bf16"), (16, 512, 64, "bf16"), (40, 256, 32, "bf16"), (128, 512, 64, "fp16"))
for num_heads, latent, rope, label in _LATENTS[:3]:
    options = {"num_seqs": 1, "num_queries": 17}
    _add(f"latent split h{num_heads} d{latent} {label}", _latent, num_heads, latent, rope, DTYPES[label], **options)
for num_heads, latent, rope, label in _LATENTS:
    _add(f"latent decode h{num_heads} d{latent} {label}", _latent, num_heads, latent, rope, DTYPES[label])
    _add(f"latent prefill h{num_heads} d{latent} {label}", _latent, num_heads, latent, rope, DTYPES[label], num_queries=4096)
for latent, rope in ((512, 64), (256, 32)):
    _add(f"store latent d{latent} bf16", _store_latent, latent, rope, torch.bfloat16)
# What differs from step to step, and may not compile a kernel anew: the width of tables, the numbers of rows and tokens.
VARIANTS: dict[str, tuple[int, list[Callable[[], object]]]] = {
    "decode": (4, [partial(_attend, 128, 16, torch.bfloat16, num_seqs=n, width=w) for n in (3, 8) for w in (1, 7, 16, 100)]),
    "decode shared": (7, [partial(_attend, 128, 16, torch.bfloat16, num_seqs=n, width=w)
                          for n in (16, 31, 33) for w in (64, 99)]),
    "decode chunks": (4, [partial(_attend_chunks, n, w) for n in (3, 8) for w in (7, 512, 700, 4096)]),
    "uniforms": (1, [lambda n=n: uniforms_there(nowhere(3, 512, dtype=torch.int64)[:, :n]) for n in (1, 7, 16, 512)]),
    "prefill": (4, [partial(_attend, 128, 16, torch.bfloat16, num_seqs=n, width=w, num_queries=t)
                    for n in (1, 2, 16) for t in (17, 64, 999, 4096) for w in (1, 7, 16, 200, 211)]),
    "experts": (5, [partial(_group, n, torch.bfloat16) for n in (1, 4, 16, 500, 700)]),
    "integers": (3, [partial(_integers, n, 4, torch.bfloat16) for n in (1, 4, 16, 500, 700, 5000)]),
    "quantise rows": (1, [lambda n=n: quantise_rows(nowhere(n, 4096)) for n in (1, 7, 16, 4096)]),
    "experts of integers": (2, [partial(_group_integers, n, 8, torch.bfloat16) for n in (1, 4, 16, 500, 700)]),
    "latents": (7, [partial(_latent, 128, 512, 64, torch.bfloat16, num_seqs=n, width=w, num_queries=t)
                    for n in (1, 2, 16) for t in (0, 17, 64, 999) for w in (1, 7, 16, 200, 211, 1100)]),
    "stored": (3, [partial(_stored, "int8", 128, torch.bfloat16, num_seqs=n, width=w, num_queries=t)
                   for n in (1, 2, 16) for t in (17, 64, 999) for w in (1, 7, 16, 200, 211, 1100)]),
    "stored decode": (4, [partial(_stored, "int8", 128, torch.bfloat16, num_seqs=n, width=w)
                          for n in (3, 8) for w in (1, 7, 16, 100, 512)]),
    "stored shared": (7, [partial(_stored, "int8", 128, torch.bfloat16, num_seqs=n, width=w)
                          for n in (16, 31, 33) for w in (64, 99)]),
    "delta decode": (3, [partial(_delta, 128, 128, torch.bfloat16, num_rows=n) for n in (1, 7, 16)]),
    "delta prefill": (4, [partial(_delta, 128, 128, torch.bfloat16, num_rows=n, num_chunks=c)
                          for n in (1, 3, 16) for c in (1, 7, 16, 64)]),
    "channels decode": (3, [partial(_delta, 128, 128, torch.bfloat16, num_rows=n, has_channels=True, least=-5.0)
                            for n in (1, 7, 16)]),
    "channels prefill": (6, [partial(_delta, 128, 128, torch.bfloat16, num_rows=n, num_chunks=c, has_channels=True)
                             for n in (1, 3) for c in (1, 7, 64)]),
    "convolution": (2, [partial(_short_conv, 2048, torch.bfloat16, num_rows=n, num_chunks=c)
                        for n in (1, 3, 16) for c in (0, 1, 7, 64)]),
    "store": (1, [partial(_store, 128, n, torch.bfloat16) for n in (1, 7, 16, 64)]),
    "norm": (1, [partial(_head_norm, 128, torch.bfloat16, num_tokens=n) for n in (1, 7, 16)]),
    "likeliest": (2, [partial(_find_likeliest, n) for n in (1, 7, 128)]),
    "penalise": (1, [partial(_penalise, torch.int16, num_rows=n) for n in (1, 7, 128)]),
    "copies": (1, [partial(copy_blocks, _arena(128, 16, torch.bfloat16), [(0, 1 + at) for at in range(n)]) for n in (1, 2, 7)]),
}  # fmt: skip
for head_dim in _HEAD_DIMS:
    _add(f"rotary d{head_dim} bf16", _rotary, head_dim, torch.bfloat16)
_add("rotary d512 bf16", _rotary, 512, torch.bfloat16)
_add("likeliest of 131072", _find_likeliest, 128)
_add("rotary d128 fp16", _rotary, _COMMON, torch.float16)
for length in (1024, 4096, 14336):
    _add(f"rows of {length} bf16", _rows, length, torch.bfloat16)
_add("rows of 4096 fp16", _rows, 4096, torch.float16)
for head_dim in (64, 128, 256):
    _add(f"norm of heads d{head_dim} bf16", _head_norm, head_dim, torch.bfloat16)
# Every format at the common head dim; in float16 and without a tail, and at a smaller head dim, one each.
for name, head_dim, dtype, tail in (
    *((name, _COMMON, torch.bfloat16, 16) for name in ("int8", "int4", "fp8")),
    ("int4", _COMMON, torch.float16, 0),
    ("int8", 64, torch.bfloat16, 16),
):
    own = f"{name} d{head_dim} {str(dtype).removeprefix('torch.')}"
    _add(f"stored decode {own}", _stored, name, head_dim, dtype, tail=tail)
    _add(f"stored shared {own}", _stored, name, head_dim, dtype, tail=tail, num_seqs=32)
    _add(f"stored prefill {own}", _stored, name, head_dim, dtype, tail=tail, num_queries=8192)
    _add(f"stored split {own}", _stored, name, head_dim, dtype, tail=tail, num_seqs=1, num_queries=17)
    _add(f"stored store {own}", _stored, name, head_dim, dtype, tail=tail, num_tokens=64)
for kind, options in {"prefill": {"num_queries": 8192}, "split": {"num_seqs": 1, "num_queries": 17}}.items():
    _add(f"stored {kind} int4 d{_LARGEST} bfloat16", _stored, "int4", _LARGEST, torch.bfloat16, **options)
_add(f"stored shared int4 d{_LARGEST} bfloat16", _stored, "int4", _LARGEST, torch.bfloat16, num_seqs=32)
for kind, options in {"decode": {}, "shared": {"num_seqs": 32}, "prefill": {"num_queries": 8192}}.items():
    _add(f"stored {kind} logits int8 d64", _stored, "int8", 64, torch.bfloat16, logits=True, **options)
_add("copy_blocks", lambda: copy_blocks(_arena(128, 16, torch.bfloat16), [(1, 2), (3, 4)]))
_add("move_blocks", lambda: move_blocks(*(nowhere(99, 3, 4096, dtype=torch.uint8)[:, 1] for _ in range(2)), [(1, 2), (3, 4)]))
_add("uniforms", lambda: uniforms_there(nowhere(3, 256, dtype=torch.int64)))
for vocab_size in (4096, 50_257, 262_144):  # the first one by one program a row
    _add(f"sample {vocab_size}", _sample, vocab_size)
for counts in (torch.int16, torch.int32):
    _add(f"penalise by {str(counts).removeprefix('torch.')}", _penalise, counts)
for key_dim, value_dim, label in ((128, 128, "bf16"), (64, 64, "bf16"), (128, 128, "fp16")):
    _add(f"delta decode d{key_dim} {label}", _delta, key_dim, value_dim, DTYPES[label])
    _add(f"delta prefill d{key_dim} {label}", _delta, key_dim, value_dim, DTYPES[label], num_chunks=64)
_add("convolution decode d2048 bf16", _short_conv, 2048, torch.bfloat16)
_add("convolution prefill d2048 bf16", _short_conv, 2048, torch.bfloat16, num_chunks=64)
for label, least in (("", None), (" bounded", -5.0)):
    _add(f"channels decode d128 bf16{label}", _delta, 128, 128, torch.bfloat16, has_channels=True, least=least)
    _add(f"channels prefill d128 bf16{label}", _delta, 128, 128, torch.bfloat16, num_chunks=64, has_channels=True, least=least)
_add("scan decode d128 bf16", _delta, 128, 64, torch.bfloat16, is_scan=True)
_add("scan prefill d128 bf16", _delta, 128, 64, torch.bfloat16, num_chunks=64, is_scan=True)
