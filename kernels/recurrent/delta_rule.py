"""delta_decode and delta_prefill: a short causal convolution, and the gated delta rule on states in pages (arXiv 2412.06464).

Queries, keys and values are convolved, each channel over its last inputs, and go through silu; queries and keys are put to
length 1. Then the rule: a token decays the matrix of each head, and corrects what it holds under its key. Mamba 2 (arXiv
2405.21060) has the same without corrections: its keys are what it calls B, its queries C and its values x, at the length that
they have, and what a token adds is weighed by its step. In Kimi Delta Attention (arXiv 2510.26692) each row of the matrix,
which is a dimension of the keys, decays by itself. States are read from pages and written to pages, so a row may be cut
anywhere: at block edges they are checkpoints. The order of the operations is that of transformers' Qwen3-Next and Nemotron-H.
Torch and Triton compute several tokens in chunks (the WY form), and one by the recurrence.
"""

from itertools import pairwise

import torch
from torch.nn import functional

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.delta import delta_rule as compiled_rule
from ..types import DeltaInputs, DeltaState, ScanRule, StateChunks, StateRows
from .pages import read_pages, require_pages, write_pages


def delta_decode(inputs: DeltaInputs, state: DeltaState, rows: StateRows, out: torch.Tensor) -> None:
    """Compute rows of one token, and their states in place.

    Args:
        inputs: of the step's T tokens.
        state: the pages, of which those that the rows name are read and written.
        rows: which tokens, and which pages.
        out: [T, Hv, Dv], contiguous, where the tokens' outputs go.

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    op = "delta_decode"
    cuda = on_cuda(op, inputs.mixed)
    _check(op, inputs, state, rows, out)
    if cuda:
        from ..gpu.delta_decode import delta_decode as on_device

        on_device(inputs, state, rows, out)
    elif compiled.serves(out):
        compiled_rule(inputs, state, rows, out)
    else:
        _decode(inputs, state, rows, out)


def delta_prefill(inputs: DeltaInputs, state: DeltaState, chunks: StateChunks, out: torch.Tensor) -> None:
    """The same of rows of several tokens, whose states are written where a chunk says so."""
    op = "delta_prefill"
    cuda = on_cuda(op, inputs.mixed)
    _check(op, inputs, state, chunks, out)
    if cuda:
        from ..gpu.delta_prefill import delta_prefill as on_device

        on_device(inputs, state, chunks, out)
    elif compiled.serves(out):
        compiled_rule(inputs, state, chunks, out)
    else:
        _prefill(inputs, state, chunks, out)


def _check(op: str, inputs: DeltaInputs, state: DeltaState, rows: StateRows | StateChunks, out: torch.Tensor) -> None:
    mixed, gates, conv, bias, log, scan, rule = inputs
    memory, window = state
    fits = memory.dim() == 4 and memory.dtype is torch.float32 and memory[0].is_contiguous()
    require(fits, op, "memory", "must be float32 [P, Hv, Dk, Dv], is {} {}", memory.dtype, memory.shape)
    num_heads, key_dim, value_dim = memory.shape[1:]
    channels, kernel = conv.shape
    num_keys, rest = divmod(channels - num_heads * value_dim, 2 * key_dim)
    fits = num_keys > 0 and not rest and not num_heads % num_keys and conv.is_contiguous() and conv.dtype is mixed.dtype
    require(fits, op, "conv", "{} {} does not fit {} heads of {} by {}", conv.dtype, conv.shape, *memory.shape[1:])
    fits = window.shape[1:] == (kernel - 1, channels) and window[0].is_contiguous() and window.dtype is mixed.dtype
    require(fits, op, "window", "must be {} [P, {}, {}], is {}", mixed.dtype, kernel - 1, channels, window.shape)
    num_tokens = len(mixed)
    fits = mixed.shape == (num_tokens, channels) and mixed.stride(1) == 1
    require(fits, op, "mixed", "must be rows of {}, is {}", channels, mixed.shape)
    num_gates, num_biases = 2 * num_heads if scan is None and rule is None else num_heads, num_heads
    fits = gates.shape == (num_tokens, num_gates) and gates.stride(1) == 1 and gates.dtype is mixed.dtype
    require(fits, op, "gates", "must be {} [{}, {}], is {}", mixed.dtype, num_tokens, num_gates, gates.shape)
    if rule is not None:
        own, num_biases = rule.gates, num_heads * key_dim
        fits = own.shape == (num_tokens, num_biases) and own.stride(1) == 1 and own.dtype is mixed.dtype
        fits = fits and scan is None and num_keys == num_heads
        require(fits, op, "channels", "must be {} [{}, {}], of as many keys as values", mixed.dtype, num_tokens, num_biases)
    fits = bias.shape == (num_biases,) and bias.dtype is torch.float32 and bias.is_contiguous()
    require(fits, op, "decay_bias", "must be float32 [{}], is {} {}", num_biases, bias.dtype, bias.shape)
    columns = {"decay_log": log}
    if scan is not None:
        own = scan.conv_bias
        fits = own.shape == (channels,) and own.dtype is mixed.dtype and own.is_contiguous()
        require(fits, op, "conv_bias", "must be {} [{}], is {} {}", mixed.dtype, channels, own.dtype, own.shape)
        columns["skip"] = scan.skip
    for name, column in columns.items():
        fits = column.shape == (num_heads,) and column.dtype is torch.float32 and column.is_contiguous()
        require(fits, op, name, "must be float32 [{}], is {} {}", num_heads, column.dtype, column.shape)
    fits = out.shape == (num_tokens, num_heads, value_dim) and out.is_contiguous() and out.dtype is mixed.dtype
    require(fits, op, "out", "must be {} [{}, {}, {}], is {}", mixed.dtype, num_tokens, num_heads, value_dim, out.shape)
    require_pages(op, rows)


def _decode(inputs: DeltaInputs, state: DeltaState, rows: StateRows, out: torch.Tensor) -> None:
    tokens = slice(None) if rows.tokens is None else rows.tokens
    memory, window = _read(state, rows.reads)
    window = torch.cat((window, inputs.mixed[tokens][:, None]), 1)
    made = torch.einsum("skc,ck->sc", window.float(), inputs.conv.float())
    if (scan := inputs.scan) is not None:
        made = made + scan.conv_bias.float()
    q, k, v = _heads(functional.silu(made.to(out.dtype)), memory, scan)
    decay, beta = _gates(inputs, tokens)
    memory = memory * decay.exp()[..., None]
    delta = v if scan is not None else v - (k[..., None, :] @ memory)[..., 0, :]
    memory = memory + k[..., None] * (delta * beta[..., None])[..., None, :]
    read = (q[..., None, :] @ memory)[..., 0, :]
    out[tokens] = (read if scan is None else read + v * scan.skip[:, None]).to(out.dtype)
    _write(state, rows.writes, DeltaState(memory, window[:, 1:]))


def _prefill(inputs: DeltaInputs, state: DeltaState, chunks: StateChunks, out: torch.Tensor) -> None:
    starts, firsts, lens = (column.tolist() for column in (chunks.starts, chunks.firsts, chunks.lens))
    for row, (first_chunk, end_chunk) in enumerate(pairwise(starts)):
        memory, window = (each[0] for each in _read(state, chunks.reads[row : row + 1]))
        for chunk in range(first_chunk, end_chunk):
            tokens = slice(firsts[chunk], firsts[chunk] + lens[chunk])
            window = torch.cat((window, inputs.mixed[tokens]))
            bias = None if inputs.scan is None else inputs.scan.conv_bias
            made = functional.conv1d(window.T[None], inputs.conv[:, None], bias, groups=len(inputs.conv))[0].T
            window = window[lens[chunk] :]
            of_tokens = *_heads(functional.silu(made), memory, inputs.scan), *_gates(inputs, tokens)
            q, k, v, decay, beta = (each.transpose(0, 1) for each in of_tokens)
            made, memory = _compute_chunk(q, k, v, decay, beta, memory, inputs.scan)
            out[tokens] = made.transpose(0, 1).to(out.dtype)
            _write(state, chunks.writes[chunk : chunk + 1], DeltaState(memory[None], window[None]))


def _read(state: DeltaState, pages: torch.Tensor) -> DeltaState:
    """The states [S, ...] in these pages."""
    return DeltaState(*(read_pages(tensor, pages) for tensor in state))


def _write(state: DeltaState, pages: torch.Tensor, made: DeltaState) -> None:
    """Put states [S, ...] into these pages."""
    for to, given in zip(state, made, strict=True):
        write_pages(to, pages, given)


def _heads(made: torch.Tensor, memory: torch.Tensor, scan: ScanRule | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys for each head of values, at length 1 but for a scan, and values, float32 [..., Hv, D], of convolved
    [..., C].
    """
    num_heads, key_dim, value_dim = memory.shape[-3:]
    keys = (made.shape[-1] - num_heads * value_dim) // 2
    q, k, v = made.float().split((keys, keys, num_heads * value_dim), -1)
    q, k, v = q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)), v.unflatten(-1, (-1, value_dim))
    if scan is None:
        q, k = _normed(q) * key_dim**-0.5, _normed(k)
    each = num_heads * key_dim // keys
    return q.repeat_interleave(each, -2), k.repeat_interleave(each, -2), v


