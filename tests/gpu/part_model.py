"""Part g: a model's steps on the device: its logits against the CPU's, graphs against plain steps, and what a step costs.

The host's time of a step is what passes until its last launch; launches are counted by torch's profiler, whose table lies
beside the logs. A rehearsal takes a tiny model on the CPU, where there is nothing to capture.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from kvkeeper.engine_service.compute.graphs.graph_api import CudaGraphs
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds, kv_layout_of
from kvkeeper.engine_service.model.decoder import Decoder
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.batch import Batch
from tests.gpu.checks import Check, keep_text, text_of
from tests.gpu.random_model import LLAMA_1B, QWEN3_06B, TINY, Shape, write_model
from tests.support.worlds.batches import ScheduledRow, build_batch

_BLOCK_SIZE = 16
_CONTEXT = 160  # tokens before a decode
_ALLOWED = 2.0  # times the error that bfloat16 makes on the CPU
_RUNS = 20


def run(is_dry: bool) -> Iterator[Check]:
    """Each figure stands by itself; one that fails is told, and the others go on."""
    device = "cpu" if is_dry else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        small = [dataclasses.replace(shape, name=f"{shape.name}-4", num_layers=4) for shape in (LLAMA_1B, QWEN3_06B)]
        for shape in (TINY,) if is_dry else small:
            yield _guarded(f"logits_{shape.name}", lambda s=shape: _logits(write_model(Path(folder), s, device), s, device))
        shape = TINY if is_dry else LLAMA_1B
        path = write_model(Path(folder), dataclasses.replace(shape, name=f"{shape.name}-steps"), device)
        model, _ = load_model(path, device=device, dtype="bfloat16", progress=False)
        sizes = (1, 4) if is_dry else (1, 3, 8, 32, 100, 256)
        yield from _steps(model, shape, device, sizes)


def _guarded(name: str, measure: Callable[[], Check]) -> Check:
    try:
        return measure()
    except Exception as failure:  # of one figure: the others are still told
        return Check(name, False, note=text_of(failure))


def _runner(model: Decoder, num_seqs: int, num_tokens: int) -> ModelRunner:
    layout = kv_layout_of(model.config, model.dtype, _BLOCK_SIZE)
    num_blocks = 1 + num_seqs * -(-num_tokens // _BLOCK_SIZE)
    memory = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=model.device)
    return ModelRunner(model, layout.view(memory), layout)


def _rows(shape: Shape, count: int, first: int, last: int, num_tokens: int) -> Batch:
    """So many sequences, each with its tokens [first, last) to compute."""
    per_seq = -(-num_tokens // _BLOCK_SIZE)
    texts = [np.random.default_rng(seq).integers(3, shape.vocab_size, num_tokens) for seq in range(count)]
    tables = [np.arange(1 + seq * per_seq, 1 + (seq + 1) * per_seq, dtype=np.int32) for seq in range(count)]
    rows = [ScheduledRow(text[first:last], first, table) for text, table in zip(texts, tables, strict=True)]
    return build_batch(rows, _BLOCK_SIZE)


def _logits(path: Path, shape: Shape, device: str) -> Check:
    """Prompts, then decodes: relative error to float32 on the CPU, beside that of bfloat16 there."""
    found = {}
    for label, where, dtype in (("exact", "cpu", "float32"), ("cpu", "cpu", "bfloat16"), ("device", device, "bfloat16")):
        model, _ = load_model(path, device=where, dtype=dtype, progress=False)
        runner = _runner(model, 3, _CONTEXT + 2)
        ranges = [(0, _CONTEXT), (_CONTEXT, _CONTEXT + 1), (_CONTEXT + 1, _CONTEXT + 2)]
        steps = [_rows(shape, 3, first, last, _CONTEXT + 2) for first, last in ranges]
        found[label] = torch.cat([runner.forward(batch).float().cpu() for batch in steps])
    errors = {name: float((found[name] - found["exact"]).norm() / found["exact"].norm()) for name in ("cpu", "device")}
    ok = errors["device"] <= _ALLOWED * errors["cpu"] + 1e-3
    return Check(f"logits_{shape.name}", ok, {"error_device": errors["device"], "error_cpu": errors["cpu"]})


def _steps(model: Decoder, shape: Shape, device: str, sizes: tuple[int, ...]) -> Iterator[Check]:
    most, num_tokens = max(sizes), _CONTEXT + 2
    plain, other = _runner(model, most, num_tokens), _runner(model, most, num_tokens)
    for runner in (plain, other):
        for first in range(0, most, 16):
            batch = _rows(shape, min(first + 16, most), 0, _CONTEXT, num_tokens)
            runner.forward(_last_rows(batch, first))
    began = time.perf_counter()
    if device == "cuda":
        graphs = CudaGraphs(torch.device(device))
        other.make_ready(StepBounds(most, 4096), graphs, with_retention=True, progress=False)
    note = "" if other.graphed is not None else "no graphs: a rehearsal has no device" if device == "cpu" else "no graphs"
    yield Check("warm_up_and_capture", device == "cpu" or other.graphed is not None, {"s": time.perf_counter() - began}, note)
    for size in sizes:
        batch = _rows(shape, size, _CONTEXT, _CONTEXT + 1, num_tokens)
        yield _guarded(f"graph_logits_{size}", lambda n=size, b=batch: _same_logits(plain, other, n, b))
        for label, runner in (("plain", plain), ("graph", other)):
            if label == "plain" or runner.graphed is not None:
                yield _guarded(f"step_{label}_{size}", lambda a=label, r=runner, n=size, b=batch: _cost(a, r, n, b))
    batch = _rows(shape, sizes[-1], _CONTEXT, _CONTEXT + 1, num_tokens)
    for label, runner in (("plain", plain), ("graph", other)):
        yield _guarded(f"profile_{label}", lambda a=label, r=runner: _profile(a, r, batch))


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


def _same_logits(plain: ModelRunner, other: ModelRunner, size: int, batch: Batch) -> Check:
    expected, found = plain.forward(batch).float().clone(), other.forward(batch).float()
    error = float((found - expected).norm() / expected.norm())
    return Check(f"graph_logits_{size}", error <= 1e-2, {"relative_error": error})


def _cost(label: str, runner: ModelRunner, size: int, batch: Batch) -> Check:
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
    return Check(f"profile_{label}", None, figures, where)
