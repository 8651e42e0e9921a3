"""MXFP4: experts as 4-bit floats E2M1, 32 inputs to a scale that is a power of two, E8M0 (OCP Microscaling Formats 1.0).

Each byte holds two numbers, the first in its lower half. What they mean is exact in bfloat16.
"""

from collections.abc import Mapping

import torch

PARTS = frozenset(("blocks", "scales"))
_BYTES = 16  # of a block
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def weight_of(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """bfloat16 [E, in, out] of blocks [E, out, in / 32, 16] and scales [E, out, in / 32]. Raises ValueError."""
    blocks, scales = parts["blocks"], parts["scales"]
    if blocks.dtype is not torch.uint8 or blocks.ndim != 4 or blocks.shape[3] != _BYTES:
        raise ValueError(f"blocks are {blocks.dtype} {tuple(blocks.shape)}, must be uint8 [experts, out, groups, {_BYTES}]")
    if scales.dtype is not torch.uint8 or scales.shape != blocks.shape[:3]:
        raise ValueError(f"scales are {scales.dtype} {tuple(scales.shape)}, must be uint8 {tuple(blocks.shape[:3])}")
    if bool((scales == 255).any()):
        raise ValueError("a scale is not a number")
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=torch.bfloat16)
    powers = torch.tensor([2.0 ** (scale - 127) for scale in range(255)], dtype=torch.bfloat16)
    experts, num_out, groups, _ = blocks.shape
    weight = torch.empty(experts, num_out, groups, _BYTES, 2, dtype=torch.bfloat16)
    for expert in range(experts):  # indices of one at a time: they take eight times what the numbers do
        weight[expert, ..., 0] = values[(blocks[expert] & 15).int()]
        weight[expert, ..., 1] = values[(blocks[expert] >> 4).int()]
        weight[expert] *= powers[scales[expert].int()][..., None, None]
    return weight.flatten(2).transpose(1, 2)
