"""Gated delta net: a layer that reads a state of fixed size instead of all tokens (Gated DeltaNet, arXiv 2412.06464).

Owns the arithmetic of one sequence's run of tokens: a short causal convolution over projected queries, keys and values, then
the gated delta rule, which decays a matrix for each head and corrects what it holds under each key. A state goes in, the
outputs and the next state come out, so a run may be cut anywhere: at block edges the state is a checkpoint. It follows
transformers' Qwen3-Next in the order of its operations. Several tokens are computed in chunks (the WY form), one by the
recurrence. Knows no cache.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

_CHUNK = 64  # tokens; of the WY form, as transformers has it


class DeltaState(NamedTuple):
    """What a layer knows of a sequence: float32 [Hv, Dk, Dv], and the convolution's last inputs [kernel - 1, conv_dim].

    Of several sequences [S, ...] each.
    """

    memory: torch.Tensor
    conv: torch.Tensor


def convolve(mixed: torch.Tensor, conv: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu of the causal convolution [T, C] of inputs mixed [T, C] behind conv [K - 1, C], and the last K - 1 of them.

    weight [C, K].
    """
    window = torch.cat((conv, mixed))
    made = functional.conv1d(window.T[None], weight[:, None], groups=weight.shape[0])[0].T
    return functional.silu(made), window[len(mixed) :]


def convolve_one(mixed: torch.Tensor, conv: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of one token of each of S sequences: mixed [S, C] behind conv [S, K - 1, C]. Sums are float32."""
    window = torch.cat((conv, mixed[:, None]), 1)
    made = torch.einsum("skc,ck->sc", window.float(), weight.float())
    return functional.silu(made.to(mixed.dtype)), window[:, 1:]


def delta_rule_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As delta_rule of one token of each of S sequences: q, k [S, Hk, Dk], v [S, Hv, Dv], memory [S, Hv, Dk, Dv]."""
    queries, keys = (_normed(each).repeat_interleave(v.shape[1] // k.shape[1], 1) for each in (q, k))
    made, memory = _one(queries * k.shape[-1] ** -0.5, keys, v.float(), decay, beta, memory)
    return made.to(v.dtype), memory


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, Hv, Dv] in the dtype of v, and the memory behind the last token.

    q, k [T, Hk, Dk], of which each head serves Hv / Hk value heads one behind the other; v [T, Hv, Dv]; decay (in log space)
    and beta float32 [T, Hv]; memory float32 [Hv, Dk, Dv].
    """
    each = v.shape[1] // k.shape[1]
    queries, keys = (_normed(heads).repeat_interleave(each, 1).transpose(0, 1) for heads in (q, k))
    queries = queries * k.shape[-1] ** -0.5
    values, decay, beta = v.float().transpose(0, 1), decay.T, beta.T
    if len(v) == 1:
        made, memory = _one(queries[:, 0], keys[:, 0], values[:, 0], decay[:, 0], beta[:, 0], memory)
        return made[None].to(v.dtype), memory
    outputs = []
    for start in range(0, len(v), _CHUNK):
        part = slice(start, start + _CHUNK)
        made, memory = _chunk(queries[:, part], keys[:, part], values[:, part], decay[:, part], beta[:, part], memory)
        outputs.append(made)
    return torch.cat(outputs, 1).transpose(0, 1).to(v.dtype), memory


def _normed(heads: torch.Tensor) -> torch.Tensor:
    """Float32, of length 1."""
    heads = heads.float()
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)


def _one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of all heads: [..., Hv, D] each, decay and beta [..., Hv]."""
    memory = memory * decay.exp()[..., None, None]
    held = (k[..., None, :] @ memory)[..., 0, :]
    memory = memory + k[..., None] * ((v - held) * beta[..., None])[..., None, :]
    return (q[..., None, :] @ memory)[..., 0, :], memory


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to a chunk of tokens of all heads: [Hv, T, D] each, decay and beta [Hv, T]."""
    k_beta, v_beta = k * beta[..., None], v * beta[..., None]
    total = decay.cumsum(1)
    later = torch.ones((q.shape[1],) * 2, dtype=torch.bool, device=q.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()
    system = (k_beta @ k.transpose(1, 2)) * between
    grown = total.exp()[..., None]
    corrected = torch.linalg.solve_triangular(system, v_beta, upper=False, unitriangular=True)
    read = torch.linalg.solve_triangular(system, k_beta * grown, upper=False, unitriangular=True)
    new = corrected - read @ memory
    made = (q * grown) @ memory + ((q @ k.transpose(1, 2)) * between) @ new
    left = (total[:, -1:] - total).exp()[..., None]
    return made, memory * grown[:, -1:] + (k * left).transpose(1, 2) @ new
