"""sample_rows on the Triton path against the CPU's, interpreted: the same token for the same uniform number."""

import pytest
import torch

from kvkeeper.kernels.sampling import SamplingTensors, sample_rows
from tests.unit.kernels.gpu.pretend import on_cuda

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("kvkeeper.kernels.gpu.sampling._CHUNK", 64)


def draw_both(logits, rows, uniforms):
    """Tokens by the CPU's path and by the kernel's."""
    columns = [torch.tensor([{**OFF, **row}[name] for row in rows], dtype=torch.float64) for name in OFF]
    columns[1] = columns[1].long()
    uniforms = torch.tensor(uniforms, dtype=torch.float64)
    expected = sample_rows(logits, SamplingTensors(*columns), uniforms)
    found = sample_rows(*on_cuda(logits), SamplingTensors(*on_cuda(*columns)), *on_cuda(uniforms))
    return expected, found.as_subclass(torch.Tensor)


def check(logits, rows, uniforms):
    expected, found = draw_both(logits, rows, uniforms)
    assert found.tolist() == expected.tolist()


def normal(num_rows, vocab_size=300, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 299},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"typical_p": 0.4},
        {"typical_p": 1e-6},
        {"top_k": 10, "top_p": 0.6, "temperature": 4.0},  # most of the mass is not among the ten
        {"top_k": 40, "min_p": 0.5, "temperature": 4.0},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "temperature": 1.7},
    ],
    ids=str,
)
def test_the_same_token_as_on_a_cpu(row):
    uniforms = [0.0, 0.2, 0.4, 0.6, 0.8, 0.9999]
    check(normal(len(uniforms)), [row] * len(uniforms), uniforms)


def test_rows_with_parameters_of_their_own():
    rows = [{}, {"top_k": 3}, {"top_p": 0.3}, {"typical_p": 0.5}, {"min_p": 0.2, "temperature": 5.0}]
    check(normal(5, 1000, seed=3), rows, [0.9, 0.5, 0.1, 0.7, 0.3])


@pytest.mark.parametrize("row", [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 5, "top_p": 0.6}], ids=str)
def test_all_ties_at_a_threshold_are_kept(row):
    logits = torch.full((4, 130), -3.0)
    logits[:, [5, 60, 70, 129]] = 1.0
    logits[:, [6, 61]] = 2.0
    check(logits, [row] * 4, [0.05, 0.4, 0.7, 0.99])


@pytest.mark.parametrize("row", [{}, {"top_k": 5}, {"top_p": 0.7}, {"typical_p": 0.5}], ids=str)
def test_tokens_that_must_not_be_drawn_are_not_drawn(row):
    logits = normal(5)
    logits[:, 2::3] = -torch.inf
    logits[:3, 1::3] = -1e9
    logits[4, 1:] = -torch.inf  # one token left
    check(logits, [row] * 5, [0.0, 0.3, 0.6, 0.95, 0.9999])


def test_equal_logits_far_apart_logits_and_one_token():
    for logits in (
        torch.zeros(3, 70),
        torch.tensor([[-1e38, 1e38, 0.0]] * 3),
        torch.tensor([[1e-40, 0.0, -1e-40]] * 3),
        torch.ones(3, 1),
    ):
        check(logits, [{"top_k": 1}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}], [0.1, 0.5, 0.9])


def test_draws_cover_the_kept_tokens_in_proportion():
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.2, 0.1]])).expand(20, 4).contiguous()
    _, found = draw_both(logits, [{"top_k": 2}] * 20, [(i + 0.5) / 20 for i in range(20)])
    assert torch.bincount(found, minlength=4).tolist() == [11, 5, 4, 0] or found.unique().tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_invalid_numbers_ends_with_a_token(bad):
    """Its token is meaningless; the engine finds such rows when it next waits for the device."""
    logits = normal(8)
    logits[::2, ::5] = bad
    logits[4] = bad
    rows = [{}, {}, {"top_k": 4}, {"top_k": 4}, {"top_p": 0.5}, {"top_p": 0.5}, {"typical_p": 0.5}, {"typical_p": 0.5}]
    sound = logits.clone()
    sound[::2] = 0
    columns = [torch.tensor([{**OFF, **row}[name] for row in rows], dtype=torch.float64) for name in OFF]
    columns[1] = columns[1].long()
    uniforms = torch.full((8,), 0.5, dtype=torch.float64)
    found = sample_rows(*on_cuda(logits), SamplingTensors(*on_cuda(*columns)), *on_cuda(uniforms)).as_subclass(torch.Tensor)
    assert bool(((found >= 0) & (found < 300)).all())
    assert torch.equal(found[1::2], sample_rows(sound, SamplingTensors(*columns), uniforms)[1::2])
