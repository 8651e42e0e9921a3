"""Captured decodes, on the Triton path, interpreted: the same logits, for all sizes, on whatever arena is mapped."""

import dataclasses

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from kvkeeper.engine_service.compute.device.device_errors import lost_by
from kvkeeper.engine_service.compute.graphs.graphed_steps import StepShape, capture_steps
from kvkeeper.engine_service.compute.graphs.step_sizes import graph_sizes
from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.compute.stored_model import kv_groups
from kvkeeper.engine_service.model import loader
from kvkeeper.engine_service.model.layer_groups import find_places, group_layers
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.kernels.activations.linear_float8 import Float8Weight
from tests.support.models.tiny_models import build_model_folder, tiny_model
from tests.support.slices import todays
from tests.support.stand_ins.device_faults import accelerator_error, out_of_memory
from tests.support.stand_ins.recorded_graphs import NothingAllocates, RecordedGraphs
from tests.support.worlds.batches import WantLogits
from tests.unit.kernels.gpu.captured import (
    BLOCK_SIZE,
    CHOSEN,
    CONTEXTS,
    GEMMA2,
    LLAMA4,
    MOST_ROWS,
    NUM_BLOCKS,
    QWEN3,
    all_claim_to_be_on_cuda,
    drawn_by,
    in_groups,
    make_runner,
    mixed,
    model,
    plain,
    prompts,
    ready,
    ready_cold,
    rows,
)
from tests.unit.kernels.gpu.pretend import on_cuda, pretend_weights_on_cuda

__all__ = ["all_claim_to_be_on_cuda", "model"]  # fixtures of the tests here
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.in_turn]


@pytest.fixture(params=todays(CHOSEN, 1), ids=lambda model: model.name)
def each_model(request, tmp_path):
    return load_model(build_model_folder(tmp_path, request.param), progress=False)[0]


def test_logits_are_those_without_graphs_for_every_size(each_model):
    (captured, seen), (without, other) = ready(each_model), make_runner(each_model)
    for runner in (captured, without):
        prompts(runner)
    orders = [[0], [3, 4], [6, 7], [8, 0, 6], [7, 2, 5, 1], list(range(MOST_ROWS)), [4, 5, 3, 2, 7]]  # each size, some padded
    for replays, seqs in enumerate(orders[:3] if each_model.config.experts else orders, 1):
        found, expected = captured.forward(rows(seqs)), without.forward(rows(seqs))
        assert captured.graphed.num_replays == replays
        torch.testing.assert_close(plain(found), plain(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(seen[1:], other[1:], rtol=0, atol=1e-6, equal_nan=True)
    assert not seen[0].any(), "padding wrote to the null block"


@pytest.mark.parametrize("kind", todays([GEMMA2, LLAMA4], 1), ids=lambda model: model.name)
def test_layers_in_groups_have_the_same_logits_by_tables_of_their_own(kind, tmp_path):
    model = load_model(build_model_folder(tmp_path, kind), progress=False)[0]
    groups, (without, filled) = group_layers(model.config.windows, model.config.chunks), make_runner(model)
    assert len(groups) > 1
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE, groups)
    view = layout.view(torch.zeros(len(groups) * NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8)).fill_(float("nan"))
    captured = ModelRunner(model, on_cuda(view)[0], layout, groups)
    ready_cold(captured)
    prompts(without)
    for layer, (group, at) in enumerate(find_places(groups)):
        view[group * NUM_BLOCKS : (group + 1) * NUM_BLOCKS, at] = filled[:, layer]
    view[0] = 0
    orders = [[0], [1, 4], [8, 7], [8, 0, 2], list(range(MOST_ROWS))]
    for replays, seqs in enumerate(orders[:3] if model.config.experts else orders, 1):
        found, expected = captured.forward(in_groups(rows(seqs), len(groups))), without.forward(rows(seqs))
        assert captured.graphed.num_replays == replays
        torch.testing.assert_close(plain(found), plain(expected), rtol=0, atol=1e-6)
    assert not view[0].any(), "padding wrote to the null block"


def test_groups_of_several_shapes_have_the_same_logits_with_graphs_and_without(tmp_path):
    """One layer of them reads what another one has stored."""
    model = load_model(build_model_folder(tmp_path, tiny_model("gemma4_e2b")), progress=False)[0]
    groups, drawn = kv_groups(model.config), torch.Generator().manual_seed(1)
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE, groups)
    memory = torch.zeros(len(groups) * NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8)
    memory[layout.block_bytes :].view(torch.float32).normal_(generator=drawn)
    captured, without = (ModelRunner(model, on_cuda(layout.view(memory.clone()))[0], layout, groups) for _ in range(2))
    ready_cold(captured)
    for replays, seqs in enumerate([[0], [1, 4], [8, 0, 2]], 1):
        batch = in_groups(rows(seqs), len(groups))
        found, expected = captured.forward(batch), without.forward(batch)
        assert captured.graphed.num_replays == replays
        torch.testing.assert_close(plain(found), plain(expected), rtol=0, atol=1e-6)


