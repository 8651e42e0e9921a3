"""rms_norm, the gates, rotary_store_kv and penalties, compiled: passes over rows."""

import numpy as np
import numpy.typing as npt
import torch

from .launch import Launcher

_norm = Launcher("rms_norm", "qqqqqqqqd")
_gate = Launcher("gate", "qqqqqqqqdd")
_add = Launcher("add", "q" * 5)
_weigh = Launcher("weigh_by_sigmoid", "q" * 7)
_square = Launcher("square_of_relu", "q" * 3)
_rotary_store = Launcher("rotary_store_kv", "q" * 14)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """The compiled path of kernels.activations.rms_norm. x: rows [..., D], contiguous, or [T, H, D] with a gap behind H."""
    out = torch.empty(x.shape, dtype=x.dtype)
    size, num_heads = x.shape[-1], weight.shape[0] if weight.dim() == 2 else 1
    num_rows = x.numel() // (num_heads * size) if x.numel() else 0
    stride = x.stride(-3) if weight.dim() == 2 and x.dim() > 2 else size
    residual_at = 0 if residual is None else residual.data_ptr()
    addresses = x.data_ptr(), residual_at, weight.data_ptr(), out.data_ptr()
    _norm(x.dtype, x.numel(), *addresses, num_rows, num_heads, size, stride, eps)
    return out


def gate(
    gate_up: torch.Tensor, up: torch.Tensor | None, *, gelu: bool, swiglu: tuple[float, float] | None = None
) -> torch.Tensor:
    """The compiled path of silu_and_mul (activations/gates.py), with `gelu` of gelu_and_mul, with `swiglu` of clamped_swiglu.

    swiglu: its alpha and limit.
    """
    width = gate_up.shape[-1]
    size = width // 2 if up is None else width
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    if out.numel():
        kind, gate_at = 2 if swiglu is not None else int(gelu), gate_up.data_ptr()
        ups = (gate_at + size * gate_up.itemsize, width) if up is None else (up.data_ptr(), up.stride(0))
        shape = out.numel() // size, size
        _gate(gate_up.dtype, 16 * out.numel(), gate_at, width, *ups, out.data_ptr(), *shape, kind, *(swiglu or (0.0, 0.0)))
    return out


def add(x: torch.Tensor, other: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The compiled path of kernels.activations.add, of tensors without gaps."""
    out = torch.empty(x.shape, dtype=x.dtype)
    scale_at = 0 if scale is None else scale.data_ptr()
    _add(x.dtype, 2 * x.numel(), x.data_ptr(), other.data_ptr(), scale_at, out.data_ptr(), x.numel())
    return out


def weigh_by_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The compiled path of weigh_by_sigmoid (activations/gates.py), of x without gaps."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _weigh(x.dtype, 8 * x.numel(), x.data_ptr(), gate.data_ptr(), out.data_ptr(), *x.shape, gate.shape[1], gate.stride(0))
    return out


def square_of_relu(x: torch.Tensor) -> torch.Tensor:
    """The compiled path of square_of_relu (activations/gates.py), of x without gaps."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _square(x.dtype, x.numel(), x.data_ptr(), out.data_ptr(), x.numel())
    return out


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The compiled path of kernels.activations.rotary: the one below, without keys and values. x: contiguous in its heads."""
    nothing = x.new_empty((1, 1, 1, 0, x.shape[2]))
    no_rows = torch.empty(len(x), dtype=torch.int64)
    return rotary_store_kv(x, nothing[0, 0], cos, sin, nothing, no_rows, no_rows)


def rotary_store_kv(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
) -> torch.Tensor:
    """The compiled path of kernels.rotary_store_kv; k_rows and v_rows are a StorePlan's, of all tokens."""
    num_tokens, num_rotated, size = qk.shape
    num_kv_heads = kv_layer.shape[3]
    q = torch.empty((num_tokens, num_rotated - num_kv_heads, size), dtype=qk.dtype)
    _rotary_store(
        qk.dtype,
        4 * qk.numel(),
        qk.data_ptr(),
        qk.stride(0),
        v.data_ptr(),
        v.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        q.data_ptr(),
        kv_layer.data_ptr(),
        k_rows.data_ptr(),
        v_rows.data_ptr(),
        num_tokens,
        num_rotated - num_kv_heads,
        num_kv_heads,
        size,
    )
    return q


_penalise = Launcher("penalise", "q" * 12)
_IN_ONE_THREAD = 0  # a history is short beside what waking threads takes

Int64s = npt.NDArray[np.int64]


def penalise(
    logits: torch.Tensor,
    where: Int64s,
    penalties: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int32],
    which: Int64s,
    num_known: Int64s,
    num_prompts: Int64s,
    awaited: Int64s,
) -> None:
    """Change logits, contiguous float32 [S, V], in place, as engine_service.compute.penalties says.

    where: [P] rows of the logits. penalties: [3, P], repetition, frequency, presence. tokens: [N, W], whose rows `which` [P]
    begin with num_known [P] tokens, num_prompts [P] of them the prompt's. awaited: [P], one token more, or negative.
    """
    columns = [np.ascontiguousarray(each) for each in (where, penalties, which, num_known, num_prompts, awaited)]
    counts = np.zeros(logits.shape[1], np.int32)
    where_at, penalties_at, which_at, known_at, prompts_at, awaited_at = (each.ctypes.data for each in columns)
    assert tokens.strides[1] == tokens.itemsize or tokens.shape[1] < 2, "a row lies together"
    _penalise(
        logits.dtype,
        _IN_ONE_THREAD,
        logits.data_ptr(),
        logits.shape[1],
        len(where),
        where_at,
        penalties_at,
        tokens.ctypes.data,
        tokens.strides[0] // tokens.itemsize,
        which_at,
        known_at,
        prompts_at,
        awaited_at,
        counts.ctypes.data,
    )
