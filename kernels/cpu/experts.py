"""Experts, compiled: how rows choose them, and their products, all in one launch, without a look at who was chosen."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from .launch import Launcher
from .products import IntegerBlocks, RowBlocks, quantise_rows

_choose = Launcher("choose", "q" * 10 + "dd")
_multiply = Launcher("multiply_experts", "q" * 10)
_multiply_integers = {bits: Launcher(f"multiply_experts_int{bits}", "q" * 9) for bits in (8, 4)}
_mix = Launcher("mix", "q" * 6)


class ExpertTable(NamedTuple):
    """Where the weights of experts are. addresses: int64 [E, 2], of blocks (see RowBlocks) and biases; 0: there is none."""

    addresses: torch.Tensor
    width: int
    room: int
    num_out: int


class IntegerTable(NamedTuple):
    """The same of weights of `bits` bits. addresses: int64 [E, 3], of blocks, factors and biases; 0: there is none."""

    addresses: torch.Tensor
    bits: int
    num_out: int


def make_table(weights: Iterable[Any]) -> ExpertTable | IntegerTable | None:
    """The table of packed weights of one shape, which have to stay; None: the kernels do not multiply them."""
    rows: list[tuple[int, ...]] = []
    shapes = set[tuple[int, ...]]()
    for weight in weights:
        blocks = getattr(weight, "blocks", None)  # of 8-bit floats there are none
        bias_at = 0 if weight.bias is None else weight.bias.data_ptr()
        if isinstance(blocks, IntegerBlocks):
            rows.append((blocks.blocks.data_ptr(), blocks.factors.data_ptr(), bias_at))
            shapes.add((blocks.bits, len(blocks.factors)))
        elif isinstance(blocks, RowBlocks):
            rows.append((blocks.address, bias_at))
            shapes.add((*blocks[1:], weight.data.shape[0]))
        else:
            return None
    if len(shapes) != 1:
        return None
    (shape,), addresses = shapes, torch.tensor(rows)
    return IntegerTable(addresses, *shape) if len(shape) == 2 else ExpertTable(addresses, *shape)


def choose(
    logits: torch.Tensor,
    num_chosen: int,
    scale: float,
    least: float | None,
    *,
    is_sigmoid: bool,
    correction: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares and experts [T, num_chosen] of logits [T, E]; what else is given is of Routing and of ExpertWeights.

    least: None: shares are not renormalised.
    """
    chosen = torch.empty((len(logits), num_chosen), dtype=torch.int64)
    shares = torch.empty(chosen.shape, dtype=logits.dtype)
    given = (0 if each is None else each.data_ptr() for each in (logits, correction, scales, shares, chosen))
    shape, kinds = (*logits.shape, num_chosen), (is_sigmoid, least is not None)
    _choose(logits.dtype, 8 * logits.numel(), *given, *shape, *kinds, scale, least or 0.0)
    return shares, chosen


def multiply_experts(x: torch.Tensor, chosen: torch.Tensor, table: ExpertTable | IntegerTable) -> torch.Tensor:
    """[T K, O] of the experts chosen [T, K]: x [T, I], or [T K, I], a row for each of them, times each one's weight."""
    num_pairs, num_in, num_out = chosen.numel(), x.shape[1], table.num_out
    out = torch.empty((num_pairs, num_out), dtype=x.dtype)
    if not num_pairs:
        return out
    work, ends = num_pairs * num_in * num_out, (out.data_ptr(), num_out)
    pairs, table_at = (chosen.data_ptr(), num_pairs, num_pairs // len(x)), table.addresses.data_ptr()
    if isinstance(table, IntegerTable):
        rows, terms = quantise_rows(x)
        of_rows = rows.data_ptr(), terms.data_ptr()
        _multiply_integers[table.bits](x.dtype, work, *of_rows, *pairs, rows.shape[1], table_at, *ends)
    else:
        _multiply(x.dtype, work, x.data_ptr(), *pairs, num_in, table_at, table.width, table.room, *ends)
    return out


def mix(rows: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """[T, H]: rows [T K, H] added up, each times its share [T, K]."""
    out = torch.empty((len(shares), rows.shape[1]), dtype=rows.dtype)
    _mix(rows.dtype, rows.numel(), rows.data_ptr(), shares.data_ptr(), out.data_ptr(), *shares.shape, rows.shape[1])
    return out
