"""Part c: every kernel against this machine's own ceilings, and attention against torch's and FlashInfer's.

Figures are reported beside their aims; none fails the run. A rehearsal takes tiny shapes on the CPU.
"""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.attention.flashinfer_prefill import (
    FlashInferPlan,
    Wrappers,
    find_flashinfer,
    find_pages,
    make_workspace,
)
from kvkeeper.kernels.attention.latent_attention import latent_attention_prefill, latent_layer
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.copy_blocks import copy_blocks
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.quantised.attention import plan_rows, quantised_decode, quantised_prefill
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.layout import QuantisedLayer, QuantisedLayout, get_layer
from kvkeeper.kernels.sampling import SamplingTensors, sample_rows
from kvkeeper.kernels.store_kv import store_kv
from tests.gpu import product_speed
from tests.gpu.checks import Check, guarded
from tests.gpu.stopwatch import Ceilings, Stopwatch

_BLOCK_SIZE = 16
_HEADS, _KV_HEADS = 32, 8
_DTYPE = torch.bfloat16


def run(is_dry: bool) -> Iterator[Check]:
    """All figures. What cannot be measured is a check that says why."""
    watch = Stopwatch("cpu" if is_dry else "cuda")
    ceilings = watch.ceilings()
    figures = {"read_gb_s": ceilings.read / 1e9, "copy_gb_s": ceilings.copy / 1e9, "matmul_tflop_s": ceilings.matmul / 1e12}
    yield Check("ceilings", None, figures)
    shapes = [(2, 64, 16)] if is_dry else [(1, 131_072, 128), (32, 4096, 128), (256, 1024, 128), (64, 4096, 64)]
    for num_seqs, seq_len, head_dim in shapes:
        yield guarded(
            f"decode_{num_seqs}x{seq_len}_d{head_dim}",
            partial(_decode, watch, ceilings, num_seqs, seq_len, head_dim),
        )
    yield guarded("decode_one_long_of_64", partial(_one_long, watch, ceilings))
    for num_seqs, prefix in ((17, 64),) if is_dry else ((16, 2048), (64, 8192), (256, 2048)):
        yield guarded(f"decode_shared_{num_seqs}x{prefix}", partial(_shared_prefix, watch, ceilings, num_seqs, prefix))
    num_seqs, prefix = (17, 64) if is_dry else (64, 8192)
    yield guarded(f"decode_shared_{num_seqs}x{prefix}_int8", partial(_stored_shared_prefix, watch, ceilings, num_seqs, prefix))
    for num_queries in (1, 17, 64):
        yield guarded(f"suffix_{num_queries}_on_32k", partial(_suffix, watch, ceilings, num_queries))
    for name in ("int8", "int4"):
        yield guarded(f"suffix_17_on_32k_{name}", partial(_stored_suffix, watch, ceilings, 17, name))
    yield guarded("suffix_17_on_32k_latents", partial(_latent_suffix, watch, ceilings, 17))
    for seq_len in (64,) if is_dry else (2048, 8192):
        yield guarded(f"prefill_{seq_len}", partial(_prefill, watch, ceilings, seq_len))
    for measure in (_store, _copy, _norm, _swap):
        yield guarded(measure.__name__.removeprefix("_"), partial(measure, watch, ceilings))
    yield from product_speed.checks(watch, ceilings, is_dry)
    for rows in (2,) if is_dry else (1, 16, 128):
        for label, top_k, top_p in (("top_k_top_p", 40, 0.9), ("top_p", 0, 0.9), ("none", 0, 1.0)):
            yield guarded(f"sampling_{rows}_{label}", partial(_sampling, watch, rows, top_k, top_p, label))


