"""The arithmetic of each format: its error is below a step, and the bytes of a block are what the layout says."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.quantised.formats import FORMATS, compute_scales, dequantise, quantise, scale_values
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer

# Of the head's greatest magnitude: half a step of its integers with the scale's rounding; of fp8 half of its greatest step. In
# int4 a number opposite to the greatest one may be cut off by half a step more.
MOST_ERROR = {"int8": 0.504 / 127, "int4": 1.008 / 8, "fp8": 16.2 / 448, "fp16": 2**-11, "bf16": 2**-8}


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_at_most_what_rounding_makes(name):
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-12, 12, 200)[:, None]
    if name == "fp16":
        x = x.clamp(-60000, 60000)
        x[x.abs() < 1e-4] = 0
    back = dequantise(*quantise(x, FORMATS[name]), FORMATS[name], torch.float32)
    error = (back - x).abs() / x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert float(error.max()) <= MOST_ERROR[name]
    assert float(error.max()) > MOST_ERROR[name] / 8


def test_int4_stores_the_number_of_the_greatest_magnitude_as_its_least_element():
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(4))
    x[0] = 0
    elements, scales = quantise(x, FORMATS["int4"])
    back = dequantise(elements, scales, FORMATS["int4"], torch.float32)
    numbers = back / scale_values(scales)[:, None]
    assert numbers[1:].amin(-1).unique().tolist() == [-8]
    assert not back[0].any()
    assert 0.4 < float((scales < 0).float().mean()) < 0.6  # of heads whose greatest number is positive
    again, same_scales = quantise(back, FORMATS["int4"])
    assert torch.equal(again, elements)
    assert torch.equal(same_scales, scales)
    step = x.abs().amax(-1, keepdim=True) / 7
    symmetric = (x / step.clamp(min=1e-30)).round() * step
    assert float((back - x).square().mean()) < 0.85 * float((symmetric - x).square().mean())


@pytest.mark.parametrize(("name", "ratio"), [("int8", 130 / 256), ("fp8", 130 / 256), ("int4", 66 / 256), ("bf16", 1.0)])
def test_bytes_of_a_block_against_16_bit(name, ratio):
    layout = QuantisedLayout(32, 8, 128, 16, FORMATS[name], torch.bfloat16)
    assert layout.block_bytes == ratio * 32 * 2 * 16 * 8 * 128 * 2


def test_a_page_of_the_tail_is_no_smaller_than_a_block_and_whole_alignments():
    layout = QuantisedLayout(3, 1, 12, 5, FORMATS["int4"], torch.float32, tail_layers=1)
    assert layout.block_bytes == -(-max(3 * 2 * 5 * (6 + 2), 2 * 5 * 12 * 4) // 16) * 16
    view = layout.view(torch.zeros(4 * layout.block_bytes, dtype=torch.uint8))
    marks = [get_layer(view, layout, layer) for layer in range(3)]
    for layer, mark in enumerate(marks):
        mark.elements[1] = 10 + layer
        mark.scales[1] = 20 + layer
    assert all(bool((mark.elements[1] == 10 + layer).all()) for layer, mark in enumerate(marks))
    assert all(bool((mark.scales[1] == 20 + layer).all()) for layer, mark in enumerate(marks))
    assert not view[2:].any()
    marks[2].tail[3] = 1.5
    assert not view[2].any()


def test_refusals():
    with pytest.raises(KernelArgumentError, match="at least 1"):
        QuantisedLayout(1, 0, 8, 4, FORMATS["int8"], torch.float32)
    layout = QuantisedLayout(1, 1, 8, 4, FORMATS["int8"], torch.float32)
    with pytest.raises(KernelArgumentError, match="whole blocks"):
        layout.view(torch.zeros(layout.block_bytes + 1, dtype=torch.uint8))
    with pytest.raises(KernelArgumentError, match="uint8"):
        layout.view(torch.zeros(layout.block_bytes, dtype=torch.float32))


class _Divisors(TorchDispatchMode):
    """The devices of what tensors are divided by."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.div:
            self.devices.append(args[1].device.type if isinstance(args[1], torch.Tensor) else "host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_scales_are_divided_on_every_device(name):
    """By a number of the host, a CUDA device multiplies with the reciprocal: another bit in some scales."""
    with _Divisors() as seen:
        compute_scales(torch.empty(3, 64, device="meta"), FORMATS[name])
    assert set(seen.devices) == {"meta"}
