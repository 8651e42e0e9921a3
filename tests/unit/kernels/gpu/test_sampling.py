"""sample_rows on the Triton path against the CPU's, interpreted: the same token for the same uniform number."""

import pytest
import torch

from kvkeeper.kernels.gpu.sampling_bounds import find_bounds
from kvkeeper.kernels.sampling import SamplingTensors, sample_rows
from tests.unit.kernels.gpu.pretend import on_cuda

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Three of them in most rows here, and so three programs that search a row."""
    monkeypatch.setattr("kvkeeper.kernels.gpu.sampling._CHUNK", 128)


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
    uniforms = [0.0, 0.5, 0.9999]
    check(normal(len(uniforms)), [row] * len(uniforms), uniforms)


def test_rows_with_parameters_of_their_own():
    rows = [{}, {"top_k": 3}, {"top_p": 0.3}, {"typical_p": 0.5}, {"min_p": 0.2, "temperature": 5.0}]
    check(normal(5, 1000, seed=3), rows, [0.9, 0.5, 0.1, 0.7, 0.3])


MIXED = [
    {},
    {"min_p": 0.05, "temperature": 3.0},
    {"top_k": 25, "temperature": 0.6},
    {"top_p": 0.95},
    {"top_k": 60, "top_p": 0.8, "min_p": 0.01},
    {"top_p": 0.4, "temperature": 5.0},
]


def test_one_program_a_row_draws_what_several_draw(monkeypatch):
    logits, uniforms = normal(len(MIXED), 400, seed=5), [0.0, 0.15, 0.35, 0.55, 0.8, 1 - 2**-53]
    several, found = draw_both(logits, MIXED, uniforms)
    monkeypatch.setattr("kvkeeper.kernels.gpu.sampling._FEWEST_CHUNKS", 1000)
    assert draw_both(logits, MIXED, uniforms)[1].tolist() == found.tolist() == several.tolist()


def test_a_row_with_more_candidates_than_are_kept_is_searched_as_a_whole(monkeypatch):
    for module in ("sampling", "sampling_bounds"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.MOST_CANDIDATES", 2)
    check(torch.zeros(2, 300), [{"top_k": 3}, {"top_p": 0.5}], [0.3, 0.7])


def brackets(logits, top_k, top_p, chunk):
    """Brackets [R, 4] of the thresholds, what is known above them, and the number of candidates, by row and chunk."""
    num_rows, num_chunks = len(logits), -(-logits.shape[1] // chunk)
    ones, none = torch.ones(num_rows, dtype=torch.float64), torch.zeros(num_rows, dtype=torch.float64)
    columns = (ones, torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), none)
    parts = find_bounds(logits, columns, num_chunks, 1 << (num_chunks - 1).bit_length(), chunk)
    assert all(part.data_ptr() % 16 == 0 for part in parts), "else kernels are compiled anew"
    _, found, sums, counts, _ = parts
    return found[: num_rows * 6].view(num_rows, 6)[:, :4], sums.view(num_rows, num_chunks, 4), counts.view(num_rows, num_chunks)


def test_each_threshold_is_within_its_bracket():
    ranked = normal(1, seed=11).sort(descending=True).values
    running = ranked[0].double().softmax(0).cumsum(0)
    logits = ranked[:, torch.randperm(300, generator=torch.Generator().manual_seed(1))].expand(8, 300).contiguous()
    found, _, _ = brackets(logits, list(range(1, 16, 2)), [1.0] * 8, 128)
    thresholds = ranked[0, :15:2]
    assert ((found[:, 0] <= thresholds) & (thresholds < found[:, 1])).all()
    shares = [(step + 0.5) / 8 for step in range(8)]
    found, _, _ = brackets(logits, [0] * 8, shares, 128)
    thresholds = ranked[0, [int((running < share).sum()) for share in shares]]
    assert ((found[:, 2] <= thresholds) & (thresholds < found[:, 3])).all()


def test_two_rounds_leave_few_candidates():
    logits = normal(3, 4000, seed=7) / 3
    found, sums, counts = brackets(logits, [50, 0, 0], [1.0, 0.9, 1.0], 512)
    above = [(logits[0] >= found[0, 1]).sum(), (logits[1] >= found[1, 3]).sum()]
    assert sums[0, :, 0].sum() == above[0] < 50
    assert counts[0].sum() == (logits[0] >= found[0, 0]).sum() - above[0] < 40
    assert counts[1].sum() == (logits[1] >= found[1, 2]).sum() - above[1] < 600


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
