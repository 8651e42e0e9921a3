"""Cases of part b for products of 8-bit floats: how rows and weights are rounded on the device, and what torch multiplies.

A rehearsal does the same on the CPU.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_float8 import Float8Weight, quantise_float8, quantise_rows
from kvkeeper.kernels.types import LinearWeight
from tests.gpu.kernel_cases import FAR_ELEMENTS, error

_HALF_A_STEP = 1 / 14  # of a number, that 3 bits behind the first one round off, and a scale that suits the others better


def cases(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """By name the largest error of each."""
    for length in (48, 4096, 28_672):
        yield f"quantise_rows_{length}", partial(_rows, dtype, device, 40, length)
    yield "quantise_rows_far", partial(_rows, dtype, device, 3 if device == "cpu" else FAR_ELEMENTS // 4096 + 2, 4096)
    yield "quantise_float8", partial(_weight, dtype, device)
    for num_rows in (1, 16, 40, 200):
        yield f"float8_{num_rows}", partial(_product, dtype, device, num_rows)


def _rows(dtype: torch.dtype, device: str, num_rows: int, length: int) -> float:
    """The last rows, one of zeros among them: how many codes and scales are others than the reference's."""
    few = min(num_rows, 40)
    x = (torch.randn(few, length) * 10.0 ** torch.randint(-3, 3, (few, 1))).to(dtype)
    x[-2] = 0
    there = torch.empty(num_rows, length, dtype=dtype, device=device)
    there[-few:] = x.to(device)
    codes, scales = (each[-few:].cpu() for each in quantise_rows(there))
    expected_codes, expected_scales = reference.quantise_rows(x)
    return float((codes.view(torch.uint8) != expected_codes.view(torch.uint8)).sum() + (scales != expected_scales).sum())


def _weight(dtype: torch.dtype, device: str) -> float:
    """What weights are off beyond half a step, over what they are; those on a grid are off as dtype rounds."""
    data = (torch.randn(1104, 208) * 10.0 ** torch.randint(-3, 3, (1104, 1))).to(dtype)
    on_grid = torch.randn(1104, 208).to(torch.float8_e4m3fn).float()
    offs = []
    for each, room in ((data, _HALF_A_STEP), ((on_grid * 0.013).to(dtype), 2**-7)):
        weight = quantise_float8(LinearWeight(each.to(device)))
        found, largest = _meant(weight), each.double().abs().amax(1, keepdim=True)
        offs.append(((found - each.double()).abs() - largest / 448 / 500) / each.double().abs().clamp(min=1e-12) - room)
    return max(max(float(off.max()) for off in offs), 0.0)


def _meant(weight: Float8Weight) -> torch.Tensor:
    return weight.codes.cpu().double() * weight.scales.cpu().double().T


def _product(dtype: torch.dtype, device: str, num_rows: int) -> float:
    num_in, num_out = 2128, 304
    bias = None if dtype is torch.float32 else torch.randn(num_out).to(dtype)
    data = (torch.randn(num_out, num_in) * torch.rand(num_out, 1)).to(dtype)
    weight = quantise_float8(LinearWeight(data.to(device), None if bias is None else bias.to(device)))
    x = (torch.randn(num_rows, num_in) / num_in**0.5).to(dtype)
    here = Float8Weight(weight.codes.cpu(), weight.scales.cpu(), bias)
    return error(linear(x.to(device), weight), reference.linear_float8(x, here))
