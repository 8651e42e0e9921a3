"""Experts, compiled: who is chosen, with what share, and what the chosen ones give, against torch."""

import pytest
import torch

from kvkeeper.kernels.activations.linear_integers import linear_integers, quantise_linear
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.cpu.experts import choose, make_table, mix, multiply_experts
from kvkeeper.kernels.cpu.products import RowBlocks
from kvkeeper.kernels.types import LinearWeight

pytest.importorskip("numba")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def kernels():
    torch.manual_seed(0)
    compiled.switch(on=True)
    yield
    compiled.switch(on=False)


@dtypes
@pytest.mark.parametrize("least", [None, 0.0, 0.5])
@pytest.mark.parametrize("is_sigmoid", [True, False])
@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), [(1, 4, 4), (5, 60, 8), (70, 128, 3)])
def test_the_experts_with_the_greatest_merits_are_chosen(num_rows, num_experts, num_chosen, is_sigmoid, least, dtype):
    logits = (torch.randn(num_rows, num_experts) * 3).to(dtype)
    correction, scales = torch.randn(num_experts) / 4, (torch.rand(num_experts) + 0.5).to(dtype)
    scores = logits.float().sigmoid() if is_sigmoid else logits.float().softmax(1)
    for added, factors in ((None, None), (correction, None), (None, scales)):
        shares, chosen = choose(logits, num_chosen, 1.5, least, is_sigmoid=is_sigmoid, correction=added, scales=factors)
        merits = scores if added is None else scores + added
        assert chosen.sort(1)[0].diff(dim=1).ne(0).all(), "no expert is chosen twice"
        torch.testing.assert_close(merits.gather(1, chosen), merits.topk(num_chosen)[0])
        expected = scores.gather(1, chosen)
        if least is not None:
            expected = expected / (expected.sum(1, keepdim=True) + least)
        expected = expected * 1.5 * (1 if factors is None else factors[chosen].float())
        torch.testing.assert_close(shares, expected.to(dtype))


def test_of_equal_experts_the_first_are_chosen():
    shares, chosen = choose(torch.zeros(1, 6), 3, 1.0, 0.0, is_sigmoid=False, correction=None, scales=None)
    assert chosen.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(shares, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("is_sigmoid", [True, False])
def test_what_is_not_a_number_stays_so_and_chooses_experts_that_there_are(is_sigmoid):
    logits = torch.randn(3, 6)
    logits[1, 4], logits[2] = float("nan"), float("nan")
    shares, chosen = choose(logits, 2, 1.0, 0.0, is_sigmoid=is_sigmoid, correction=None, scales=None)
    assert shares.isnan().any(1).tolist() == [False, True, True]
    assert chosen.min() >= 0
    assert chosen.max() < 6


def pack_by_hand(weight, bias, width=32):
    """As oneDNN does where it has instructions for the dtype, with room for more inputs than there are."""
    num_out, num_in = weight.shape
    per_step, room = 4 // weight.itemsize, num_in + 8
    padded = torch.nn.functional.pad(weight, (0, 8, 0, -num_out % width))
    blocks = padded.view(-1, width, room // per_step, per_step).transpose(1, 2).contiguous()
    return LinearWeight(weight, bias, blocks=RowBlocks(blocks.data_ptr(), width, room)), blocks


@dtypes
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), [(1, 16, 40), (7, 70, 200), (700, 64, 33)])
def test_rows_meet_the_weights_of_their_experts_and_are_added_up(num_rows, num_in, num_out, has_bias, dtype):
    dense = [(torch.randn(num_out, num_in) / num_in**0.5).to(dtype) for _ in range(9)]
    biases = [torch.randn(num_out).to(dtype) if has_bias else None for _ in dense]
    packed = [pack_by_hand(*each) for each in zip(dense, biases, strict=True)]
    table = make_table([weight for weight, _ in packed])
    x = torch.randn(num_rows, num_in).to(dtype)
    chosen = torch.stack([torch.randperm(8)[:3] for _ in range(num_rows)])  # the ninth rests
    expected = torch.empty(num_rows, 3, num_out)
    for row, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            bias = None if biases[expert] is None else biases[expert].float()
            expected[row, place] = torch.nn.functional.linear(x[row].float(), dense[expert].float(), bias)
    made, shares = multiply_experts(x, chosen, table), torch.rand(num_rows, 3).to(dtype)
    tolerance = {"rtol": 0.0, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(made.float(), expected.flatten(0, 1), **tolerance)
    torch.testing.assert_close(multiply_experts(x.repeat_interleave(3, 0), chosen, table), made, rtol=0, atol=0)
    torch.testing.assert_close(mix(made, shares).float(), (expected * shares[..., None].float()).sum(1), **tolerance)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), [(1, 16, 40), (7, 70, 200), (700, 64, 33)])
def test_experts_of_integers_give_each_row_what_it_gets_alone(num_rows, num_in, num_out, has_bias, bits):
    dense = [LinearWeight(torch.randn(num_out, num_in), torch.randn(num_out) if has_bias else None) for _ in range(9)]
    weights = [quantise_linear(weight, bits) for weight in dense]
    table, x = make_table(weights), torch.randn(num_rows, num_in)
    chosen = torch.stack([torch.randperm(8)[:3] for _ in range(num_rows)])  # the ninth rests
    of_all = torch.stack([linear_integers(x, weight) for weight in weights], 1)
    expected = of_all[torch.arange(num_rows)[:, None], chosen].flatten(0, 1)
    assert torch.equal(multiply_experts(x, chosen, table), expected)
    assert torch.equal(multiply_experts(x.repeat_interleave(3, 0), chosen, table), expected)


def test_weights_of_several_kinds_have_no_table():
    dense = LinearWeight(torch.randn(40, 32))
    assert make_table([quantise_linear(dense, 8), quantise_linear(dense, 4)]) is None
    assert make_table([quantise_linear(dense, 8), pack_by_hand(dense.data, None)[0]]) is None
    assert make_table([dense]) is None


def test_a_step_without_rows_gives_none():
    weight, _blocks = pack_by_hand(torch.randn(40, 16), None)
    table = make_table([weight])
    none = torch.empty(0, 2, dtype=torch.int64)
    assert multiply_experts(torch.empty(0, 16), none, table).shape == (0, 40)
    assert mix(torch.empty(0, 40), torch.empty(0, 2)).shape == (0, 40)


def test_weights_that_are_not_in_blocks_of_one_shape_have_no_table():
    (small, _), (large, _) = (pack_by_hand(torch.randn(40, size), None) for size in (16, 160))
    assert make_table([small, small]) is not None
    assert make_table([LinearWeight(torch.randn(40, 16))]) is None
    assert make_table([small, large]) is None
    assert make_table(()) is None
