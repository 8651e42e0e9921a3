"""Checks of part c for products with weights of few bits, beside those in bfloat16."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch.nn.functional import ScalingType, scaled_mm

from kvkeeper.engine_service.model.experts import Weight
from kvkeeper.engine_service.model.loading.packing import Numbers
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_float8 import Float8Weight, quantise_float8, quantise_rows
from kvkeeper.kernels.activations.linear_integers import quantise_linear
from kvkeeper.kernels.types import LinearWeight
from tests.gpu.checks import Check, guarded
from tests.gpu.stopwatch import Ceilings, Stopwatch


def checks(watch: Stopwatch, ceilings: Ceilings, is_dry: bool) -> Iterator[Check]:
    of_few: tuple[Numbers, ...] = (8, 4, "fp8")
    for numbers, rows in product(of_few, (2,) if is_dry else (1, 64, 4096)):
        yield guarded(f"products_{_label(numbers)}_{rows}", partial(_products, watch, ceilings, numbers, rows))


def _random(watch: Stopwatch, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=watch.device)


def _label(numbers: Numbers) -> str:
    return numbers if isinstance(numbers, str) else f"int{numbers}"


def _products(watch: Stopwatch, ceilings: Ceilings, numbers: Numbers, rows: int) -> Check:
    """A product with weights of few bits, and in bfloat16; several in turn, so that none stays in a cache."""
    shape = (4096, 14_336) if watch.device == "cuda" else (64, 128)
    dense = [LinearWeight(_random(watch, *shape)) for _ in range(5)]
    x, few, num_bytes = _random(watch, rows, shape[1]), list[Weight](dense), shape[0] * shape[1] * 2
    figures: dict[str, Any] = {}
    if numbers == "fp8":
        made_floats = [quantise_float8(each) for each in dense]
        few, num_bytes = [*made_floats], shape[0] * (shape[1] + 4)
        figures = _parts_of_float8(watch, x, made_floats)
    elif watch.device == "cuda":
        made = [quantise_linear(each, numbers) for each in dense]
        few, num_bytes = [*made], sum(each.nbytes for each in made[0].blocks[1:] if isinstance(each, torch.Tensor))

    def multiply(weights: Sequence[Weight]) -> float:
        turn = cycle(weights)
        return watch.in_graph(lambda: linear(x, next(turn)))

    seconds, in_16_bits = multiply(few), multiply(dense)
    figures |= {
        "graph_us": seconds * 1e6,
        "of_read_bandwidth": num_bytes / seconds / ceilings.read,
        "of_matmul_rate": 2 * rows * shape[0] * shape[1] / seconds / ceilings.matmul,
        "times_bfloat16": in_16_bits / seconds,
    }
    aim = "0.6 of reading" if rows < 4096 else "1.6 times bfloat16" if numbers == "fp8" else "as bfloat16"
    return Check(f"products_{_label(numbers)}_{rows}", None, figures, f"aim: {aim}")


def _parts_of_float8(watch: Stopwatch, x: torch.Tensor, weights: list[Float8Weight]) -> dict[str, Any]:
    """What rounding the rows takes, and torch's product alone, also with sums of fewer bits, which are not used."""
    (codes, scales), recipe, turn = quantise_rows(x), ScalingType.RowWise, cycle(weights)
    figures = {"rows_us": watch.in_graph(lambda: quantise_rows(x)) * 1e6}
    for name, is_fast in (("torch_us", False), ("torch_fast_sums_us", True)):

        def multiply(is_fast: bool = is_fast) -> torch.Tensor:
            weight = next(turn)
            return scaled_mm(codes, weight.codes.T, scales, recipe, weight.scales, recipe, use_fast_accum=is_fast)

        figures[name] = watch.in_graph(multiply) * 1e6
    return figures
