"""What fewer bits of K and V do to one attention by itself: the same queries, keys and values in, compared with what comes out.

In a whole model errors add up over the layers, and each later layer sees other inputs. Here every layer gets what the exact
model gave it. Where all is computed in a 16-bit type, queries, keys, values and the attention itself are of that type; else
only K and V are rounded, but for those that the tail has for a query. Plain torch, to be read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvkeeper.kernels.attention.gathered import dense_attention
from kvkeeper.kernels.quantised.formats import KvFormat, dequantise, quantise


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Of one layer and one text.

    Attributes:
        queries: float32 [n, num_heads, head_dim]; keys, values: [T, num_kv_heads, head_dim].
        positions: int64 [n], of the queries.
        tail_starts: int64 [n], the first token that the tail has for a query; T or more: none.
        scale, window, soft_cap, sink_logits: as in paged_attention_decode.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    tail_starts: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sink_logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AloneError:
    """Mean and greatest error of attention outputs, against the root mean square of the exact ones."""

    mean: float
    greatest: float


def error_alone(inputs: Sequence[AttentionInputs], kv_format: KvFormat | None, dtype: torch.dtype) -> AloneError:
    """Over all of these. kv_format: of K and V; None: as they are computed. dtype: that attention is computed in."""
    total, greatest, squares, count = 0.0, 0.0, 0.0, 0
    for each in inputs:
        exact = _attend(each, each.keys, each.values, torch.float32)
        if kv_format is None:
            ours = _attend(each, each.keys, each.values, dtype)
        else:
            rounded = [dequantise(*quantise(side, kv_format), kv_format, torch.float32) for side in (each.keys, each.values)]
            ours = _attend_beside_a_tail(each, *rounded)
        errors = (ours - exact).double().abs()
        total, greatest = total + float(errors.sum()), max(greatest, float(errors.max()))
        squares, count = squares + float(exact.double().square().sum()), count + exact.numel()
    unit = math.sqrt(squares / count)
    return AloneError(total / count / unit, greatest / unit)


def _attend(inputs: AttentionInputs, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[num_kv_heads, group, n, head_dim], float32."""
    mask = torch.zeros(_seen(inputs).shape, dtype=dtype).masked_fill_(~_seen(inputs), -torch.inf)
    queries = _grouped(inputs)
    k, v = (side.transpose(0, 1)[:, None].to(dtype).expand(-1, queries.shape[1], -1, -1) for side in (keys, values))
    out = dense_attention(
        queries.to(dtype),
        k,
        v,
        mask,
        is_causal=False,
        scale=inputs.scale,
        soft_cap=inputs.soft_cap,
        sink_logits=_logits(inputs),
    )
    return out.float()


def _attend_beside_a_tail(inputs: AttentionInputs, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The same in float32 with rounded keys and values, but for those that the tail has for a query."""
    in_tail = torch.arange(len(keys)) >= inputs.tail_starts[:, None]
    queries = _grouped(inputs)
    exact, rounded = (queries @ side.transpose(0, 1)[:, None].transpose(-2, -1) for side in (inputs.keys, keys))
    scores = torch.where(in_tail, exact, rounded) * inputs.scale
    if inputs.soft_cap is not None:
        scores = torch.tanh(scores / inputs.soft_cap) * inputs.soft_cap
    scores = scores.masked_fill(~_seen(inputs), -torch.inf)
    if (logits := _logits(inputs)) is not None:
        scores = torch.cat((scores, logits.expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    of_tail, of_stored = weights * in_tail, weights * ~in_tail
    return of_tail @ inputs.values.transpose(0, 1)[:, None] + of_stored @ values.transpose(0, 1)[:, None]


def _grouped(inputs: AttentionInputs) -> torch.Tensor:
    """Queries [num_kv_heads, group, n, head_dim]."""
    return inputs.queries.unflatten(1, (inputs.keys.shape[1], -1)).permute(1, 2, 0, 3)


def _logits(inputs: AttentionInputs) -> torch.Tensor | None:
    """[num_kv_heads, group, 1, 1]."""
    return None if inputs.sink_logits is None else inputs.sink_logits.view(inputs.keys.shape[1], -1, 1, 1)


def _seen(inputs: AttentionInputs) -> torch.Tensor:
    """bool [n, T]: the keys that each query sees."""
    behind = inputs.positions[:, None] - torch.arange(len(inputs.keys))
    return (behind >= 0) & (behind < (inputs.window or len(inputs.keys)))
