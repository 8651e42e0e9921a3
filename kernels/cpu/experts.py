"""Experts, compiled: how rows choose them, and their products, all in one launch, without a look at who was chosen."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..types import LinearWeight
from .launch import Launcher

_choose = Launcher("choose", "q" * 10 + "dd")
_multiply = Launcher("multiply_experts", "q" * 10)
_mix = Launcher("mix", "q" * 6)


class ExpertTable(NamedTuple):
    """Where the weights of experts are. addresses: int64 [E, 2], of blocks (see RowBlocks) and biases; 0: there is none."""

    addresses: torch.Tensor
    width: int
    room: int
    num_out: int


def make_table(weights: Iterable[object]) -> ExpertTable | None:
    """The table of packed weights of one shape, which have to stay; None: the kernels do not multiply them."""
    rows, shapes = [], set()
    for weight in weights:
        if not isinstance(weight, LinearWeight) or weight.blocks is None:
            return None
        rows.append((weight.blocks.address, 0 if weight.bias is None else weight.bias.data_ptr()))
        shapes.add((*weight.blocks[1:], weight.data.shape[0]))
    return ExpertTable(torch.tensor(rows), *shapes.pop()) if len(shapes) == 1 else None


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


def multiply_experts(x: torch.Tensor, chosen: torch.Tensor, table: ExpertTable) -> torch.Tensor:
    """[T K, O] of the experts chosen [T, K]: x [T, I], or [T K, I], a row for each of them, times each one's weight."""
    addresses, width, room, num_out = table
    num_pairs, num_in = chosen.numel(), x.shape[1]
    out = torch.empty((num_pairs, num_out), dtype=x.dtype)
    if num_pairs:
        pairs = x.data_ptr(), chosen.data_ptr(), num_pairs, num_pairs // len(x), num_in
        _multiply(x.dtype, num_pairs * num_in * num_out, *pairs, addresses.data_ptr(), width, room, out.data_ptr(), num_out)
    return out


def mix(rows: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """[T, H]: rows [T K, H] added up, each times its share [T, K]."""
    out = torch.empty((len(shares), rows.shape[1]), dtype=rows.dtype)
    _mix(rows.dtype, rows.numel(), rows.data_ptr(), shares.data_ptr(), out.data_ptr(), *shares.shape, rows.shape[1])
    return out
