"""linear_integers: x W^T + b with a weight of integers.

Weights are quantised once, to 8 or 4 bits, in groups of 32 inputs of an output, as llama.cpp's Q8_0 and Q4_1 are. A weight of 4
bits that lies on such a grid already, as one restored from a checkpoint in 4 bits does, is found there again.

On a CPU products are of integers: activations are quantised to 8 bits in every call, in groups of 32 inputs of a row, so that
one large number costs its own group alone its precision, and a row's result does not depend on the rows beside it. What comes
out is float32, the same on all processors. The compiled kernels multiply; there is no other way.

On CUDA activations stay as they are, and weights are restored to their type in registers, next to the multiplication.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch.nn import functional

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.products import GROUP, IntegerBlocks, allocate_blocks, multiply_integers
from ..device_integers import DeviceIntegers, allocate_integers
from ..errors import UnsupportedDeviceError
from ..types import LinearWeight

_OP = "linear_integers"
_MOST_8, _MOST_4 = 127, 15
_STEPS: Final = tuple(range(_MOST_4, 7, -1))  # of the grids of 4 bits that are tried: one with fewer is a part of one with more
_ON_GRID: Final = 0.005  # mean square of a step that weights on a grid are off it, as bfloat16 rounds; 0.083 is chance
_SAMPLE: Final = 64  # outputs that say whether weights lie on grids
_MOSTLY: Final = 0.5
_LEAST_FACTOR: Final = 1e-30  # of an output of zeros
_LOWS_TO_SCALES: Final = 1024  # so many times a row's greatest scale a low is at most: what halves can say of both
_AT_A_TIME: Final = {"cpu": 1 << 19, "cuda": 1 << 23}  # weights that are quantised together, about
_ROWS: Final = 16  # so many rows together, or times as many: all widths of blocks divide it
_THERE: Final = (torch.float32, torch.float16, torch.bfloat16)  # what weights and rows may be on CUDA


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A quantised weight, or on CUDA several for grouped_linear.

    bias: [out_features], on a CPU float32, or of several weights [E, out_features]; None: there is none.
    """

    blocks: IntegerBlocks | DeviceIntegers
    bias: torch.Tensor | None
    in_features: int
    out_features: int


