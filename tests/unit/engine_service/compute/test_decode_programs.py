"""DecodePrograms: a step that only decodes runs as a program, with the tokens and memory of a plain forward pass."""

import pytest
import torch

from kvkeeper.engine_service.compute.decode_programs import _KEEP_STEPS, _NUM_TRIES, _TRY_STEPS, ThreadChoice
from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.cpu.features import multiplies_bfloat16
from tests.support.models.tiny_models import NumericsCase, build_model_folder, random_tokens, tiny_model
from tests.support.worlds.batches import ScheduledRow, build_batch
from tests.support.worlds.hand_tables import HandTables

pytest.importorskip("numba")


@pytest.fixture(scope="module", autouse=True)
def kernels():
    compiled.switch(on=True)
    yield
    compiled.switch(on=False)


def make_runners(dtype):
    model, _ = load_model(DEMO_MODEL_DIR, dtype=dtype, progress=False)
    layout = make_kv_layout(model.config, model.dtype, 4)
    runners = []
    for _ in range(2):
        view = torch.full((64, *layout.view_shape), float("nan"), dtype=model.dtype)  # what is not written is not read
        runners.append(ModelRunner(model, view, layout))
    plain, recorded = runners
    plain.programs = None
    return plain, recorded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_programs_compute_what_a_plain_pass_does(dtype):
    if dtype == "bfloat16" and not multiplies_bfloat16():
        pytest.skip("this processor does not multiply bfloat16, and oneDNN lays it out in no blocks")
    plain, recorded = make_runners(dtype)
    tables = [list(range(1 + 12 * row, 13 + 12 * row)) for row in range(4)]
    lens = [3, 9, 1, 14]
    steps = [[ScheduledRow(list(range(5, 5 + count)), 0, tables[row])] for row, count in enumerate(lens)]
    for turn in range(20):
        rows = range(4) if turn % 3 else range(1 + turn % 4)
        steps.append([ScheduledRow([7 + turn + row], lens[row], tables[row]) for row in rows])
        for row in rows:
            lens[row] += 1
    for step in steps:
        batch = build_batch(step, 4)
        assert torch.equal(plain.forward(batch), recorded.forward(batch))
    assert recorded.programs.num_runs >= 10  # the first step of each size is computed plainly


DENSE = ("gemma4_e2b", "gemma4_e4b", "gemma4_12b", "gemma4_31b")
WITH_EXPERTS = ("gemma4_26b", "gpt_oss", "lfm2_moe", "mixtral", "qwen3_moe", "qwen3_5_35b_a3b")
FAMILIES = [(name, dtype) for name in DENSE for dtype in ("float32", "bfloat16", "int8")]
FAMILIES += [(name, dtype) for name in WITH_EXPERTS for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), FAMILIES)
def test_programs_of_other_families_compute_what_a_plain_pass_does(name, dtype, tmp_path):
    if dtype == "bfloat16" and not multiplies_bfloat16():
        pytest.skip("this processor does not multiply bfloat16, and oneDNN lays it out in no blocks")
    model, _ = load_model(build_model_folder(tmp_path, tiny_model(name)), dtype=dtype, progress=False)
    cases = [NumericsCase(random_tokens(length, seed=length)) for length in (17, 30, 29)]
    plain, recorded = (HandTables(model, 4, num_blocks=400, checkpoint_blocks=2) for _ in range(2))
    plain.runner.programs = None
    for found, expected in zip(recorded.compute(cases, 1), plain.compute(cases, 1), strict=True):
        assert torch.equal(found, expected)
    assert recorded.runner.programs.num_runs >= 18  # of 30


def test_a_step_with_a_prompt_is_computed_plainly():
    _, recorded = make_runners("float32")
    rows = [ScheduledRow([5], 0, [1]), ScheduledRow([5, 6], 0, [2])]
    assert recorded.forward(build_batch(rows, 4)).isfinite().all()
    assert recorded.programs.num_runs == 0


def run_steps(choice, seconds_of, count, now=0.0):
    chosen = []
    for _ in range(count):
        chosen.append(choice.choose(now))
        now += seconds_of(chosen[-1])
    return chosen, now


@pytest.mark.parametrize(("faster", "slower"), [(4, 3), (3, 4)])
def test_the_number_of_threads_with_faster_steps_is_taken_and_tried_again(faster, slower):
    choice = ThreadChoice(4, 1)
    tried, now = run_steps(choice, lambda count: 0.001 if count == faster else 0.002, _NUM_TRIES * _TRY_STEPS)
    assert set(tried) == {3, 4}
    kept, now = run_steps(choice, lambda count: 0.001, _KEEP_STEPS - 1, now)
    assert set(kept) == {faster}
    _, now = run_steps(choice, lambda count: 0.001 if count == slower else 0.002, _NUM_TRIES * _TRY_STEPS + 1, now)
    kept, _ = run_steps(choice, lambda count: 0.001, 100, now)
    assert set(kept) == {slower}


def test_a_pause_between_steps_counts_for_nothing():
    choice = ThreadChoice(2, 1)
    pauses = iter(range(10_000))
    run_steps(choice, lambda count: 0.002 if count == 2 else (60.0 if next(pauses) % 2 else 0.001), _NUM_TRIES * _TRY_STEPS)
    assert choice.choose(1e9) == 1


def test_one_thread_is_one_thread():
    assert set(run_steps(ThreadChoice(1, 1), lambda count: 0.001, 100)[0]) == {1}
