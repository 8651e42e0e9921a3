"""The gated short convolution, compiled: what conv_kernels.py is given."""

import torch

from ..types import ConvInputs, StateChunks, StateRows
from .launch import Launcher
from .state_columns import state_columns

_conv = Launcher("short_conv", "q" * 14)


def short_conv(inputs: ConvInputs, window: torch.Tensor, rows: StateRows | StateChunks, out: torch.Tensor) -> None:
    """The compiled path of kernels.recurrent.short_conv."""
    columns = state_columns(rows)
    bias = 0 if inputs.bias is None else inputs.bias.data_ptr()
    addresses = inputs.mixed.data_ptr(), inputs.conv.data_ptr(), bias, out.data_ptr(), window.data_ptr()
    _conv(out.dtype, 4 * out.numel(), *addresses, window.stride(0), *columns, len(rows.reads), *inputs.conv.shape)
