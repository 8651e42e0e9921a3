"""Which steps FlashInfer computes, by a stand-in for its package on a CPU, and that they come to the same as without it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from kvkeeper.engine_service.compute import served_model
from kvkeeper.engine_service.compute.flashinfer_prompts import MOST_CAPTURED_TOKENS, FlashInferPrompts, page_arrays
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds, make_kv_layout
from kvkeeper.engine_service.compute.stored_model import kv_groups
from kvkeeper.engine_service.model.attention import attention_arrays
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.batch import Batch, BatchRetention
from kvkeeper.kernels.attention.flashinfer_prefill import FlashInfer
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.stand_ins import flashinfer
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch

BLOCK_SIZE, NUM_BLOCKS, MOST_TOKENS = 8, 80, 256
BOUNDS = StepBounds(4, MOST_TOKENS, 700)
FOUND = FlashInfer(flashinfer, "0.7.2")
OVERRIDES: dict[str, Any] = {"head_dim": 64, "num_hidden_layers": 4, "vocab_size": 64}


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    """What is not FlashInfer's is not run beforehand: test_make_ready and test_warm_up are about that."""
    monkeypatch.setattr(ModelRunner, "_warm_up", lambda *args, **options: None)


class Graphs:
    """A GraphApi whose graphs are the functions themselves."""

    def capture(self, run):
        class Graph:
            replay = staticmethod(run)

        return Graph(), run()


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def load(name, dtype="float16", **overrides):
        chosen = tiny_model(name)
        chosen = replace(chosen, overrides=chosen.overrides | OVERRIDES | overrides)
        return load_model(build_model_folder(tmp_path_factory.mktemp(name), chosen), dtype=dtype, progress=False)[0]

    return load


def runner_of(model, groups=()):
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE, groups)
    view = layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8))
    return ModelRunner(model, view, layout, groups)


def made_ready(model, groups=(), graphs=None, found=FOUND):
    runner = runner_of(model, groups)
    with capture_logs() as logs:
        runner.make_ready(BOUNDS, graphs, with_retention=False, progress=False, flashinfer=found)
    return runner, [entry for entry in logs if entry["event"] == "prefill_attention"]


def batch_of(*lens, contexts=None, want=WantLogits.LAST):
    """Rows of so many new tokens, each behind so many others, in blocks of their own."""
    contexts, rows, first = contexts or [0] * len(lens), [], 1
    for length, context in zip(lens, contexts, strict=True):
        table = np.arange(first, first + -(-(length + context) // BLOCK_SIZE), dtype=np.int32)
        first = int(table[-1]) + 1
        rows.append(ScheduledRow(random_tokens(length + context, length, 64)[context:], context, table, want))
    return build_batch(rows, BLOCK_SIZE)


def in_groups(batch, num_groups):
    """The same with tables for further groups, each behind those before it."""
    step = int(batch.block_tables.max())
    tables = np.stack([batch.block_tables + at * step * (batch.block_tables > 0) for at in range(1, num_groups)], 1)
    slots = np.stack([batch.slot_mapping + at * step * BLOCK_SIZE for at in range(1, num_groups)])
    return replace(batch, group_tables=tables.astype(np.int32), group_slots=slots)


@pytest.mark.parametrize(
    ("name", "num_plans"), [("qwen3", 1), ("mistral_window", 1), ("gemma2", 2), ("llama4", 2)], ids=lambda value: str(value)
)
def test_logits_are_those_without_it(load, name, num_plans):
    """A prompt, then a chunk of it beside a decode and another prompt."""
    model = load(name)
    runner, logs = made_ready(model)
    assert [entry["kernel"] for entry in logs] == ["flashinfer 0.7.2"]
    plain = runner_of(model)
    for batch in (batch_of(100, 70), batch_of(1, 90, contexts=[99, 40]), batch_of(90, 1, contexts=[7, 10])):
        flashinfer.made.clear()
        planned, ran = runner.prompts.num_planned, [len(wrapper.plans) for wrapper in _wrappers(runner)]
        found, expected = runner.forward(batch), plain.forward(batch)
        assert runner.prompts.num_planned == planned + 1
        assert sum(len(wrapper.plans) for wrapper in _wrappers(runner)) == sum(ran) + num_plans
        torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.std()) * 0.02)


def _wrappers(runner):
    return [wrapper for turn in runner.prompts._turns for wrapper in turn.made]


def test_layers_in_groups_have_plans_of_their_own(load):
    model = load("gemma2")
    groups = kv_groups(model.config)
    assert len(groups) == 2
    (runner, _), plain = made_ready(model, groups), runner_of(model, groups)
    before = sum(len(wrapper.plans) for wrapper in _wrappers(runner))
    batch = in_groups(batch_of(100, 1, contexts=[0, 20]), 2)
    found, expected = runner.forward(batch), plain.forward(batch)
    assert sum(len(wrapper.plans) for wrapper in _wrappers(runner)) == before + 2
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.std()) * 0.02)


def test_few_queries_and_rows_with_sinks_go_without(load):
    runner, _ = made_ready(load("qwen3"))
    planned = runner.prompts.num_planned
    runner.forward(batch_of(63, 1))
    runner.forward(batch_of(1, 1))
    batch = batch_of(80)
    runner.forward(replace(batch, retention=BatchRetention(np.array([4], np.int32), np.array([16], np.int32))))
    assert runner.prompts.num_planned == planned
    runner.forward(batch_of(62, 2))
    assert runner.prompts.num_planned == planned + 1