def get_paged(watch: Stopwatch, num_seqs: int, seq_len: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's view of an arena with scattered blocks, and the block tables."""
    per_seq = -(-seq_len // _BLOCK_SIZE)
    layout = KvLayout(1, _KV_HEADS, head_dim, _DTYPE, _BLOCK_SIZE)
    arena = torch.randn(num_seqs * per_seq + 1, *layout.view_shape, device=watch.device, dtype=_DTYPE)
    tables = torch.randperm(num_seqs * per_seq, device=watch.device).add_(1).int().view(num_seqs, per_seq)
    return arena[:, 0], tables


def _stored(watch: Stopwatch, num_blocks: int, head_dim: int, name: str) -> QuantisedLayer:
    """A layer of K and V in few bits, with so many blocks behind the null block."""
    layout = QuantisedLayout(1, _KV_HEADS, head_dim, _BLOCK_SIZE, FORMATS[name], _DTYPE)
    memory = torch.randint(0, 256, ((num_blocks + 1) * layout.block_bytes,), device=watch.device, dtype=torch.uint8)
    layer = get_layer(layout.view(memory), layout, 0)
    layer.scales.fill_(0x3C00)  # 1/128, as a bfloat16
    return layer


def make_random(watch: Stopwatch, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=watch.device, dtype=_DTYPE)


def _decode(watch: Stopwatch, ceilings: Ceilings, num_seqs: int, seq_len: int, head_dim: int) -> Check:
    layer, tables = get_paged(watch, num_seqs, seq_len, head_dim)
    lens = torch.full((num_seqs,), seq_len, device=watch.device, dtype=torch.int32)
    q, scale = make_random(watch, num_seqs, _HEADS, head_dim), head_dim**-0.5
    seconds = watch.seconds(lambda: paged_attention_decode(q, layer, tables, lens, scale=scale))
    in_graph = watch.in_graph(lambda: paged_attention_decode(q, layer, tables, lens, scale=scale))
    num_bytes = 2 * num_seqs * seq_len * _KV_HEADS * head_dim * _DTYPE.itemsize
    k, v = (make_random(watch, num_seqs, _KV_HEADS, seq_len, head_dim) for _ in range(2))
    by_torch = watch.seconds(lambda: scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True))
    figures = {
        "us": seconds * 1e6,
        "graph_us": in_graph * 1e6,
        "kv_mb": num_bytes / 1e6,
        "of_read_bandwidth": num_bytes / in_graph / ceilings.read,
        "times_torch_sdpa": by_torch / seconds,
        **_flashinfer_decode(watch, q, layer, tables, seq_len, seconds),
    }
    return Check(
        f"decode_{num_seqs}x{seq_len}_d{head_dim}", None, figures, "aim: 0.85 of reading from 256 MB on, 0.95x FlashInfer"
    )


def _one_long(watch: Stopwatch, ceilings: Ceilings) -> Check:
    """One sequence of 128k tokens among 63 of 256: whether it has the device to itself."""
    longest, head_dim = (131_072, 128) if watch.device == "cuda" else (512, 16)
    layer, tables = get_paged(watch, 1, longest + 63 * 256, head_dim)
    blocks = tables.flatten()
    rows = torch.zeros(64, longest // _BLOCK_SIZE, dtype=torch.int32, device=watch.device)
    rows[0] = blocks[: longest // _BLOCK_SIZE]
    rows[1:, :16] = blocks[longest // _BLOCK_SIZE :].view(63, 16)
    lens = torch.tensor([longest] + [256] * 63, device=watch.device, dtype=torch.int32)
    q = make_random(watch, 64, _HEADS, head_dim)
    seconds = watch.in_graph(lambda: paged_attention_decode(q, layer, rows, lens, scale=head_dim**-0.5))
    num_bytes = 2 * int(lens.sum()) * _KV_HEADS * head_dim * _DTYPE.itemsize
    figures = {"graph_us": seconds * 1e6, "kv_mb": num_bytes / 1e6, "of_read_bandwidth": num_bytes / seconds / ceilings.read}
    return Check("decode_one_long_of_64", None, figures, "aim: 0.85 of reading")


def _shared_prefix(watch: Stopwatch, ceilings: Ceilings, num_seqs: int, prefix: int) -> Check:
    """Sequences with a prefix in common, whose keys are read once for sixteen of them; and the same number without."""
    own, head_dim = (256, 128) if watch.device == "cuda" else (16, 16)
    layer, tables = get_paged(watch, num_seqs, prefix + own, head_dim)
    lens = torch.full((num_seqs,), prefix + own, device=watch.device, dtype=torch.int32)
    q, scale = make_random(watch, num_seqs, _HEADS, head_dim), head_dim**-0.5
    apart, together = (
        watch.in_graph(partial(paged_attention_decode, q, layer, rows, lens, scale=scale))
        for rows in (tables, _with_prefix(tables, prefix))
    )
    num_bytes = 2 * (prefix + num_seqs * own) * _KV_HEADS * head_dim * _DTYPE.itemsize
    return _shared_check(f"decode_shared_{num_seqs}x{prefix}", num_bytes, apart, together, ceilings)


def _stored_shared_prefix(watch: Stopwatch, ceilings: Ceilings, num_seqs: int, prefix: int) -> Check:
    """The same over K and V in 8 bits, without a tail."""
    own, head_dim = (256, 128) if watch.device == "cuda" else (16, 16)
    per_seq = (prefix + own) // _BLOCK_SIZE
    layer = _stored(watch, num_seqs * per_seq, head_dim, "int8")
    tables = torch.randperm(num_seqs * per_seq, device=watch.device).add_(1).int().view(num_seqs, per_seq)
    lens = torch.full((num_seqs,), prefix + own, device=watch.device, dtype=torch.int32)
    q, scale = make_random(watch, num_seqs, _HEADS, head_dim), head_dim**-0.5

    def decode(tables: torch.Tensor) -> float:  # planned in each call, as paged_attention_decode is
        return watch.in_graph(lambda: quantised_decode(q, layer, plan_rows(tables, None, lens, None, layer), scale=scale))

    num_bytes = (prefix + num_seqs * own) * layer.layout.block_bytes // _BLOCK_SIZE
    name = f"decode_shared_{num_seqs}x{prefix}_int8"
    return _shared_check(name, num_bytes, decode(tables), decode(_with_prefix(tables, prefix)), ceilings)


def _with_prefix(tables: torch.Tensor, prefix: int) -> torch.Tensor:
    """The tables, but all with the blocks of the first as their prefix."""
    shared = tables.clone()
    shared[:, : prefix // _BLOCK_SIZE] = tables[0, : prefix // _BLOCK_SIZE]
    return shared


def _shared_check(name: str, num_bytes: int, apart: float, together: float, ceilings: Ceilings) -> Check:
    """num_bytes: of all keys and values, with those that are shared once."""
    figures = {
        "graph_us": together * 1e6,
        "graph_us_apart": apart * 1e6,
        "times_faster": apart / together,
        "once_read_of_bandwidth": num_bytes / together / ceilings.read,
    }
    return Check(name, None, figures, "aim: within 1.2 of reading what is shared once")


def _suffix(watch: Stopwatch, ceilings: Ceilings, num_queries: int) -> Check:
    """A short suffix on a cached prefix of 32k tokens, the case of a prefix hit."""
    context, head_dim = (32_768, 128) if watch.device == "cuda" else (256, 16)
    layer, tables = get_paged(watch, 1, context + num_queries, head_dim)
    lens = torch.tensor([context + num_queries], device=watch.device, dtype=torch.int32)
    locs = torch.tensor([0, num_queries], device=watch.device, dtype=torch.int32)
    q = make_random(watch, num_queries, _HEADS, head_dim)
    seconds = watch.in_graph(lambda: paged_attention_prefill(q, layer, tables, lens, locs, scale=head_dim**-0.5))
    return _suffix_check(
        f"suffix_{num_queries}_on_32k", 2 * int(lens) * _KV_HEADS * head_dim * _DTYPE.itemsize, seconds, ceilings
    )


def _suffix_check(name: str, num_bytes: int, seconds: float, ceilings: Ceilings) -> Check:
    """num_bytes: of all keys and values."""
    figures = {"graph_us": seconds * 1e6, "kv_mb": num_bytes / 1e6, "of_read_bandwidth": num_bytes / seconds / ceilings.read}
    return Check(name, None, figures)


def _suffix_tables(watch: Stopwatch, num_tokens: int, num_queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scattered blocks, length and starts of one sequence."""
    tables = torch.randperm(-(-num_tokens // _BLOCK_SIZE), device=watch.device).add_(1).int()[None]
    lens, locs = (torch.tensor(each, device=watch.device, dtype=torch.int32) for each in ([num_tokens], [0, num_queries]))
    return tables, lens, locs


def _stored_suffix(watch: Stopwatch, ceilings: Ceilings, num_queries: int, name: str) -> Check:
    """The same over K and V in few bits, without a tail."""
    context, head_dim = (32_768, 128) if watch.device == "cuda" else (256, 16)
    tables, lens, locs = _suffix_tables(watch, context + num_queries, num_queries)
    layer = _stored(watch, tables.shape[1], head_dim, name)
    rows = plan_rows(tables, None, lens, locs, layer)
    q = make_random(watch, num_queries, _HEADS, head_dim)
    seconds = watch.in_graph(lambda: quantised_prefill(q, layer, rows, scale=head_dim**-0.5))
    num_bytes = int(lens) * layer.layout.block_bytes // _BLOCK_SIZE
    return _suffix_check(f"suffix_{num_queries}_on_32k_{name}", num_bytes, seconds, ceilings)


def _latent_suffix(watch: Stopwatch, ceilings: Ceilings, num_queries: int) -> Check:
    """The same over latents, with the shapes of DeepSeek-V3."""
    context, heads, latent, rope = (32_768, 128, 512, 64) if watch.device == "cuda" else (256, 4, 64, 16)
    tables, lens, locs = _suffix_tables(watch, context + num_queries, num_queries)
    layout = KvLayout(1, 1, latent + rope, _DTYPE, _BLOCK_SIZE, is_latent=True)
    layer = latent_layer(make_random(watch, tables.shape[1] + 1, *layout.view_shape)[:, 0])
    q, scale = make_random(watch, num_queries, heads, latent + rope), (latent + rope) ** -0.5
    seconds = watch.in_graph(lambda: latent_attention_prefill(q, layer, tables, lens, locs, scale=scale, latent=latent))
    num_bytes = int(lens) * (latent + rope) * _DTYPE.itemsize
    return _suffix_check(f"suffix_{num_queries}_on_32k_latents", num_bytes, seconds, ceilings)


def _flashinfer_decode(
    watch: Stopwatch, q: torch.Tensor, layer: torch.Tensor, tables: torch.Tensor, seq_len: int, seconds: float
) -> dict[str, Any]:
    """Nothing where its wheel is not there."""
    if watch.device != "cuda" or find_spec("flashinfer") is None:
        return {}
    flashinfer = import_module("flashinfer")
    num_seqs, per_seq = tables.shape
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD")
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * per_seq
    last = torch.full((num_seqs,), (seq_len - 1) % _BLOCK_SIZE + 1, dtype=torch.int32, device="cuda")
    head_dim = q.shape[2]
    wrapper.plan(starts, tables.flatten(), last, _HEADS, _KV_HEADS, head_dim, _BLOCK_SIZE, q_data_type=_DTYPE)
    return {"times_flashinfer": watch.seconds(lambda: wrapper.run(q, layer)) / seconds}


def _prefill(watch: Stopwatch, ceilings: Ceilings, seq_len: int) -> Check:
    head_dim = 128 if watch.device == "cuda" else 16
    layer, tables = get_paged(watch, 1, seq_len, head_dim)
    lens = torch.tensor([seq_len], device=watch.device, dtype=torch.int32)
    locs = torch.tensor([0, seq_len], device=watch.device, dtype=torch.int32)
    q, scale = make_random(watch, seq_len, _HEADS, head_dim), head_dim**-0.5

    def attend(tables: torch.Tensor) -> float:
        return watch.seconds(lambda: paged_attention_prefill(q, layer, tables, lens, locs, scale=scale))

    seconds, in_order = attend(tables), attend(tables.sort(dim=1).values)
    flop = 2 * 2 * _HEADS * head_dim * seq_len * (seq_len + 1) / 2
    k, v = (make_random(watch, 1, _KV_HEADS, seq_len, head_dim) for _ in range(2))
    heads = q.transpose(0, 1)[None].contiguous()
    by_torch = watch.seconds(lambda: scaled_dot_product_attention(heads, k, v, is_causal=True, enable_gqa=True))
    figures = {
        "us": seconds * 1e6,
        "tflop_s": flop / seconds / 1e12,
        "of_matmul_rate": flop / seconds / ceilings.matmul,
        "scattered_over_in_order": seconds / in_order,
        "times_torch_sdpa": by_torch / seconds,
        **_flex_attention(watch, heads, k, v, seconds),
        **_flashinfer_prefill(watch, q, layer, tables, lens, locs, seconds),
    }
    return Check(f"prefill_{seq_len}_d{head_dim}", None, figures, "aim: 0.55 of the matrix rate, scattered 1.10 of in order")


def _flashinfer_prefill(
    watch: Stopwatch,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    locs: torch.Tensor,
    seconds: float,
) -> dict[str, Any]:
    """A layer by the plan of a step that is made, and what a step's plan costs the host. Nothing where it is not installed."""
    found = find_flashinfer(wanted=watch.device == "cuda")
    if found.why_not:
        return {}
    head_dim = q.shape[2]
    workspace = make_workspace(q.device, _HEADS // _KV_HEADS, head_dim)
    pages = find_pages(tables.cpu().numpy(), lens.cpu().numpy(), locs.cpu().numpy(), _BLOCK_SIZE, None)
    there, scale, wrappers = torch.from_numpy(pages.pages).cuda(), head_dim**-0.5, Wrappers(found.package, workspace)
    plan = FlashInferPlan(wrappers, pages, there)
    ours = paged_attention_prefill(q, layer, tables, lens, locs, scale=scale)
    theirs = paged_attention_prefill(q, layer, tables, lens, locs, scale=scale, plan=plan)
    by_them = watch.seconds(lambda: paged_attention_prefill(q, layer, tables, lens, locs, scale=scale, plan=plan))

    def plan_anew() -> None:
        torch.cuda.synchronize()  # the wrapper plans again in the pinned memory that it copies from
        wrappers.num_taken = 0
        FlashInferPlan(wrappers, pages, there).attend(q, layer, scale, None)

    return {
        "flashinfer_us": by_them * 1e6,
        "times_flashinfer": by_them / seconds,
        "flashinfer_plan_us": (watch.seconds(plan_anew, runs=5) - by_them) * 1e6,
        "flashinfer_difference": float((ours - theirs).abs().max()),
    }


def _flex_attention(watch: Stopwatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seconds: float) -> dict[str, Any]:
    """torch's compiled attention with the same causal mask; compiling takes its time, so only on a device."""
    if watch.device != "cuda":
        return {}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = q.shape[2]
    mask = create_block_mask(lambda batch, head, query, key: query >= key, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention)
    return {"times_flex_attention": watch.seconds(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)) / seconds}


def _store(watch: Stopwatch, ceilings: Ceilings) -> Check:
    num_tokens = 16_384 if watch.device == "cuda" else 32
    layer, tables = get_paged(watch, 1, num_tokens, 128)
    k, v = (make_random(watch, num_tokens, _KV_HEADS, 128) for _ in range(2))
    offsets = torch.arange(_BLOCK_SIZE, device=watch.device)
    slots = (tables[0].long()[:, None] * _BLOCK_SIZE + offsets).flatten()[:num_tokens]
    seconds = watch.seconds(lambda: store_kv(k, v, layer, slots))
    rate = 2 * (k.nbytes + v.nbytes) / seconds
    return Check("store_kv", None, {"us": seconds * 1e6, "of_copy_bandwidth": rate / ceilings.copy}, "aim: 0.85")


def _copy(watch: Stopwatch, ceilings: Ceilings) -> Check:
    """Blocks of Llama-3.1-8B's size, half of them to the other half."""
    num_blocks, layers = (256, 32) if watch.device == "cuda" else (4, 1)
    layout = KvLayout(layers, _KV_HEADS, 128, _DTYPE, _BLOCK_SIZE)
    arena = torch.randn(2 * num_blocks + 1, *layout.view_shape, device=watch.device, dtype=_DTYPE)
    pairs = [(1 + index, 1 + num_blocks + index) for index in range(num_blocks)]
    seconds = watch.seconds(lambda: copy_blocks(arena, pairs))
    rate = 2 * num_blocks * layout.block_bytes / seconds
    return Check("copy_blocks", None, {"us": seconds * 1e6, "of_copy_bandwidth": rate / ceilings.copy}, "aim: 0.90")


def _norm(watch: Stopwatch, ceilings: Ceilings) -> Check:
    rows = 16_384 if watch.device == "cuda" else 4
    x, residual, weight = make_random(watch, rows, 4096), make_random(watch, rows, 4096), make_random(watch, 4096)
    seconds = watch.seconds(lambda: rms_norm(x, weight, 1e-5, residual))
    rate = 4 * x.nbytes / seconds  # both are read, the sum and its norm written
    few = [make_random(watch, 32, 4096) for _ in range(2)]
    of_decode = watch.in_graph(lambda: rms_norm(few[0], weight, 1e-5, few[1]))
    return Check(
        "rms_norm", None, {"us": seconds * 1e6, "graph_us_32_rows": of_decode * 1e6, "of_copy_bandwidth": rate / ceilings.copy}
    )


def _swap(watch: Stopwatch, ceilings: Ceilings) -> Check:
    """Scattered blocks of 2 MiB each way, against one plain copy of the same bytes; and both ways at once."""
    is_cuda = watch.device == "cuda"
    num_blocks, block_bytes = (128, 2 << 20) if is_cuda else (4, 1 << 10)
    device = torch.empty(2 * num_blocks, block_bytes, dtype=torch.uint8, device=watch.device)
    host = torch.empty(2 * num_blocks, block_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    chosen = torch.randperm(2 * num_blocks)[:num_blocks].tolist()

    def scattered(target: torch.Tensor, source: torch.Tensor) -> None:
        for index in chosen:
            target[index].copy_(source[index], non_blocking=True)

    plain = [watch.seconds(partial(t[:num_blocks].copy_, s[:num_blocks]), runs=5) for t, s in ((host, device), (device, host))]
    out, back = watch.seconds(lambda: scattered(host, device), runs=5), watch.seconds(lambda: scattered(device, host), runs=5)
    figures = {
        "plain_out_gb_s": num_blocks * block_bytes / plain[0] / 1e9,
        "out_of_plain": plain[0] / out,
        "in_of_plain": plain[1] / back,
    }
    if is_cuda:
        streams, other = [torch.cuda.Stream() for _ in range(2)], torch.empty_like(device)

        def both() -> None:
            for stream, pair in zip(streams, ((host, device), (other, host)), strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    scattered(*pair)
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)

        figures["both_ways_gb_s"] = 2 * num_blocks * block_bytes / watch.seconds(both, runs=5) / 1e9
    return Check("swap", None, figures, "aim: 0.90 of a plain copy")


def _sampling(watch: Stopwatch, rows: int, top_k: int, top_p: float, label: str) -> Check:
    """Rows of a vocabulary of 131,072. `none`: temperature alone."""
    vocab_size = 131_072 if watch.device == "cuda" else 512
    logits = torch.randn(rows, vocab_size, device=watch.device) * 3
    values = (0.7, top_k, top_p, 0.0, 1.0)
    columns = [torch.full((rows,), value, dtype=torch.float64, device=watch.device) for value in values]
    columns[1] = columns[1].long()
    uniforms = torch.rand(rows, dtype=torch.float64, device=watch.device)
    seconds = watch.seconds(lambda: sample_rows(logits, SamplingTensors(*columns), uniforms))
    in_graph = watch.in_graph(lambda: sample_rows(logits, SamplingTensors(*columns), uniforms))
    figures = {"ms": seconds * 1e3, "graph_ms": in_graph * 1e3}
    return Check(f"sampling_{rows}x{vocab_size}_{label}", None, figures, "aim: 0.2 ms for 128 rows")
