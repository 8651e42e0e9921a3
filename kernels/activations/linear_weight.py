"""LinearWeight: a weight of a projection, dense or packed."""

from dataclasses import dataclass

import torch

from ..cpu.rows import RowBlocks


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight [out_features, in_features] as linear takes it.

    Attributes:
        bias: [out_features] or None.
        packed: whether `data` is in oneDNN's layout, and opaque.
        blocks: how packed data lies in memory, where that is known.
    """

    data: torch.Tensor
    bias: torch.Tensor | None = None
    packed: bool = False
    blocks: RowBlocks | None = None