def test_small_steps_with_prompts_are_captured_and_large_ones_are_not(load):
    model = load("qwen3", num_hidden_layers=1)
    runner, _ = made_ready(model, graphs=Graphs())
    planned = runner.prompts.num_planned
    assert max(size.prompt_tokens for size in runner.graphed._sizes) == MOST_CAPTURED_TOKENS
    runner.stage(batch_of(200))()
    assert (runner.graphed.num_with_prompts, runner.prompts.num_planned) == (1, planned)
    runner.stage(batch_of(200, 200, 200))()
    assert (runner.graphed.num_with_prompts, runner.prompts.num_planned) == (1, planned + 1)
    without = runner_of(model)
    without.make_ready(BOUNDS, Graphs(), with_retention=False, progress=False)
    assert max(size.prompt_tokens for size in without.graphed._sizes) == 700


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("qwen3", {"dtype": "float32"}, "K and V are float32"),
        ("qwen3", {"head_dim": 16}, "heads have 16 elements"),
        ("gpt_oss", {}, "sinks"),
        ("deepseek_v3", {"head_dim": 8}, "no K and V"),
    ],
)
def test_models_that_it_does_not_serve_say_why(load, name, change, why):
    runner, (log,) = made_ready(load(name, **change))
    assert runner.prompts is None
    assert log["kernel"] == "kvkeeper"
    assert why in log["why"]


def test_without_the_package_the_log_says_why(load):
    model = load("qwen3")
    runner, (log,) = made_ready(model, found=FlashInfer(None, "", "--no-flashinfer"))
    assert (runner.prompts, log["kernel"], log["why"]) == (None, "kvkeeper", "--no-flashinfer")


def test_where_it_fails_at_the_start_our_kernel_serves(load, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("nvcc is not found")

    monkeypatch.setattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", broken)
    model = load("qwen3")
    runner, (log,) = made_ready(model)
    assert (runner.prompts, log["kernel"], log["why"]) == (None, "kvkeeper", "it failed: nvcc is not found")
    batch = batch_of(100)
    assert torch.equal(runner.forward(batch), runner_of(model).forward(batch))


class Marks:
    """A queue that notes when marks are set and waited for."""

    is_immediate = True

    def __init__(self):
        self.notes: list[str] = []
        self.num_marks = 0

    def mark(self):
        self.num_marks += 1
        mark = self.num_marks
        self.notes.append(f"set {mark}")

        class Mark:
            wait = staticmethod(lambda: self.notes.append(f"wait {mark}"))

        return Mark()


def test_wrappers_plan_again_once_the_step_before_the_last_is_done(load):
    """A wrapper's plan is copied out of its pinned memory, which the device may read as late as it runs that step."""
    model, queue = load("qwen3"), Marks()
    runner = runner_of(model)
    prompts = FlashInferPrompts(FOUND, model.config, runner._parts, runner._views, queue)
    q = torch.zeros(100, 4, 64, dtype=torch.float16)
    used = []
    for _ in range(4):
        pages = prompts.find(attention_arrays(batch_of(100), runner._parts, BLOCK_SIZE))
        tensors = {name: torch.from_numpy(array) for name, array in page_arrays(pages).items()}
        (plan,) = prompts.plan(pages, tensors).values()
        queue.notes.append("plan")
        plan.attend(q, runner._views[0][:, 0], 1.0, None)
        used.append(next(iter(plan._planned.values())))
    assert used[0] is used[2]
    assert used[1] is used[3]
    assert used[0] is not used[1]
    # set n is behind the plan before it; the third step plans with the wrapper of the first, the fourth with the second's
    assert queue.notes == ["set 1", "plan", "set 2", "wait 1", "plan", "set 3", "wait 2", "plan", "set 4", "wait 3", "plan"]


def test_the_batch_may_change_before_it_is_computed(load):
    runner, _ = made_ready(load("qwen3"))
    batch = batch_of(100)
    expected = runner.forward(batch).clone()
    staged = runner.stage(copied := _copied(batch))
    copied.block_tables.fill(0)
    assert torch.equal(staged().values, expected)


def _copied(batch: Batch) -> Batch:
    return replace(batch, block_tables=batch.block_tables.copy(), seq_lens=batch.seq_lens.copy())


@pytest.mark.parametrize("wanted", [True, False])
def test_the_option_is_what_a_served_model_asks_for(wanted, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(served_model, "find_flashinfer", lambda *, wanted: told.append(wanted) or FOUND)
    model = served_model.load_served_model(
        served_model.EngineConfig(model=str(build_model_folder(tmp_path, tiny_model("llama"))), flashinfer=wanted)
    )
    on_device = served_model._ready_on_device(replace(model, device=torch.device("cuda")), _config(wanted), progress=False)

    class Told:
        def make_ready(self, bounds, graphs, *, with_retention, progress, flashinfer):
            told.append(flashinfer)

    monkeypatch.setattr(served_model, "CudaGraphs", lambda device: None)
    on_device.make_ready(Told(), BOUNDS)
    assert told == [wanted, FOUND]


def _config(wanted):
    return served_model.EngineConfig(flashinfer=wanted)
