"""Checks of `make gpu-check` that need captured steps, on the Triton path, interpreted: they pass, and see what is wrong."""

import numpy as np
import pytest

from kvkeeper.engine_service.compute.device.token_counts import TokenCounts
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds
from kvkeeper.kernels.attention.paged_attention_decode import plan_decode
from kvkeeper.kernels.gpu import shared_prefix
from tests.gpu import part_model
from tests.gpu.random_model import TINY
from tests.support.slices import todays
from tests.support.stand_ins.recorded_graphs import RecordedGraphs
from tests.unit.kernels.gpu.captured import all_claim_to_be_on_cuda, model
from tests.unit.kernels.gpu.pretend import on_cuda

__all__ = ["all_claim_to_be_on_cuda", "model"]  # fixtures of the tests here
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.in_turn]
COUNT, CONTEXT, PREFIX, OWN = 3, 12, 64, 3


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
    """Arenas claim to be on a device whose graphs are recorded; a prefix of one tile that few sequences have is shared."""
    monkeypatch.setattr(part_model, "ModelRunner", lambda of, view, *rest: ModelRunner(of, on_cuda(view)[0], *rest))
    monkeypatch.setattr(part_model, "CudaGraphs", lambda device: RecordedGraphs())
    monkeypatch.setattr(part_model, "spoil_freed", lambda device: 0)  # what the recorder does not keep is freed memory to it
    monkeypatch.setattr(
        part_model, "plan_decode", lambda tables, lens, layer, *rest: plan_decode(*on_cuda(tables, lens, layer), *rest)
    )
    monkeypatch.setattr("kvkeeper.engine_service.compute.model_runner.warm_up_batches", lambda *args, **options: ())
    monkeypatch.setattr("kvkeeper.engine_service.compute.graphs.step_sizes.graph_sizes", lambda most_rows: [most_rows])
    monkeypatch.setattr("kvkeeper.engine_service.compute.graphs.step_sizes._PROMPT_TOKENS", (PREFIX,))
    monkeypatch.setattr("kvkeeper.kernels.gpu.decode_work.FEWEST_ITEM_TOKENS", PREFIX)
    for module in ("decode_work", "paged_attention_decode"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.tile_tokens", lambda head_dim: PREFIX)
    for name, value in (("FEWEST_SHARED_TOKENS", PREFIX), ("FEWEST_MEMBERS", 2), ("_FEWEST_SEQS", 2)):
        monkeypatch.setattr(shared_prefix, name, value)
    for name, value in (("_CONTEXT", CONTEXT), ("_PREFIX", PREFIX), ("_OWN", OWN)):
        monkeypatch.setattr(part_model, name, value)


def penalised(model, *, behind=False):
    num_tokens = CONTEXT + part_model._PENALISED_STEPS
    runner = part_model._runner(model, COUNT, num_tokens)
    runner.make_ready(StepBounds(COUNT, num_tokens), RecordedGraphs(), with_retention=False, progress=False)
    texts = np.random.default_rng(0).integers(3, model.config.vocab_size, (COUNT, num_tokens))
    check = part_model._same_penalised(runner, texts, part_model._tables(COUNT, num_tokens), behind=behind)
    return check, runner.graphed.num_penalised


@pytest.mark.parametrize("behind", todays([False, True], 1))
def test_captured_penalties_are_those_of_whole_histories_and_a_token_that_is_not_counted_is_seen(behind, model, monkeypatch):
    check, num_penalised = penalised(model, behind=behind)
    assert check.ok, check
    assert num_penalised == (0 if behind else part_model._PENALISED_STEPS), "behind a graph no graph draws"
    assert check.figures["changed"] >= 0.5, "penalties decide what rows draw"
    own = TokenCounts.stage

    def counts_nothing(counts, rows):
        counted = own(counts, rows)
        counted.rows.addends[:] = 0
        return counted

    monkeypatch.setattr(TokenCounts, "stage", counts_nothing)
    check, _ = penalised(model, behind=behind)
    assert not check.ok
    assert check.figures["same"] < 1


UNSHARED = (shared_prefix, "FEWEST_MEMBERS", COUNT + 1)  # nothing is read once for several
UNCOPIED = (ModelRunner, "copy_blocks", lambda runner, pairs: None)  # the prefixes differ


@pytest.mark.parametrize("fault", todays([UNSHARED, UNCOPIED], 1), ids=lambda fault: fault[1])
def test_a_captured_prefix_in_common_gives_what_each_sequence_gives_with_its_own(fault, model, monkeypatch):
    check = part_model._shared_prefix(model, TINY, "cuda", COUNT)
    assert check.ok, check
    assert check.figures["sharing"] == COUNT
    monkeypatch.setattr(*fault)
    check = part_model._shared_prefix(model, TINY, "cuda", COUNT)
    assert not check.ok
    assert fault is UNSHARED or check.figures["relative_error"] > 0.02
