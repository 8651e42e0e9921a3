"""delta_decode on CUDA: one launch for the convolution of all rows, and one for the rule, a tile of a head's matrix a program.

What a program reads of a state it alone writes, so a page may be read and written in one step. Each number of a page is loaded
and stored by one thread.
"""

import torch
import triton
import triton.language as tl

from ..types import DeltaInputs, DeltaState, StateRows
from .sizes import cdiv, power_of_2

_CHANNELS = 256  # of a program of the convolution
_VALUES = 32  # columns of a program's tile


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def find_step(gate, bias):
    """The softplus of both."""
    x = gate.to(tl.float32) + bias
    grown = tl.exp(tl.minimum(x, 20.0))
    near_zero = grown - grown * grown * 0.5 + grown * grown * grown * 0.3333333
    return tl.where(x > 20.0, x, tl.where(grown < 0.01, near_zero, tl.log(1.0 + grown)))


@triton.jit
def find_decay(gate, bias, log, least):
    """The logarithm of what a head's matrix keeps, or each of its rows; bounded, where there is a least."""
    if least is None:
        decay = -tl.exp(log) * find_step(gate, bias)
    else:
        decay = least * tl.sigmoid(tl.exp(log) * (gate.to(tl.float32) + bias))
    return decay


@triton.jit
def bound_step(step, least, most):
    """In this form, so that what is not a number stays so."""
    step = tl.where(step < least, least, step)
    return tl.where(step > most, most, step)


@triton.jit
def convolve_row_kernel(
    mixed_ptr,
    token_ptr,
    read_ptr,
    write_ptr,
    weight_ptr,
    bias_ptr,
    conv_ptr,
    made_ptr,
    mixed_stride,
    page_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    COLS: tl.constexpr,
):
    """COLS channels of one row: made [S, CHANNELS], and the inputs that the page keeps, moved on by one."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = channels < CHANNELS
    token = row if token_ptr is None else tl.load(token_ptr + row)
    read, write = tl.load(read_ptr + row), tl.load(write_ptr + row)
    pages = conv_ptr + channels
    last = tl.load(mixed_ptr + token * mixed_stride + channels, mask=live, other=0.0)
    weight_ptrs = weight_ptr + channels * KERNEL
    total = last.to(tl.float32) * tl.load(weight_ptrs + KERNEL - 1, mask=live, other=0.0).to(tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        x = tl.load(pages + read * page_stride + tap * CHANNELS, mask=live & (read > 0), other=0.0)
        total += x.to(tl.float32) * tl.load(weight_ptrs + tap, mask=live, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(pages + write * page_stride + (tap - 1) * CHANNELS, x, mask=live & (write > 0))
    tl.store(pages + write * page_stride + (KERNEL - 2) * CHANNELS, last, mask=live & (write > 0))
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=live, other=0.0).to(tl.float32)
    tl.store(made_ptr + row * CHANNELS + channels, silu(total).to(made_ptr.dtype.element_ty), mask=live)


@triton.jit
def load_unit(ptrs, live):
    """A head at length 1."""
    x = tl.load(ptrs, mask=live, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def delta_decode_kernel(
    made_ptr,
    gate_ptr,
    token_ptr,
    read_ptr,
    write_ptr,
    bias_ptr,
    log_ptr,
    skip_ptr,
    channel_ptr,
    memory_ptr,
    out_ptr,
    gate_stride,
    channel_stride,
    page_stride,
    scale,
    least,
    most,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """V columns of one value head's matrix, of one row. least, most, skip: of a scan; None: of a gated delta net.

    channel: where the dimensions of a head forget one by one; least is of these then, or None.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, values = tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    token = row if token_ptr is None else tl.load(token_ptr + row)
    read, write = tl.load(read_ptr + row), tl.load(write_ptr + row)
    at = made_ptr + row * (2 * NUM_KEYS * KEY_DIM + NUM_HEADS * VALUE_DIM)
    key_head = head // (NUM_HEADS // NUM_KEYS)
    q_ptrs, k_ptrs = at + key_head * KEY_DIM + keys, at + (NUM_KEYS + key_head) * KEY_DIM + keys
    if skip_ptr is None:
        q, k = load_unit(q_ptrs, is_key) * scale, load_unit(k_ptrs, is_key)
    else:
        q = tl.load(q_ptrs, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM + values, mask=is_value, other=0.0).to(tl.float32)
    gate_ptrs = gate_ptr + token * gate_stride + head
    if channel_ptr is not None:
        beta = tl.sigmoid(tl.load(gate_ptrs).to(tl.float32))
        gate = tl.load(channel_ptr + token * channel_stride + head * KEY_DIM + keys, mask=is_key, other=0.0)
        bias = tl.load(bias_ptr + head * KEY_DIM + keys, mask=is_key, other=0.0)
        decay = tl.exp(find_decay(gate, bias, tl.load(log_ptr + head), least))[:, None]
    elif skip_ptr is None:
        beta = tl.sigmoid(tl.load(gate_ptrs).to(tl.float32))
        gate = tl.load(gate_ptrs + NUM_HEADS)
        decay = tl.exp(find_decay(gate, tl.load(bias_ptr + head), tl.load(log_ptr + head), None))
    else:
        beta = bound_step(find_step(tl.load(gate_ptrs), tl.load(bias_ptr + head)), least, most)
        decay = tl.exp(-tl.exp(tl.load(log_ptr + head)) * beta)
    cells = memory_ptr + head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    is_cell = is_key[:, None] & is_value[None, :]
    memory = tl.load(cells + read * page_stride, mask=is_cell & (read > 0), other=0.0) * decay
    if skip_ptr is None:
        delta = (v - tl.sum(memory * k[:, None], 0)) * beta
    else:
        delta = v * beta
    memory += k[:, None] * delta[None, :]
    out = tl.sum(memory * q[:, None], 0)
    if skip_ptr is not None:
        out += v * tl.load(skip_ptr + head)
    tl.store(cells + write * page_stride, memory, mask=is_cell & (write > 0))
    out_ptrs = out_ptr + (token * NUM_HEADS + head) * VALUE_DIM + values
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_value)


