"""The gated delta rule and the norm behind it, compiled: what delta_kernels.py and row_kernels.py are given."""

import torch

from ..types import STATE_CHUNK, DeltaInputs, DeltaState, StateChunks, StateRows
from .launch import Launcher
from .state_columns import state_columns

_rule = Launcher("delta_rule", "q" * 27 + "dd")
_norm = Launcher("gated_norm", "q" * 10 + "d")


def delta_rule(inputs: DeltaInputs, state: DeltaState, rows: StateRows | StateChunks, out: torch.Tensor) -> None:
    """The compiled path of kernels.recurrent.delta_rule: of either op."""
    (memory, conv), scan, channels = state, inputs.scan, inputs.channels
    bounds = (0.0, 0.0) if scan is None else (scan.least, scan.most)
    if channels is not None and channels.least is not None:
        bounds = channels.least, 0.0
    _, num_heads, key_dim, value_dim = memory.shape
    num_keys = (inputs.mixed.shape[1] - num_heads * value_dim) // (2 * key_dim)
    num_tokens = len(rows.reads) if isinstance(rows, StateRows) else len(rows.writes) * STATE_CHUNK
    _rule(
        out.dtype,
        num_tokens * memory[0].numel(),
        inputs.mixed.data_ptr(),
        inputs.mixed.stride(0),
        inputs.gates.data_ptr(),
        inputs.gates.stride(0),
        inputs.conv.data_ptr(),
        inputs.decay_bias.data_ptr(),
        inputs.decay_log.data_ptr(),
        out.data_ptr(),
        memory.data_ptr(),
        memory.stride(0),
        conv.data_ptr(),
        conv.stride(0),
        *state_columns(rows),
        len(rows.reads),
        num_keys,
        num_heads // num_keys,
        key_dim,
        value_dim,
        inputs.conv.shape[1],
        *((0, 0) if scan is None else (scan.conv_bias.data_ptr(), scan.skip.data_ptr())),
        *((0, 0) if channels is None else (channels.gates.data_ptr(), channels.gates.stride(0))),
        *bounds,
    )


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, is_sigmoid: bool) -> torch.Tensor:
    """The compiled path of kernels.recurrent.gated_norm."""
    num_rows, num_heads, size = x.shape
    out = torch.empty((num_rows, num_heads * size), dtype=x.dtype)
    addresses = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr()
    _norm(x.dtype, 8 * x.numel(), *addresses, num_rows, num_heads, size, gate.stride(0), weight.dim() - 1, int(is_sigmoid), eps)
    return out