def test_products_of_8_bit_floats_are_captured(tmp_path, monkeypatch):
    """A row is rounded by what is in it, on the device: a replay with other rows gives their logits."""
    monkeypatch.setattr(loader, "compute_dtype", lambda *given, **options: torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    pretend_weights_on_cuda(monkeypatch)
    model = load_model(build_model_folder(tmp_path, QWEN3), dtype="fp8", progress=False)[0]
    assert isinstance(model._layers[0].qkv, Float8Weight)
    graphs = RecordedGraphs()
    captured, without = ready(model, graphs)[0], make_runner(model)[0]
    for runner in (captured, without):
        prompts(runner)
    assert "quantise_rows_kernel" in graphs.graphs[0].kernels
    for replays, seqs in enumerate(([0], [6, 7], [7, 2, 5, 1]), 1):
        found, expected = (plain(runner.forward(rows(seqs))) for runner in (captured, without))
        assert captured.graphed.num_replays == replays
        assert float((found - expected).norm() / expected.norm()) < 1e-3  # a sum in another order may be rounded otherwise


def test_a_sequence_goes_on_from_replay_to_replay(model):
    captured, without = ready(model)[0], make_runner(model)[0]
    for runner in (captured, without):
        prompts(runner)
    for ahead in range(1, 6):
        batch = rows([0, 3, 2], lambda seq, n=ahead: CONTEXTS[seq] + n - 1, lambda seq, n=ahead: CONTEXTS[seq] + n)
        torch.testing.assert_close(plain(captured.forward(batch)), plain(without.forward(batch)), rtol=0, atol=1e-6)


def test_nothing_is_allocated_at_replay_and_the_addresses_stay(model):
    runner, _ = ready(model, draws=True)
    prompts(runner)
    addresses = set()
    for seqs in ([0, 1, 2], [4, 5, 6, 7], [3]):
        for how in ((), drawn_by(seqs)):
            with torch.inference_mode(), NothingAllocates():
                found = runner.graphed.stage(rows(seqs), how)()
            assert (found.drawn is None) == (not how)
            addresses.add(found.values.data_ptr())
    assert len(addresses) == 1, "the logits of all sizes lie in one place"


def test_another_arena_is_captured_anew_and_the_old_one_is_left_alone(model):
    first, old = ready(model)
    prompts(first)
    expected, before = plain(first.forward(rows([0, 1]))), old.clone()
    graphs = RecordedGraphs()
    second, new = ready(model, graphs)
    num_sizes = len(graph_sizes(MOST_ROWS))
    assert len(graphs.graphs) == 3 * num_sizes + 2, "decodes and both kinds of draw; prompts alone, and beside decodes"
    prompts(second)
    torch.testing.assert_close(plain(second.forward(rows([0, 1]))), expected, rtol=0, atol=1e-6)
    assert torch.equal(old.nan_to_num(7), before.nan_to_num(7))
    assert torch.equal(new[1:].isnan(), old[1:].isnan())


def test_what_was_not_captured_falls_back(model, monkeypatch):
    runner, without = ready(model)[0], make_runner(model)[0]
    for each in (runner, without):
        prompts(each)
    before = runner.graphed.num_replays
    for batch in (
        rows([4], lambda seq: 0),  # more tokens than any graph has
        rows([0, 1], lambda seq: CONTEXTS[seq] - 2, want=WantLogits.ALL),  # more logits
        rows([0, 1], lambda seq: CONTEXTS[seq] - 2 * (seq == 0)),  # a prompt before a row that decodes
    ):
        torch.testing.assert_close(plain(runner.forward(batch)), plain(without.forward(batch)), rtol=0, atol=1e-6)
    assert runner.graphed.num_replays == before
    with torch.inference_mode():
        check_the_bounds_of_what_is_captured(runner)


def test_steps_with_prompts_have_the_logits_of_those_without_graphs(each_model):
    """Prompts alone and beside decodes, guesses of which all logits are wanted, and chunks of which none is."""
    is_captured = not any(each_model.config.chunks)
    (captured, seen), (without, other) = ready(each_model), make_runner(each_model)
    for runner in (captured, without):
        prompts(runner)
    batches = [
        mixed([], [0]),
        mixed([3], [4], 16),
        mixed([3, 8, 1], [6], 2),
        mixed([1, 3], [0, 4, 6], 5),
        mixed([2], [5, 7], 2, WantLogits.ALL),
        mixed([4], [7], 3, WantLogits.NONE),
        mixed([8, 6], [2]),
    ]
    for replays, batch in enumerate(batches, 1):
        found, expected = captured.forward(batch), without.forward(batch)
        assert captured.graphed.num_with_prompts == replays * is_captured
        torch.testing.assert_close(plain(found), plain(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(seen[1:], other[1:], rtol=0, atol=1e-6, equal_nan=True)
    assert not seen[0].any(), "padding wrote to the null block"


def test_rows_with_prompts_go_on_from_what_the_step_before_drew(model):
    captured, without = ready(model)[0], make_runner(model)[0]
    for runner in (captured, without):
        prompts(runner)
        with torch.inference_mode():
            runner.last_tokens.put(np.array([0, 2]), torch.tensor([11, 13]))
    batch = dataclasses.replace(mixed([1, 4], [0]), rows=np.array([2, 3, 0]))
    known, awaited = batch.token_ids.copy(), np.full(len(batch.token_ids), -1)
    awaited[0], batch.token_ids[0] = 2, 0
    found = plain(captured.forward(dataclasses.replace(batch, awaited_rows=awaited)))
    known[0] = 13
    torch.testing.assert_close(found, plain(without.forward(dataclasses.replace(batch, token_ids=known))), rtol=0, atol=1e-6)
    assert captured.last_tokens.tensor[[2, 3, 0]].tolist() == found.argmax(dim=1).tolist()


def check_the_bounds_of_what_is_captured(runner):
    others = (torch.device("cpu"), RecordedGraphs(), runner.queue, runner.last_tokens, runner.counts)
    small = capture_steps(runner._plain_step, StepShape(2, 1, BLOCK_SIZE, 17, runner.vocab_size), *others, progress=False)
    assert small.stage(rows([0, 1, 6])) is None, "three rows"
    assert small.stage(rows([2])) is None, "two blocks"
    assert small.stage(rows([0, 3])) is not None
    narrow = capture_steps(runner._plain_step, StepShape(2, 9, BLOCK_SIZE, 6, runner.vocab_size), *others, progress=False)
    assert narrow.stage(rows([1])) is None, "a position that the tables do not have"
    assert narrow.stage(rows([0])) is not None


@pytest.mark.parametrize("num_captured", [0, 2])
def test_a_capture_that_fails_leaves_an_engine_that_serves(model, num_captured):
    class Refusing(RecordedGraphs):
        def capture(self, run):
            if len(self.graphs) == num_captured:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(run)

    runner, without = make_runner(model)[0], make_runner(model)[0]
    with capture_logs() as logs:
        ready_cold(runner, Refusing())
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("graphs_failed", "error")]
    assert logs[0]["message"].startswith("steps are computed without CUDA graphs")
    assert logs[0]["exc_info"], "with what the driver said"
    assert runner.graphed is None
    for each in (runner, without):
        prompts(each)
    for batch in (rows([0, 3]), rows([1, 7, 5, 6]), rows([2], lambda seq: CONTEXTS[seq] - 3)):
        torch.testing.assert_close(plain(runner.forward(batch)), plain(without.forward(batch)), rtol=0, atol=1e-6)


class FailsAtTheEnd:
    """A capture that a device breaks off, and whose end fails for that, as torch's does."""

    def __init__(self, error):
        self._error = error

    def capture(self, run):
        try:
            raise self._error
        finally:
            raise accelerator_error(901, "operation failed due to a previous error during capture")


def test_a_capture_without_memory_is_told_in_words_and_the_engine_serves(model):
    runner, _ = make_runner(model)
    with capture_logs() as logs:
        ready_cold(runner, FailsAtTheEnd(out_of_memory()))
    assert runner.graphed is None
    prompts(runner)
    (told,) = (line for line in logs if line["event"] == "graphs_failed")
    assert told["log_level"] == "warning"
    assert "exc_info" not in told
    assert told["why"].startswith("cudaErrorMemoryAllocation (2.50 GiB were asked for, 640.50 MiB are free): ")
    assert "--no-graphs" in told["message"]


def test_a_capture_that_loses_the_device_ends_the_start(model):
    runner, _ = make_runner(model)
    with pytest.raises(torch.AcceleratorError) as failed:
        ready_cold(runner, FailsAtTheEnd(accelerator_error(700)))
    assert lost_by(failed.value) is not None