def _normed(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)


def _gates(inputs: DeltaInputs, tokens: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay, in log space [T, Hv, 1 or Dk], and how much each token corrects, or adds [T, Hv]: float32."""
    rates = inputs.decay_log.exp()[:, None]
    if (scan := inputs.scan) is not None:
        steps = functional.softplus(inputs.gates[tokens].float() + inputs.decay_bias).clamp(scan.least, scan.most)
        return -rates * steps[..., None], steps
    correction, forgetting = inputs.gates[tokens].tensor_split((len(rates),), 1)
    if (channels := inputs.channels) is not None:
        forgetting = channels.gates[tokens]
    grown = (forgetting.float() + inputs.decay_bias).unflatten(1, (len(rates), -1))
    least = None if channels is None else channels.least
    decay = -rates * functional.softplus(grown) if least is None else least * (rates * grown).sigmoid()
    return decay, correction.sigmoid().float()


def _compute_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    memory: torch.Tensor,
    scan: ScanRule | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [Hv, T, Dv] and the memory behind a chunk of all heads: [Hv, T, D] each, decay [Hv, T, 1 or Dk], beta [Hv, T]."""
    new = v * beta[..., None]
    total = decay.cumsum(1)
    later = torch.ones((q.shape[1],) * 2, dtype=torch.bool, device=q.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], -torch.inf).exp()
    grown = total.exp()
    if scan is None:
        k_beta = k * beta[..., None]
        system = _multiply(k_beta, k, between)
        corrected = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
        read = torch.linalg.solve_triangular(system, k_beta * grown, upper=False, unitriangular=True)
        new = corrected - read @ memory
    made = (q * grown) @ memory + _multiply(q, k, between) @ new
    if scan is not None:
        made = made + v * scan.skip[:, None, None]
    left = (total[:, -1:] - total).exp()
    return made, memory * grown[:, -1, :, None] + (k * left).transpose(1, 2) @ new


def _multiply(a: torch.Tensor, b: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """Products [Hv, T, T] of rows [Hv, T, Dk], whose terms are weighed by between [Hv, T, T, 1 or Dk]."""
    if between.shape[3] == 1:
        return (a @ b.transpose(1, 2)) * between[..., 0]
    return torch.einsum("hid,hjd,hijd->hij", a, b, between)
