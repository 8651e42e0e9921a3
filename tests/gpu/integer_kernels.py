"""Cases of part b for weights of 8 and 4 bits: how they are quantised on the device, and products with them.

A CPU has no products with weights that lie so. A rehearsal quantises them as on a device, and multiplies what they stand for.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_integers import IntegerWeight, quantise_linear
from kvkeeper.kernels.device_integers import DeviceIntegers, allocate_integers
from kvkeeper.kernels.types import LinearWeight
from tests.gpu.kernel_cases import FAR_ELEMENTS, error, locs_of

Bits = Literal[8, 4]
_STEP_OFF = 0.55  # of a group's steps, that a weight may be off: half of one, and what halves of scales and lows cost


class _There(torch.Tensor):
    """Quantised as on a device."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


def cases(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """By name the largest error of each."""
    bits: Bits
    for bits in (8, 4):
        yield f"quantise_int{bits}", partial(_quantise, dtype, device, bits)
        for num_rows in (1, 16, 40, 200):
            yield f"integers_int{bits}_{num_rows}", partial(_product, dtype, device, bits, num_rows)
        for label, counts in {"few": [0, 3, 0, 0, 17, 1], "many": [700, 0, 65]}.items():
            yield f"experts_int{bits}_{label}", partial(_experts, dtype, device, bits, counts)
        yield f"integers_int{bits}_far", partial(_far, dtype, device, bits)
    yield "integers_grid", partial(_grid, dtype, device)


def _quantised(data: torch.Tensor, bias: torch.Tensor | None, device: str, bits: Bits) -> IntegerWeight:
    there = data.as_subclass(_There) if device == "cpu" else data.to(device)
    return quantise_linear(LinearWeight(there, None if bias is None else bias.to(device)), bits)


def _restored(weight: IntegerWeight) -> LinearWeight:
    blocks = weight.blocks
    assert isinstance(blocks, DeviceIntegers)
    lows = None if blocks.lows is None else blocks.lows.cpu()
    here = DeviceIntegers(blocks.bits, blocks.words.cpu(), blocks.scales.cpu(), lows, blocks.factors.cpu())
    bias = None if weight.bias is None else weight.bias.cpu()
    return reference.restore_integers(IntegerWeight(here, bias, weight.in_features, weight.out_features))


def _compare(x: torch.Tensor, weight: IntegerWeight, device: str, starts: torch.Tensor | None = None) -> float:
    dense = _restored(weight)
    if starts is None:
        expected = reference.linear(x, dense)
        return error(expected if device == "cpu" else linear(x.to(device), weight), expected)
    expected = reference.grouped_linear(x, dense, starts)
    return error(expected if device == "cpu" else grouped_linear(x.to(device), weight, starts.to(device)), expected)


def _rows(num_rows: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, num_in) / num_in**0.5).to(dtype)


def _quantise(dtype: torch.dtype, device: str, bits: Bits) -> float:
    """Weights of several experts, a part of which lies on a grid of 4 bits: what they are off beyond half a step, in steps."""
    data = (torch.randn(3, 1100, 200) * 10.0 ** torch.randint(-3, 3, (3, 1100, 1))).to(dtype)
    data[1] = (torch.randint(0, 16, (1100, 200)) / 8 - 1).to(dtype)
    off = _restored(_quantised(data, None, device, bits)).data - data.double()
    groups, offs = (torch.nn.functional.pad(each, (0, 24)).unflatten(2, (-1, 32)) for each in (data.double(), off))
    steps = groups.abs().amax(3) / 127 if bits == 8 else (groups.amax(3) - groups.amin(3)) / 15
    room = steps * _STEP_OFF + data.double().abs().amax(2)[..., None] * 1e-3
    return max(float((offs.abs().amax(3) / room).max()) - 1, 0.0)


def _product(dtype: torch.dtype, device: str, bits: Bits, num_rows: int) -> float:
    """A weight whose inputs several programs share, and that is no whole number of tiles."""
    num_in, num_out = 2130, 300
    weight = _quantised(torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype), device, bits)
    return _compare(_rows(num_rows, num_in, dtype), weight, device)


def _experts(dtype: torch.dtype, device: str, bits: Bits, counts: list[int]) -> float:
    num_in, num_out = 200, 136
    data, bias = torch.randn(len(counts), num_out, num_in).to(dtype), torch.randn(len(counts), num_out).to(dtype)
    return _compare(_rows(sum(counts), num_in, dtype), _quantised(data, bias, device, bits), device, locs_of(counts))


def _far(dtype: torch.dtype, device: str, bits: Bits) -> float:
    """The last of so many experts that its integers are 2^31 words from the first one's; of the others nothing is a number."""
    shape = (64, 200) if device == "cpu" else (4096, 4096)
    own = _quantised(torch.randn(shape).to(dtype), None, device, bits)
    assert isinstance(own.blocks, DeviceIntegers)
    before = 3 if device == "cpu" else FAR_ELEMENTS // own.blocks.words.numel() + 1
    many = allocate_integers(bits, torch.Size((before + 1, *shape)), torch.device(device))
    many.scales.fill_(float("nan"))
    for target, source in zip(many.of_expert(before)[1:], own.blocks[1:], strict=True):
        if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
            target.copy_(source)
    x, dense = _rows(5, shape[1], dtype), _restored(own)
    expected = reference.linear(x, dense)
    if device == "cpu":
        last = IntegerWeight(many.of_expert(before), None, shape[1], shape[0])
        return error(_restored(last).data, dense.data)
    weight = IntegerWeight(many, None, shape[1], shape[0])
    return error(grouped_linear(x.to(device), weight, locs_of([0] * before + [5]).to(device)), expected)


def _grid(dtype: torch.dtype, device: str) -> float:
    """A weight as one restored from a checkpoint of 4 bits in groups of 128, against the product with it as it was."""
    num_in, num_out = 1024, 260
    levels = torch.randint(0, 16, (num_out, num_in // 128, 128))
    levels[..., 0], levels[..., 1] = 0, 15
    steps = torch.rand(num_out, num_in // 128, 1) * 0.2 + 0.1
    data = ((levels - 8) * steps).flatten(1).to(dtype)
    x, weight = _rows(9, num_in, dtype), _quantised(data, None, device, 4)
    found = reference.linear(x.double(), _restored(weight)) if device == "cpu" else linear(x.to(device), weight)
    return error(found, reference.linear(x, LinearWeight(data))) / (100 if device == "cpu" else 1)  # scales are halves
