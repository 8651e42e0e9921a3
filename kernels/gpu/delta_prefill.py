"""delta_prefill on CUDA: the chunked form of the gated delta rule (the WY form, arXiv 2412.06464), and of Mamba 2's.

Three launches. The convolution of all chunks. What a chunk's tokens have to do with each other, of all chunks at once: the
tokens' corrections are a triangular system, whose inverse is made row by row, because a product of powers of a matrix loses all
digits where keys are alike. Then the rows' chunks one behind the other, each program on some columns of a head's matrix.
Where the dimensions of a head forget one by one, delta_channels.py makes that system.
"""

import torch
import triton
import triton.language as tl

from ..types import STATE_CHUNK, DeltaInputs, DeltaState, StateChunks
from .attention_tiles import COMPUTE_TYPES
from .delta_channels import find_system, load_keys
from .delta_decode import bound_step, find_decay, find_step, silu
from .sizes import cdiv, power_of_2

_CHANNELS = 32  # of a program of the convolution
_VALUES = 32  # columns of a program's part of a matrix
_LEAST = 16  # of a side of a product


@triton.jit
def convolve_chunk_kernel(
    mixed_ptr,
    window_ptr,
    start_ptr,
    row_ptr,
    first_ptr,
    len_ptr,
    write_ptr,
    weight_ptr,
    bias_ptr,
    conv_ptr,
    made_ptr,
    mixed_stride,
    page_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    """COLS channels of one chunk: made [T, CHANNELS], and the last inputs, which a page keeps.

    window [S, KERNEL - 1, CHANNELS]: the inputs before each row, copied from the pages, which this writes.
    """
    chunk = tl.program_id(0)
    channels, tokens = tl.program_id(1) * COLS + tl.arange(0, COLS), tl.arange(0, TOKENS)
    is_channel = channels < CHANNELS
    row, first, count = tl.load(row_ptr + chunk), tl.load(first_ptr + chunk), tl.load(len_ptr + chunk)
    begin, write = tl.load(first_ptr + tl.load(start_ptr + row)), tl.load(write_ptr + chunk)
    before = window_ptr + (row * (KERNEL - 1) + KERNEL - 1) * CHANNELS + channels
    live = (tokens < count)[:, None] & is_channel[None, :]
    total = tl.zeros((TOKENS, COLS), tl.float32)
    for tap in tl.static_range(KERNEL):
        places = first - begin + tokens - (KERNEL - 1) + tap  # in the row; negative before it
        is_new = (places >= 0)[:, None]
        new_ptrs = mixed_ptr + (begin + places)[:, None] * mixed_stride + channels[None, :]
        x = tl.load(new_ptrs, mask=live & is_new, other=0.0).to(tl.float32)
        old_ptrs = before[None, :] + places[:, None] * CHANNELS
        x += tl.load(old_ptrs, mask=live & (places < 0)[:, None], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channels * KERNEL + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    made_ptrs = made_ptr + (first + tokens)[:, None] * CHANNELS + channels[None, :]
    tl.store(made_ptrs, silu(total).to(made_ptr.dtype.element_ty), mask=live)
    if write > 0:
        for tap in tl.static_range(KERNEL - 1):
            place = first + count - begin - (KERNEL - 1) + tap
            last_ptrs = mixed_ptr + (begin + place) * mixed_stride + channels
            last = tl.load(last_ptrs, mask=is_channel & (place >= 0), other=0.0).to(tl.float32)
            last += tl.load(before + place * CHANNELS, mask=is_channel & (place < 0), other=0.0).to(tl.float32)
            kept_ptrs = conv_ptr + write * page_stride + tap * CHANNELS + channels
            tl.store(kept_ptrs, last.to(conv_ptr.dtype.element_ty), mask=is_channel)


@triton.jit
def find_between(total, TOKENS: tl.constexpr):
    """What is left of token j's part at token i, [i, j]: e^(total[i] - total[j]), 0 where j comes later."""
    tokens = tl.arange(0, TOKENS)
    is_before = tokens[:, None] >= tokens[None, :]
    return tl.where(is_before, tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def chunk_kernel(
    made_ptr,
    gate_ptr,
    first_ptr,
    len_ptr,
    bias_ptr,
    log_ptr,
    total_ptr,
    read_ptr,
    corrected_ptr,
    share_ptr,
    system_ptr,
    gate_stride,
    scale,
    least,
    most,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One chunk of one value head.

    total: float32 [T, NUM_HEADS], the logarithm of what is left of the chunk's first matrix. read [T, NUM_HEADS, KEY_DIM], by
    which each token reads that, and corrected [T, NUM_HEADS, VALUE_DIM], what it adds to what it so reads. share [T, NUM_HEADS,
    TOKENS]: how much of what each token of the chunk adds is in a token's output. Of a scan, whose steps have bounds, there is
    no read, and corrected is all that a token adds.

    system: of find_system, which has made share, too; total is [T, NUM_HEADS, KEY_DIM] then, and made.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, keys, values = tl.arange(0, TOKENS), tl.arange(0, K), tl.arange(0, V)
    first, count = tl.load(first_ptr + chunk), tl.load(len_ptr + chunk)
    live, own = tokens < count, first + tokens
    is_key, is_value = live[:, None] & (keys < KEY_DIM)[None, :], live[:, None] & (values < VALUE_DIM)[None, :]
    rows = made_ptr + own * (2 * NUM_KEYS * KEY_DIM + NUM_HEADS * VALUE_DIM)
    key_head = head // (NUM_HEADS // NUM_KEYS)
    k_ptrs, q_ptrs = rows + (NUM_KEYS + key_head) * KEY_DIM, rows + key_head * KEY_DIM
    k = load_keys(k_ptrs[:, None] + keys[None, :], is_key, read_ptr is not None)
    v = tl.load((rows + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM)[:, None] + values[None, :], mask=is_value, other=0.0)
    gates, places = gate_ptr + own * gate_stride + head, own * NUM_HEADS + head
    if system_ptr is not None:
        beta = tl.where(live, tl.sigmoid(tl.load(gates, mask=live, other=0.0).to(tl.float32)), 0.0)
        is_later = live[:, None] & (tokens[:, None] > tokens[None, :])
        system = tl.load((system_ptr + places * TOKENS)[:, None] + tokens[None, :], mask=is_later, other=0.0) * beta[:, None]
        total = tl.load((total_ptr + places * KEY_DIM)[:, None] + keys[None, :], mask=is_key, other=0.0)
        k = k * tl.exp(total)
    elif read_ptr is not None:
        beta = tl.where(live, tl.sigmoid(tl.load(gates, mask=live, other=0.0).to(tl.float32)), 0.0)
        gate = tl.load(gates + NUM_HEADS, mask=live, other=0.0)
        decay = find_decay(gate, tl.load(bias_ptr + head), tl.load(log_ptr + head), None)
    else:
        step = find_step(tl.load(gates, mask=live, other=0.0), tl.load(bias_ptr + head))
        beta = tl.where(live, bound_step(step, least, most), 0.0)
        decay = -tl.exp(tl.load(log_ptr + head)) * beta
    if system_ptr is None:
        total = tl.cumsum(tl.where(live, decay, 0.0), 0)
        if read_ptr is not None:
            alike = tl.dot(k.to(COMPUTE), tl.trans(k.to(COMPUTE)), input_precision="ieee")
        between = find_between(total, TOKENS)
        if read_ptr is not None:
            system = tl.where(tokens[:, None] > tokens[None, :], alike * between * beta[:, None], 0.0)
        q = load_keys(q_ptrs[:, None] + keys[None, :], is_key, read_ptr is not None) * scale
        shares = tl.dot(q.to(COMPUTE), tl.trans(k.to(COMPUTE)), input_precision="ieee") * between
        tl.store((share_ptr + places * TOKENS)[:, None] + tokens[None, :], shares.to(COMPUTE), mask=live[:, None])
        if read_ptr is not None:
            k = k * tl.exp(total)[:, None]
    if read_ptr is not None:
        inverse = tl.where(tokens[:, None] == tokens[None, :], 1.0, 0.0)
        for row in range(1, TOKENS):
            is_row = (tokens == row)[:, None]
            factors = tl.sum(tl.where(is_row, system, 0.0), 0)
            inverse = tl.where(is_row, inverse - tl.sum(factors[:, None] * inverse, 0)[None, :], inverse)
        inverse = (inverse * beta[None, :]).to(COMPUTE)
        corrected = tl.dot(inverse, v.to(COMPUTE), input_precision="ieee")
        read = tl.dot(inverse, k.to(COMPUTE), input_precision="ieee")
    else:
        corrected = v.to(tl.float32) * beta[:, None]
    if system_ptr is None:
        tl.store(total_ptr + places, total, mask=live)
    if read_ptr is not None:
        tl.store((read_ptr + places * KEY_DIM)[:, None] + keys[None, :], read.to(COMPUTE), mask=is_key)
    tl.store((corrected_ptr + places * VALUE_DIM)[:, None] + values[None, :], corrected.to(COMPUTE), mask=is_value)


@triton.jit
def chain_kernel(
    made_ptr,
    total_ptr,
    by_ptr,
    corrected_ptr,
    share_ptr,
    skip_ptr,
    page_ptr,
    start_ptr,
    first_ptr,
    len_ptr,
    write_ptr,
    memory_ptr,
    out_ptr,
    page_stride,
    scale,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
):
    """All chunks of one row, on V columns of one value head's matrix. by: what chunk_kernel calls read, where there is no
    skip, which a scan has. HAS_CHANNELS: total is of each dimension of a head.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    tokens, keys, values = tl.arange(0, TOKENS), tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
    page = tl.load(page_ptr + row)
    cells = memory_ptr + head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    is_cell = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    memory = tl.load(cells + page * page_stride, mask=is_cell & (page > 0), other=0.0)
    key_head = head // (NUM_HEADS // NUM_KEYS)
    for chunk in range(tl.load(start_ptr + row), tl.load(start_ptr + row + 1)):
        first, count, write = tl.load(first_ptr + chunk), tl.load(len_ptr + chunk), tl.load(write_ptr + chunk)
        live, own = tokens < count, first + tokens
        is_key, is_value = live[:, None] & (keys < KEY_DIM)[None, :], live[:, None] & (values < VALUE_DIM)[None, :]
        rows = made_ptr + own * (2 * NUM_KEYS * KEY_DIM + NUM_HEADS * VALUE_DIM) + key_head * KEY_DIM
        q = load_keys(rows[:, None] + keys[None, :], is_key, skip_ptr is None) * scale
        k = load_keys((rows + NUM_KEYS * KEY_DIM)[:, None] + keys[None, :], is_key, skip_ptr is None)
        places = own * NUM_HEADS + head
        end = (first + count - 1) * NUM_HEADS + head
        if HAS_CHANNELS:
            last = tl.load(total_ptr + end * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
            total = tl.load((total_ptr + places * KEY_DIM)[:, None] + keys[None, :], mask=is_key, other=0.0)
            grown, left, kept = tl.exp(total), tl.exp(last[None, :] - total), tl.exp(last)[:, None]
        else:
            last = tl.load(total_ptr + end)
            total = tl.load(total_ptr + places, mask=live, other=0.0)
            grown, left, kept = tl.exp(total)[:, None], tl.exp(last - total)[:, None], tl.exp(last)
        if skip_ptr is None:
            by = tl.load((by_ptr + places * KEY_DIM)[:, None] + keys[None, :], mask=is_key, other=0.0)
        corrected = tl.load((corrected_ptr + places * VALUE_DIM)[:, None] + values[None, :], mask=is_value, other=0.0)
        held = memory.to(COMPUTE)
        new = corrected
        if skip_ptr is None:
            new = (corrected.to(tl.float32) - tl.dot(by, held, input_precision="ieee")).to(COMPUTE)
        shares = tl.load((share_ptr + places * TOKENS)[:, None] + tokens[None, :], mask=live[:, None], other=0.0)
        out = tl.dot((q * grown).to(COMPUTE), held, input_precision="ieee")
        out = tl.dot(shares, new, out, input_precision="ieee")
        if skip_ptr is not None:
            v_ptrs = rows + (2 * NUM_KEYS - key_head) * KEY_DIM + head * VALUE_DIM
            v = tl.load(v_ptrs[:, None] + values[None, :], mask=is_value, other=0.0)
            out += v.to(tl.float32) * tl.load(skip_ptr + head)
        memory = tl.dot(tl.trans((k * left).to(COMPUTE)), new, memory * kept, input_precision="ieee")
        out_ptrs = (out_ptr + places * VALUE_DIM)[:, None] + values[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_value)
        tl.store(cells + write * page_stride, memory, mask=is_cell & (write > 0))


def delta_prefill(inputs: DeltaInputs, state: DeltaState, chunks: StateChunks, out: torch.Tensor) -> None:
    """The CUDA path of kernels.recurrent.delta_rule.delta_prefill, with its arguments."""
    num_tokens, num_heads, value_dim = out.shape
    num_chunks, (channels, kernel), key_dim = len(chunks.rows), inputs.conv.shape, state.memory.shape[2]
    scan, rule = inputs.scan, inputs.channels
    is_there = (chunks.reads > 0)[:, None, None]
    window = torch.where(is_there, state.conv.index_select(0, chunks.reads), 0.0)
    made = torch.empty((num_tokens, channels), dtype=out.dtype, device=out.device)
    convolve_chunk_kernel[(num_chunks, cdiv(channels, _CHANNELS))](
        inputs.mixed,
        window,
        chunks.starts,
        chunks.rows,
        chunks.firsts,
        chunks.lens,
        chunks.writes,
        inputs.conv,
        None if scan is None else scan.conv_bias,
        state.conv,
        made,
        inputs.mixed.stride(0),
        state.conv.stride(0),
        CHANNELS=channels,
        KERNEL=kernel,
        TOKENS=STATE_CHUNK,
        COLS=_CHANNELS,
        num_warps=4,
    )
    total_shape = num_tokens, num_heads, *(() if rule is None else (key_dim,))
    total = torch.empty(total_shape, dtype=torch.float32, device=out.device)
    read, corrected, shares = (
        torch.empty((num_tokens, num_heads, size), dtype=out.dtype, device=out.device)
        for size in (key_dim if scan is None else 0, value_dim, STATE_CHUNK)
    )
    by, scale = (read, key_dim**-0.5) if scan is None else (None, 1.0)
    sizes = {
        "NUM_KEYS": (channels - num_heads * value_dim) // (2 * key_dim),
        "NUM_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TOKENS": STATE_CHUNK,
        "K": max(power_of_2(key_dim), _LEAST),
        "COMPUTE": COMPUTE_TYPES[out.dtype],
    }
    system = None if rule is None else find_system(rule, inputs, chunks, made, total, shares, scale, sizes)
    whole = max(power_of_2(value_dim), _LEAST)
    chunk_kernel[(num_chunks, num_heads)](
        made,
        inputs.gates,
        chunks.firsts,
        chunks.lens,
        inputs.decay_bias,
        inputs.decay_log,
        total,
        by,
        corrected,
        shares,
        system,
        inputs.gates.stride(0),
        scale,
        None if scan is None else scan.least,
        None if scan is None else scan.most,
        V=whole,
        num_warps=8,
        **sizes,
    )
    tile = min(whole, _VALUES)
    chain_kernel[(len(chunks.reads), num_heads, cdiv(value_dim, tile))](
        made,
        total,
        by,
        corrected,
        shares,
        None if scan is None else scan.skip,
        chunks.reads,
        chunks.starts,
        chunks.firsts,
        chunks.lens,
        chunks.writes,
        state.memory,
        out,
        state.memory.stride(0),
        scale,
        V=tile,
        HAS_CHANNELS=rule is not None,
        num_warps=8,
        num_stages=2,
        **sizes,
    )
