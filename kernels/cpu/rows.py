"""rms_norm, the gates, rotary_store_kv, products of one row and the scales of linear_int8, compiled: passes over rows."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .launch import Launcher

_norm = Launcher("rms_norm", "qqqqqqqqd")
_gate = Launcher("gate", "qqqqqdd")
_rotary_store = Launcher("rotary_store_kv", "q" * 14)
_multiply = Launcher("multiply_row", "q" * 8)
_multiply_int8 = Launcher("multiply_row_int8", "q" * 7 + "ddd")
_scale = Launcher("scale_rows", "qqqqqd")
_unscale = Launcher("unscale_rows", "qqqqq")


class RowBlocks(NamedTuple):
    """Where a weight is, float32 [ceil(O / width), room, width]; it has no more inputs than there is room for."""

    address: int
    width: int
    room: int


class Int8Rows(NamedTuple):
    """A weight of 8-bit integers, int8 [O, I], and what one step of a product with it is worth, float32 [O]."""

    integers: torch.Tensor
    factors: torch.Tensor


class Levels(NamedTuple):
    """How a row is quantised: to so many levels on either side of 0, of which `zero` is added before rounding.

    least: of the scale of a row.
    """

    levels: int
    zero: int
    least: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """The compiled path of kernels.activations.rms_norm. x: rows [..., D], contiguous, or [T, H, D] with a gap behind H."""
    out = torch.empty(x.shape)
    size, num_heads = x.shape[-1], weight.shape[0] if weight.dim() == 2 else 1
    num_rows = x.numel() // (num_heads * size) if x.numel() else 0
    stride = x.stride(0) if num_heads > 1 else size
    residual_at = 0 if residual is None else residual.data_ptr()
    _norm(x.numel(), x.data_ptr(), residual_at, weight.data_ptr(), out.data_ptr(), num_rows, num_heads, size, stride, eps)
    return out


def gate(gate_up: torch.Tensor, *, gelu: bool, swiglu: tuple[float, float] | None = None) -> torch.Tensor:
    """The compiled path of silu_and_mul (activations/gates.py), with `gelu` of gelu_and_mul, with `swiglu` of clamped_swiglu.

    swiglu: its alpha and limit.
    """
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size))
    if out.numel():
        kind = 2 if swiglu is not None else int(gelu)
        addresses = (gate_up.data_ptr(), out.data_ptr())
        _gate(8 * gate_up.numel(), *addresses, out.numel() // size, size, kind, *(swiglu or (0.0, 0.0)))
    return out


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
    q = torch.empty((num_tokens, num_rotated - num_kv_heads, size))
    _rotary_store(
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


def scale_rows(x: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, D] with each row divided by the greatest of its magnitudes or by `least`, and those [T]."""
    out, scales = torch.empty(x.shape), torch.empty(len(x))
    _scale(x.numel(), x.data_ptr(), out.data_ptr(), scales.data_ptr(), *x.shape, least)
    return out, scales


def unscale_rows(y: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [T, D] itself, each row times its scale [T], plus bias [D]."""
    bias_at = 0 if bias is None else bias.data_ptr()
    _unscale(y.numel(), y.data_ptr(), scales.data_ptr(), bias_at, *y.shape)
    return y


def multiply_row(x: torch.Tensor, blocks: RowBlocks, bias: torch.Tensor | None, num_out: int) -> torch.Tensor:
    """W x + bias, [..., num_out] of x [..., I] with one row."""
    out, num_in = torch.empty((*x.shape[:-1], num_out)), x.shape[-1]
    bias_at = 0 if bias is None else bias.data_ptr()
    _multiply(num_in * num_out, x.data_ptr(), *blocks, bias_at, out.data_ptr(), num_in, num_out)
    return out


def multiply_row_int8(x: torch.Tensor, weight: Int8Rows, bias: torch.Tensor | None, levels: Levels) -> torch.Tensor:
    """W x + bias, [..., O] of x [..., I] with one row, which is quantised."""
    num_out, num_in = weight.integers.shape
    out = torch.empty((*x.shape[:-1], num_out))
    bias_at = 0 if bias is None else bias.data_ptr()
    addresses = (x.data_ptr(), weight.integers.data_ptr(), weight.factors.data_ptr(), bias_at, out.data_ptr())
    _multiply_int8(num_in * num_out, *addresses, num_in, num_out, *levels)
    return out


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
