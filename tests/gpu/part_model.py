"""Part g: a model's steps on the device: its logits against the CPU's, graphs against plain steps, and what a step costs.

Logits and graphs also of small models of other families, in groups of layers with tables of their own where they have such.
Of what graphs do beside the decode: draws, penalties by counts that stay, and prefixes in common, which are read once. Between
capture and replay all memory that nothing owns is filled with NaN.
The host's time of a step is what passes until its last launch; launches are counted by torch's profiler, whose table lies
beside the logs. A rehearsal takes a tiny model on the CPU, where there is nothing to capture.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from kvkeeper.engine_service.compute.graphs.graph_api import CudaGraphs
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds, make_kv_layout
from kvkeeper.engine_service.compute.sampler import StepLogits, draw
from kvkeeper.engine_service.model.decoder import Decoder
from kvkeeper.engine_service.model.dtype_name import DtypeChoice
from kvkeeper.engine_service.model.layer_groups import LayerGroup, group_layers
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.engine_service.values.sampling_params import PenalisedRows, PlainDraws, SamplingParams, SamplingRow
from kvkeeper.kernels.attention.paged_attention_decode import plan_decode
from tests.gpu.checks import Check, guarded, keep_text
from tests.gpu.random_model import FAMILIES, LLAMA_1B, QWEN3_06B, TINY, Shape, write_family, write_model
from tests.gpu.spoil import spoil_freed
from tests.support.worlds.batches import ScheduledRow, build_batch

_BLOCK_SIZE = 16
_CONTEXT = 160  # tokens before a decode
_ALLOWED = 2.0  # times the error that bfloat16 makes on the CPU
_OTHER_EXPERTS = 0.3  # relative error where a token that is rounded otherwise goes to other experts; of another text it is 1
_RUNS = 20
_PENALISED_STEPS = 4  # of sequences that go on: from the second one on, counts are those that the steps before left
_WITH_PROMPTS = (
    (0, 1, 32),
    (0, 1, 128),
    (3, 1, 12),
    (16, 2, 100),
    (64, 1, 128),
    (64, 8, 128),
    (100, 16, 128),
)  # of so many tokens
_PREFIX, _OWN = 512, 24  # tokens in common, and those of a sequence behind them; enough to be read as a prefix in common


def run(is_dry: bool) -> Iterator[Check]:
    """Each figure stands by itself; one that fails is told, and the others go on."""
    device = "cpu" if is_dry else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        shape = TINY if is_dry else LLAMA_1B
        path = write_model(Path(folder), dataclasses.replace(shape, name=f"{shape.name}-steps"), device)
        model, _ = load_model(path, device=device, dtype="bfloat16", progress=False)
        sizes = (1, 4) if is_dry else (1, 3, 8, 32, 100, 256)
        yield from _steps(model, shape, device, sizes)
        # Those of a graph of 48 rows, two rows of sixteen members and a rest among them.
        yield guarded("graph_shared_prefix", partial(_shared_prefix, model, shape, device, 3 if is_dry else 44))
        del model
        for dtype in ("int8", "int4", "fp8"):
            yield from _integers(path, shape, device, dtype, sizes[:1] if is_dry else (1, 64))
        small = [dataclasses.replace(shape, name=f"{shape.name}-4", num_layers=4) for shape in (LLAMA_1B, QWEN3_06B)]
        for shape in (TINY,) if is_dry else small:
            yield guarded(f"logits_{shape.name}", partial(_logits_of_shape, Path(folder), shape, device))
        for name in FAMILIES:
            family = write_family(Path(folder), name)
            yield guarded(f"logits_{name}", partial(_logits, family, dataclasses.replace(TINY, name=name), device))
            yield guarded(f"graph_{name}", partial(_family, family, name, device))


def _runner(model: Decoder, num_seqs: int, num_tokens: int, groups: Sequence[LayerGroup] = ()) -> ModelRunner:
    """With groups, the blocks of each lie behind those of the group before."""
    layout = make_kv_layout(model.config, model.dtype, _BLOCK_SIZE, groups)
    num_blocks = max(len(groups), 1) * (1 + num_seqs * -(-num_tokens // _BLOCK_SIZE))
    memory = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=model.device)
    return ModelRunner(model, layout.view(memory), layout, groups)


def _capture(runner: ModelRunner, bounds: StepBounds, *, with_retention: bool = False) -> float:
    """On a device. How many seconds it took. What nothing holds any more is NaN, or gone, before the first replay."""
    device, began = runner.last_tokens.tensor.device, time.perf_counter()
    runner.make_ready(bounds, CudaGraphs(device), with_retention=with_retention, progress=False)
    seconds = time.perf_counter() - began
    spoil_freed(device)
    return seconds


def _texts(shape: Shape, count: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """[count, num_tokens], of sequences that have nothing in common."""
    return np.stack([np.random.default_rng(seq).integers(3, shape.vocab_size, num_tokens) for seq in range(count)])


def _tables(count: int, num_tokens: int) -> npt.NDArray[np.int32]:
    """Blocks of so many sequences, each with its own: [count, blocks of one]."""
    per_seq = -(-num_tokens // _BLOCK_SIZE)
    return np.arange(1, 1 + count * per_seq, dtype=np.int32).reshape(count, per_seq)


def _rows_of(texts: npt.NDArray[np.int64], tables: npt.NDArray[np.int32], first: int, last: int) -> Batch:
    """The tokens [first, last) of each text to compute."""
    rows = [ScheduledRow(text[first:last], first, table) for text, table in zip(texts, tables, strict=True)]
    return build_batch(rows, _BLOCK_SIZE)


def _rows(shape: Shape, count: int, first: int, last: int, num_tokens: int) -> Batch:
    """So many sequences, each with its tokens [first, last) to compute."""
    return _rows_of(_texts(shape, count, num_tokens), _tables(count, num_tokens), first, last)


def _logits_of_shape(folder: Path, shape: Shape, device: str) -> Check:
    return _logits(write_model(folder, shape, device), shape, device)


def _logits(path: Path, shape: Shape, device: str) -> Check:
    """Prompts, then decodes: relative error to float32 on the CPU, beside that of bfloat16 there."""
    found = {}
    ways: list[tuple[str, str, Literal["float32", "bfloat16"]]] = [
        ("exact", "cpu", "float32"), ("cpu", "cpu", "bfloat16"), ("device", device, "bfloat16")]  # fmt: skip
    for label, where, dtype in ways:
        model, _ = load_model(path, device=where, dtype=dtype, progress=False)
        runner = _runner(model, 3, _CONTEXT + 2)
        ranges = [(0, _CONTEXT), (_CONTEXT, _CONTEXT + 1), (_CONTEXT + 1, _CONTEXT + 2)]
        steps = [_rows(shape, 3, first, last, _CONTEXT + 2) for first, last in ranges]
        found[label] = torch.cat([runner.forward(batch).float().cpu().clone() for batch in steps])
    errors = {name: float((found[name] - found["exact"]).norm() / found["exact"].norm()) for name in ("cpu", "device")}
    ok = errors["device"] <= max(_ALLOWED * errors["cpu"], _OTHER_EXPERTS if model.config.experts else 0.0) + 1e-3
    return Check(f"logits_{shape.name}", ok, {"error_device": errors["device"], "error_cpu": errors["cpu"]})


def _family(path: Path, name: str, device: str) -> Check:
    """Decodes of a model in groups, where it has such, through graphs, against plain ones over one table."""
    num_seqs, num_tokens = 5, _CONTEXT + 4
    model, _ = load_model(path, device=device, dtype="bfloat16", progress=False)
    groups = group_layers(model.config.windows, model.config.chunks)
    plain, other = _runner(model, num_seqs, num_tokens), _runner(model, num_seqs, num_tokens, groups)
    if device == "cuda":
        _capture(other, StepBounds(num_seqs, 4096))
    shape, errors = dataclasses.replace(TINY, name=name), []
    for first, last in ((0, _CONTEXT), *((at, at + 1) for at in range(_CONTEXT, _CONTEXT + 3))):
        batch = _rows(shape, num_seqs, first, last, num_tokens)
        expected = plain.forward(batch).float().clone()
        found = other.forward(_in_groups(batch, len(groups), num_seqs, num_tokens)).float()
        errors.append(float((found - expected).norm() / expected.norm()))
    replays = 0 if other.graphed is None else other.graphed.num_replays
    most = _OTHER_EXPERTS if model.config.experts else 2e-2
    due = 3 if any(model.config.chunks) else 4  # decodes, and prompts of layers without chunks
    ok = max(errors) <= most and (replays == due or device == "cpu")
    return Check(f"graph_{name}", ok, {"relative_error": max(errors), "groups": len(groups), "replays": replays})


def _in_groups(batch: Batch, num_groups: int, num_seqs: int, num_tokens: int) -> Batch:
    if num_groups < 2:
        return batch
    shifts = np.arange(1, num_groups) * (1 + num_seqs * -(-num_tokens // _BLOCK_SIZE))
    tables = batch.block_tables[:, None]
    shifted = np.where(tables > 0, tables + shifts[:, None], 0).astype(np.int32)
    return dataclasses.replace(batch, group_tables=shifted, group_slots=batch.slot_mapping + shifts[:, None] * _BLOCK_SIZE)


def _steps(model: Decoder, shape: Shape, device: str, sizes: tuple[int, ...]) -> Iterator[Check]:
    most, num_tokens = max(sizes), _CONTEXT + _PENALISED_STEPS
    plain, other = _runner(model, most, num_tokens), _runner(model, most, num_tokens)
    for runner in (plain, other):
        for first in range(0, most, 16):
            batch = _rows(shape, min(first + 16, most), 0, _CONTEXT, num_tokens)
            runner.forward(_last_rows(batch, first))
    seconds = _capture(other, StepBounds(most, 4096), with_retention=True) if device == "cuda" else 0.0
    note = "" if other.graphed is not None else "no graphs: a rehearsal has no device" if device == "cpu" else "no graphs"
    figures = {"s": seconds}
    if device == "cuda":
        figures["reserved_mib"] = torch.cuda.memory_reserved() / 2**20  # with the model, both runners and what is free in it
    yield Check("warm_up_and_capture", device == "cpu" or other.graphed is not None, figures, note)
    for size in sizes:
        batch = _rows(shape, size, _CONTEXT, _CONTEXT + 1, num_tokens)
        yield guarded(f"graph_logits_{size}", partial(_same_logits, plain, other, size, batch))
        yield guarded(f"graph_draws_{size}", partial(_same_draws, other, size, batch))
        texts = _texts(shape, size, num_tokens)
        tables = _tables(size, num_tokens)
        yield guarded(f"graph_penalised_{size}", partial(_same_penalised, other, texts, tables))
        yield guarded(f"counted_penalised_{size}", partial(_same_penalised, other, texts, tables, behind=True))
        for label, runner in (("plain", plain), ("graph", other)):
            if label == "plain" or runner.graphed is not None:
                yield guarded(f"step_{label}_{size}", partial(_cost, label, runner, size, batch))
    for decodes, prompts, length in _WITH_PROMPTS:
        if decodes + prompts <= most and prompts * length <= 2048:
            name = f"{decodes}_and_{prompts}x{length}"
            batch = _with_prompts(shape, decodes, prompts, length, num_tokens)
            yield guarded(f"graph_logits_{name}", partial(_same_logits, plain, other, name, batch))
            for label, runner in (("plain", plain), ("graph", other)):
                if label == "plain" or runner.graphed is not None:
                    yield guarded(f"step_{label}_{name}", partial(_cost, label, runner, name, batch))
    for size in (sizes[0], sizes[-1]):
        batch = _rows(shape, size, _CONTEXT, _CONTEXT + 1, num_tokens)
        for label, runner in (("plain", plain), ("graph", other)):
            yield guarded(f"profile_{label}_{size}", partial(_profile, f"{label}-{size}", runner, batch))


def _integers(path: Path, shape: Shape, device: str, dtype: DtypeChoice, sizes: tuple[int, ...]) -> Iterator[Check]:
    """Weights of few bits: what a load takes of the device, graphs against plain steps, and what a step costs.

    A rehearsal loads bfloat16: what a CPU has instead needs the extra `cpu`.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated() if device == "cuda" else 0, time.perf_counter()
    model, _ = load_model(path, device=device, dtype=dtype if device == "cuda" else "bfloat16", progress=False)
    figures = {"s": time.perf_counter() - began}
    if device == "cuda":  # with integers the head is an eighth more of bits, and the embeddings of 16 bits lie beside it
        figures["mib"] = (torch.cuda.memory_allocated() - before) / 2**20
        figures["mib_while_loading"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    yield Check(f"load_{dtype}", None, figures)
    most, num_tokens = max(sizes), _CONTEXT + 1
    plain, other = _runner(model, most, num_tokens), _runner(model, most, num_tokens)
    if device == "cuda":
        _capture(other, StepBounds(most, 4096))
    for runner in (plain, other):
        for first in range(0, most, 16):
            runner.forward(_last_rows(_rows(shape, min(first + 16, most), 0, _CONTEXT, num_tokens), first))
    for size in sizes:
        batch = _rows(shape, size, _CONTEXT, _CONTEXT + 1, num_tokens)
        yield guarded(f"graph_logits_{dtype}_{size}", partial(_same_logits, plain, other, f"{dtype}_{size}", batch))
        yield guarded(f"step_{dtype}_{size}", partial(_cost, "graph", other, f"{dtype}_{size}", batch))


def _with_prompts(shape: Shape, decodes: int, prompts: int, length: int, num_tokens: int) -> Batch:
    """Rows that decode, and prompts whose last tokens are computed once more."""
    texts, tables = _texts(shape, decodes + prompts, num_tokens), _tables(decodes + prompts, num_tokens)
    firsts = [_CONTEXT] * decodes + [_CONTEXT - length] * prompts
    lasts = [_CONTEXT + 1] * decodes + [_CONTEXT] * prompts
    rows = [
        ScheduledRow(text[first:last], first, table)
        for text, table, first, last in zip(texts, tables, firsts, lasts, strict=True)
    ]
    return build_batch(rows, _BLOCK_SIZE)


def _last_rows(batch: Batch, first: int) -> Batch:
    """The rows from `first` on."""
    start = int(batch.query_start_loc[first])
    return dataclasses.replace(
        batch,
        token_ids=batch.token_ids[start:],
        positions=batch.positions[start:],
        slot_mapping=batch.slot_mapping[start:],
        query_start_loc=batch.query_start_loc[first:] - start,
        seq_lens=batch.seq_lens[first:],
        block_tables=batch.block_tables[first:],
        logit_rows=batch.logit_rows[first:] - start,
        logit_start_loc=batch.logit_start_loc[first:] - batch.logit_start_loc[first],
    )


def _same_logits(plain: ModelRunner, other: ModelRunner, size: int | str, batch: Batch) -> Check:
    expected, found = plain.forward(batch).float().clone(), other.forward(batch).float()
    error = float((found - expected).norm() / expected.norm())
    figures = {"relative_error": error}
    if has_prompts := isinstance(size, str) and other.graphed is not None:
        figures["replays_with_prompts"] = other.graphed.num_with_prompts
    # Products of more rows, with the padding, are rounded otherwise.
    return Check(f"graph_logits_{size}", error <= (2e-2 if has_prompts else 1e-2), figures)


def _same_draws(runner: ModelRunner, size: int, batch: Batch) -> Check:
    """Tokens that the graph draws against those that are drawn from its logits."""
    name, history = f"graph_draws_{size}", np.zeros(_CONTEXT, np.int32)
    ways = [SamplingParams(temperature=0.7, top_p=0.9, top_k=50), SamplingParams(temperature=0), SamplingParams(min_p=0.05)]
    rows = [SamplingRow(ways[at % 3], 7, at, history, 1) for at in range(size)]
    step = runner.stage(batch, rows)()
    drawn = draw(StepLogits(step.values.clone()), rows).drawn
    if step.drawn is None or drawn is None:
        return Check(name, None, note="no graph drew")
    same = float((step.drawn == drawn).float().mean())
    return Check(name, same == 1, {"same": same})


def _same_penalised(
    runner: ModelRunner, texts: npt.NDArray[np.int64], tables: npt.NDArray[np.int32], *, behind: bool = False
) -> Check:
    """Steps of sequences that continue with what they drew: penalised by counts on the device, and by whole histories.

    The penalties are negative, so that what was there before is the likeliest by far, and each count decides. A graph draws by
    the counts, or, `behind` it, what draws in steps without one.
    """
    size = len(texts)
    name, known = f"{'counted' if behind else 'graph'}_penalised_{size}", texts.astype(np.int32)
    if runner.counts is None:
        return Check(name, None, note="no counts: a rehearsal has no device")
    ways = [
        SamplingParams(temperature=0, repetition_penalty=1.1, frequency_penalty=-2.0, presence_penalty=-2.0),
        SamplingParams(temperature=0.7, top_k=50, presence_penalty=-2.0, frequency_penalty=-1.5),
        SamplingParams(temperature=0.9, top_p=0.9),
    ]
    same, changed = [], []
    for at in range(_CONTEXT, _CONTEXT + _PENALISED_STEPS):
        rows = [SamplingRow(ways[seq % 3], 7, seq, known[seq, : at + 1], _CONTEXT // 2) for seq in range(size)]
        penalised = PenalisedRows.of(rows)
        penalised = dataclasses.replace(penalised, tokens=known, which=penalised.where, serials=penalised.where + 1)
        batch = _rows_of(known.astype(np.int64), tables, at, at + 1)
        by_column, counted = dataclasses.replace(PlainDraws.of(rows), penalised=penalised), runner.counts.stage(penalised)
        step = runner.stage(batch, () if behind else by_column, counted)()
        logits = StepLogits(step.values.clone())
        found = draw(step, by_column, runner.last_tokens, counted).drawn if behind else step.drawn
        if found is None:
            return Check(name, None, note="no graph drew")
        expected, unpenalised = draw(logits, rows).drawn, draw(logits, [_unpenalised(row) for row in rows]).drawn
        assert expected is not None and unpenalised is not None
        same.append(float((found == expected).float().mean()))
        changed.append(float((expected != unpenalised).float().mean()))
        if at + 1 < known.shape[1]:
            known[:, at + 1] = expected.cpu().numpy()
    note = "" if max(changed) else "the penalties changed no token"
    return Check(name, min(same) == 1 and max(changed) > 0, {"same": min(same), "changed": max(changed)}, note)


def _unpenalised(row: SamplingRow) -> SamplingRow:
    params = dataclasses.replace(row.params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    return dataclasses.replace(row, params=params)


def _shared_prefix(model: Decoder, shape: Shape, device: str, count: int) -> Check:
    """A captured decode over blocks in common, against a plain one of the same K and V where each sequence has its own."""
    context = _PREFIX + _OWN
    texts, apart, prefix_len = _texts(shape, count, context + 1), _tables(count, context + 1), _PREFIX // _BLOCK_SIZE
    texts[:, :_PREFIX] = texts[0, :_PREFIX]
    together = apart.copy()
    together[:, :prefix_len] = apart[0, :prefix_len]
    runner = _runner(model, count, context + 1)
    runner.forward(_rows_of(texts[:1], apart[:1], 0, _PREFIX))
    runner.copy_blocks([(int(apart[0, at]), int(own[at])) for own in apart[1:] for at in range(prefix_len)])
    runner.forward(_rows_of(texts, apart, _PREFIX, context))
    expected = runner.forward(_rows_of(texts, apart, context, context + 1)).float().clone()
    if device == "cuda":
        _capture(runner, StepBounds(count, context + 1))
    batch = _rows_of(texts, together, context, context + 1)
    found = runner.forward(batch).float()
    error = float((found - expected).norm() / expected.norm())
    replays, sharing = 0 if runner.graphed is None else runner.graphed.num_replays, _num_sharing(runner, batch)
    ok = error <= 2e-2 and (device == "cpu" or (replays == 1 and sharing == count))
    return Check("graph_shared_prefix", ok, {"relative_error": error, "replays": replays, "sharing": sharing})


def _num_sharing(runner: ModelRunner, batch: Batch) -> int:
    """Rows whose prefix is read once for several of them."""
    view = runner._kv_view
    tables, lens = (torch.from_numpy(array).to(view.device) for array in (batch.block_tables, batch.seq_lens))
    work = plan_decode(tables, lens, view[:, 0], view.dtype, None).work
    return 0 if work is None or work.shared is None else int((work.shared.members[:, 0] > 0).sum())


def _cost(label: str, runner: ModelRunner, size: int | str, batch: Batch) -> Check:
    """Medians of the host's time until the last launch, and of the time until the device has done the step."""
    host, whole = [], []
    for _ in range(_RUNS):
        runner.synchronize()
        began = time.perf_counter()
        runner.forward(batch)
        host.append(time.perf_counter() - began)
        runner.synchronize()
        whole.append(time.perf_counter() - began)
    figures = {"host_ms": statistics.median(host) * 1e3, "step_ms": statistics.median(whole) * 1e3}
    note = "aim: 1.3 ms a step" if label == "graph" and size == 1 else ""
    return Check(f"step_{label}_{size}", None, figures, note)


def _profile(label: str, runner: ModelRunner, batch: Batch) -> Check:
    """A step's launches and the device's time in them; the table of all is a file."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    is_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    runner.forward(batch)
    with profile(activities=activities) as seen:
        runner.forward(batch)
        runner.synchronize()
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    table = seen.key_averages().table(sort_by="self_cuda_time_total" if is_cuda else "self_cpu_time_total", row_limit=40)
    where = keep_text(f"profile-{label}.txt", table)
    figures = {"kernels": len(kernels), "kernel_ms": sum(event.time_range.elapsed_us() for event in kernels) / 1e3}
    return Check(f"profile_{label.replace('-', '_')}", None, figures, where)