def delta_decode(inputs: DeltaInputs, state: DeltaState, rows: StateRows, out: torch.Tensor) -> None:
    """The CUDA path of kernels.recurrent.delta_rule.delta_decode, with its arguments."""
    num_rows, (channels, kernel), scan, rule = len(rows.reads), inputs.conv.shape, inputs.scan, inputs.channels
    _, num_heads, key_dim, value_dim = state.memory.shape
    made = torch.empty((num_rows, channels), dtype=out.dtype, device=out.device)
    convolve_row_kernel[(num_rows, cdiv(channels, _CHANNELS))](
        inputs.mixed,
        rows.tokens,
        rows.reads,
        rows.writes,
        inputs.conv,
        None if scan is None else scan.conv_bias,
        state.conv,
        made,
        inputs.mixed.stride(0),
        state.conv.stride(0),
        CHANNELS=channels,
        KERNEL=kernel,
        COLS=_CHANNELS,
        num_warps=2,
    )
    tile = min(power_of_2(value_dim), _VALUES)
    delta_decode_kernel[(num_rows, num_heads, cdiv(value_dim, tile))](
        made,
        inputs.gates,
        rows.tokens,
        rows.reads,
        rows.writes,
        inputs.decay_bias,
        inputs.decay_log,
        None if scan is None else scan.skip,
        None if rule is None else rule.gates,
        state.memory,
        out,
        inputs.gates.stride(0),
        None if rule is None else rule.gates.stride(0),
        state.memory.stride(0),
        key_dim**-0.5,
        scan.least if scan is not None else None if rule is None else rule.least,
        None if scan is None else scan.most,
        NUM_KEYS=(channels - num_heads * value_dim) // (2 * key_dim),
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        K=power_of_2(key_dim),
        V=tile,
        num_warps=4,
    )