def quantise_linear(weight: LinearWeight, bits: Literal[8, 4]) -> IntegerWeight:
    """Quantise a dense weight where it is; it may be dropped then.

    Args:
        weight: float32 [O, I]. On CUDA also of 16 bits, and [E, O, I] for grouped_linear, with a bias [E, O] or none.
        bits: of an integer.

    Raises:
        KernelArgumentError: another dtype or shape, packed already, or a weight that is not finite.
        UnsupportedDeviceError: neither on a CPU nor on CUDA, or on a CPU whose compiled kernels are off.
    """
    data = weight.data
    there = on_cuda(_OP, data)
    fits = data.dtype in (_THERE if there else _THERE[:1]) and data.dim() in ((2, 3) if there else (2,)) and not weight.packed
    require(fits, _OP, "weight", "must be dense float32 [O, I], or dense on CUDA, is {} {}", data.dtype, data.shape)
    num_out, num_in = data.shape[-2:]
    bias = None if weight.bias is None else weight.bias.contiguous()
    if there:
        blocks = allocate_integers(bits, data.shape, data.device)
        parts = [blocks.of_expert(expert) for expert in range(len(data))] if blocks.is_stacked else [blocks]
        for own, part in zip(data if blocks.is_stacked else [data], parts, strict=True):
            for write in _quantised(own, part):
                write()
        return IntegerWeight(blocks, bias, num_in, num_out)
    if not compiled.serves(data):
        raise UnsupportedDeviceError(_OP, "cpu, without the compiled kernels")
    here = allocate_blocks(bits, num_out, num_in)
    with _single_threads() as pool:
        for done in [pool.submit(write) for write in _quantised(data, here)]:
            done.result()
    return IntegerWeight(here, bias, num_in, num_out)


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _quantised(data: torch.Tensor, blocks: IntegerBlocks | DeviceIntegers) -> Iterator[Callable[[], None]]:
    """Calls that each quantise some outputs of a weight [O, I]: there is never all of it in float32."""
    if blocks.bits == 8:
        quantise: Callable[[torch.Tensor], _Parts] = _quantise_8
    else:
        sample = data[:: max(len(data) // _SAMPLE, 1)]
        quantise = partial(_quantise_4, num_steps=_choose_steps(_in_groups(sample)))

    def write(index: int, rows: torch.Tensor) -> None:
        require(bool(torch.isfinite(rows).all()), _OP, "weight", "must be finite")
        blocks.write(index * num_rows, *quantise(_in_groups(rows)))

    num_rows = max(_AT_A_TIME["cuda" if data.is_cuda else "cpu"] // data.shape[1] // _ROWS, 1) * _ROWS
    return (partial(write, *each) for each in enumerate(data.split(num_rows)))


@contextmanager
def _single_threads() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch has, each of which computes its operations alone.

    Where operations are short, the threads of one wait for the slowest of them each time: on two processors that others use as
    well, ten times as long as they compute (measured). Several calls side by side wait for nothing.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def _in_groups(rows: torch.Tensor) -> torch.Tensor:
    """Float32 [R, groups, GROUP] of rows [R, I], padded with zeros."""
    return functional.pad(rows.float(), (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _quantise_8(groups: torch.Tensor) -> _Parts:
    """Integers, scales and lows over factors, and factors, of weights [O, groups, GROUP]. The lows are 0."""
    scales = groups.abs().amax(2) / _MOST_8
    factors = scales.amax(1).clamp_(min=_LEAST_FACTOR)
    halves = _half_up(scales / factors[:, None])
    integers = (groups / (halves * factors[:, None]).clamp_(min=_LEAST_FACTOR)[..., None]).round_()
    return integers.clamp_(-_MOST_8, _MOST_8).to(torch.int8), halves, torch.zeros_like(halves), factors


def _quantise_4(groups: torch.Tensor, num_steps: Sequence[int]) -> _Parts:
    """The same of 4 bits. num_steps: of the grids that are tried, the first for all groups."""
    flat, (low, high) = groups.flatten(0, 1), groups.flatten(0, 1).aminmax(dim=1)
    by_row = (high - low).view(groups.shape[:2]).amax(1) / _MOST_4, low.view(groups.shape[:2]).abs().amax(1) / _LOWS_TO_SCALES
    factors = torch.maximum(*by_row).clamp_(min=_LEAST_FACTOR)
    factor = factors.repeat_interleave(groups.shape[1])
    lows = (low / factor).half().float()
    begin, width = lows * factor, high - low
    integers, scales, errors = _fit_grid(flat, begin, width, factor, num_steps[0])
    for count in num_steps[1:]:
        apart = (errors > _ON_GRID).nonzero()[:, 0]
        of_less, scale, error = _fit_grid(flat[apart], begin[apart], width[apart], factor[apart], count)
        is_found = error <= _ON_GRID
        found = apart[is_found]
        integers[found], scales[found], errors[found] = of_less[is_found], scale[is_found], error[is_found]
    return integers.view(groups.shape), scales.view(groups.shape[:2]), lows.view(groups.shape[:2]), factors


def _fit_grid(
    flat: torch.Tensor, begin: torch.Tensor, width: torch.Tensor, factor: torch.Tensor, num_steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups [N, GROUP] on grids of so many steps: integers int8, scales over factors [N], mean squares off in steps [N]."""
    scales = (width / num_steps / factor).half().float()
    levels = (flat - begin[:, None]).div_((scales * factor).clamp_(min=_LEAST_FACTOR)[:, None])
    integers = levels.round().clamp_(0, _MOST_4)
    errors = levels.sub_(integers).square_().mean(1)
    return integers.to(torch.int8), scales, errors


def _choose_steps(groups: torch.Tensor) -> Sequence[int]:
    """The grids that are worth trying for a weight with such groups [O, groups, GROUP]: all, if they lie on such ones."""
    flat = groups.flatten(0, 1)
    low, high = flat.aminmax(dim=1)
    width, is_on = high - low, torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    for count in _STEPS:
        is_on |= _fit_grid(flat, low, width, width.clamp(min=_LEAST_FACTOR), count)[2] <= _ON_GRID
    return _STEPS if float(is_on.float().mean()) > _MOSTLY else _STEPS[:1]


def _half_up(numbers: torch.Tensor) -> torch.Tensor:
    """The halves at or above them, of which none is negative, as float32, so that no weight is beyond the last step."""
    halves = numbers.half()
    return (halves.view(torch.int16) + (halves.float() < numbers)).view(torch.float16).float()


def linear_integers(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """Return about x W^T + b, [..., out_features] for x [..., in_features], in x's dtype.

    A row of x that is not finite gives a row that is not.

    Args:
        x: where the weight is: on a CPU float32, on CUDA float16, bfloat16 or float32.
        weight: of one product.

    Raises:
        KernelArgumentError: shapes, dtypes or devices that do not fit.
    """
    require_rows(_OP, x, weight)
    blocks = weight.blocks
    if isinstance(blocks, IntegerBlocks):
        return multiply_integers(x.contiguous(), blocks, weight.bias)
    require(not blocks.is_stacked, _OP, "weight", "must be one, not {}", len(blocks.factors))
    from ..gpu.integer_linear import integer_linear

    rows = x.reshape(-1, weight.in_features).contiguous()
    return integer_linear(rows, blocks, weight.bias).view(*x.shape[:-1], weight.out_features)


def require_rows(op: str, x: torch.Tensor, weight: IntegerWeight) -> None:
    """Raise KernelArgumentError unless x [..., in_features] is where the weight is, in a dtype that is multiplied there."""
    there = isinstance(weight.blocks, DeviceIntegers)
    fits = x.shape[-1] == weight.in_features and x.dtype in (_THERE if there else _THERE[:1]) and x.is_cuda == there
    problem = "{} {} does not fit {} inputs of integers on {}"
    require(fits, op, "x", problem, x.dtype, x.shape, weight.in_features, "CUDA" if there else "a CPU, where it is float32")
