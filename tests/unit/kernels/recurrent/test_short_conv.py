"""The gated short convolution on states in pages: on all paths, against transformers', and cut anywhere."""

import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2 as theirs
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config

from kvkeeper.kernels import reference
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.recurrent.short_conv import short_conv
from kvkeeper.kernels.types import STATE_CHUNK, ConvInputs, StateRows
from tests.unit.kernels.recurrent.test_delta_rule import NUM_PAGES, ROWS, chunks_of, drawn, integers

SHAPES = pytest.mark.parametrize("shape", [(8, 3), (300, 4), (5, 2)], ids=str)  # channels and kernel


def make_inputs(shape, num_tokens, dtype=torch.float32, has_bias=False):
    channels, kernel = shape
    bias = drawn(channels, seed=2, dtype=dtype) if has_bias else None
    return ConvInputs(drawn(num_tokens, 3 * channels, dtype=dtype), drawn(channels, kernel, seed=1, dtype=dtype), bias)


def make_window(shape, dtype=torch.float32):
    """Pages a stride apart, as they are in an arena; what stands in page 0 is not read."""
    window = drawn(NUM_PAGES, 2, shape[1] - 1, shape[0], seed=7, dtype=dtype)[:, 1]
    window[0] = float("nan")
    return window


def check(path, shape, num_tokens, rows, dtype=torch.float32, atol=2e-6, has_bias=False):
    """The op's outputs are the reference's, and its pages to the bit."""
    inputs, window = make_inputs(shape, num_tokens, dtype, has_bias), make_window(shape, dtype)
    own, out = (
        drawn(NUM_PAGES, 2, *window.shape[1:], dtype=dtype)[:, 1].copy_(window),
        torch.zeros(num_tokens, shape[0], dtype=dtype),
    )
    expected = torch.zeros_like(out)
    reference.short_conv(inputs, window, rows, expected)

    def run(*args):
        short_conv(*args)
        return out

    path(run)(inputs, own, rows, out)
    torch.testing.assert_close(out, expected, atol=atol, rtol=4 * atol)
    # The interpreter cuts off what bfloat16 has no room for, where a device rounds.
    exact = 0.02 if path.is_device and dtype is torch.bfloat16 else 0
    torch.testing.assert_close(own, window, atol=exact, rtol=exact, equal_nan=True)


@SHAPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_one_token_are_the_references(path, shape, has_bias):
    check(path, shape, 4, StateRows(None, integers(3, 0, 5, 0), integers(3, 2, 6, 0)), has_bias=has_bias)
    check(path, shape, 6, StateRows(integers(4, 1, 2), integers(1, 0, 4), integers(1, 2, 0)), has_bias=has_bias)


@SHAPES
def test_rows_of_several_are_the_references(path, shape):
    """Among them a row that writes to the page that it reads, and then has a chunk shorter than the convolution reads."""
    check(path, shape, 148, chunks_of(ROWS), has_bias=True)
    check(path, shape, 3, chunks_of([(3, [(1, 3), (1, 4), (1, 5)])]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_bits_are_rounded_as_the_references(path, dtype):
    check(path, (8, 3), 148, chunks_of(ROWS), dtype, 0.01)


def test_a_run_has_the_very_numbers_of_its_tokens_one_by_one(path):
    shape, count = (300, 3), STATE_CHUNK + 9
    inputs, window = make_inputs(shape, count), make_window(shape)
    outs = torch.zeros(2, count, shape[0])

    def run(part, rows, out):
        short_conv(part, window, rows, out)
        return out

    path(run)(inputs, chunks_of([(0, [(STATE_CHUNK, 0), (9, 1)])]), outs[0])
    for token in range(count):
        part = inputs._replace(mixed=inputs.mixed[token : token + 1])
        path(run)(part, StateRows(None, integers(2 * (token > 0)), integers(2)), outs[1, token : token + 1])
    torch.testing.assert_close(outs[0], outs[1], atol=1e-6, rtol=1e-6)
    assert torch.equal(window[1], window[2])


def test_the_reference_is_transformers_layer():
    config = Lfm2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=8,
        layer_types=["conv"], conv_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    layer, x, out, window = theirs.Lfm2ShortConv(config, 0), drawn(1, 9, 8), torch.zeros(9, 8), make_window((8, 3))
    inputs = ConvInputs(layer.in_proj(x)[0].detach(), layer.conv.weight[:, 0].detach(), layer.conv.bias.detach())
    reference.short_conv(inputs, window, chunks_of([(0, [(9, 1)])]), out)
    torch.testing.assert_close(layer.out_proj(out), layer(x)[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"mixed": torch.zeros(4, 23)}, "mixed"),
        ({"conv": torch.zeros(8, 4)}, "window"),
        ({"conv": torch.zeros(8, 3).double()}, "conv"),
        ({"bias": torch.zeros(7)}, "bias"),
    ],
)
def test_what_does_not_fit_is_refused(path, changes, argument):
    inputs, rows = make_inputs((8, 3), 4), StateRows(None, *[integers(1, 2, 3, 4)] * 2)
    with pytest.raises(KernelArgumentError, match=f"short_conv: {argument}"):
        path(short_conv)(inputs._replace(**changes), make_window((8, 3)), rows, torch.zeros(4, 8))
    with pytest.raises(KernelArgumentError, match="short_conv: reads"):
        path(short_conv)(inputs, make_window((8, 3)), rows._replace(reads=rows.reads.int()), torch.zeros(4, 8))
    with pytest.raises(KernelArgumentError, match="short_conv: out"):
        path(short_conv)(inputs, make_window((8, 3)), rows, torch.zeros(4, 9))
