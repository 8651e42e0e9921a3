"""Latent attention of a layer (MLA): what it projects, and how the step's queries meet the latents in the arena.

Follows DeepSeek-V2 (arXiv 2405.04434). A token leaves a normalised latent vector and a rotated key in the cache, and no V.
Queries are brought into the latents' space by the part of `up` that would make keys, outputs back by the part that would make
values. On a CPU a long prompt goes the other way, where that is less work (kernels.attention.latent_attention).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvkeeper.kernels.activations.gates import weigh_by_sigmoid
from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.activations.rotary import rotary
from kvkeeper.kernels.attention.latent_attention import (
    expanded_prefill,
    latent_attention_decode,
    latent_attention_prefill,
)
from kvkeeper.kernels.attention.latent_widths import LatentWidths
from kvkeeper.kernels.attention.paged_rows import GatherPlan
from kvkeeper.kernels.store_latent import store_latent
from kvkeeper.kernels.types import LinearWeight

from .attention import AttentionMetadata, DecodeRows, PrefillRows, join_parts, pick
from .experts import Weight

_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others: transformers' default


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """H hidden, N heads, R latent, P rope, K key, V value; Q the rank of queries.

    Attributes:
        down: [Q + R + P, H]: queries' latent, latent, rotated key; without a rank of queries [N (K + P) + R + P, H].
        query_norm: [Q]. query_up: [N (K + P), Q]: each head's own part, then the rotated one. None: queries have no rank.
        norm: [R], of latents.
        up: [N, K + V, R], what would make keys and values of a latent.
        gate: [N, H], the sigmoid of which weighs what each head attends to, in the weights' own dtype; None: nothing does.
    """

    down: Weight
    query_norm: torch.Tensor | None
    query_up: Weight | None
    norm: torch.Tensor
    up: torch.Tensor
    gate: LinearWeight | None = None

    def packed(self, pack: Callable[[Weight], Weight]) -> "LatentWeights":
        """up stays as it is: it multiplies head by head."""
        query_up = None if self.query_up is None else pack(self.query_up)
        gate = None if self.gate is None else pack_linear(self.gate)
        return replace(self, down=pack(self.down), query_up=query_up, gate=gate)


def latent_attention(
    x: torch.Tensor,
    weights: LatentWeights,
    widths: LatentWidths,
    scale: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Store the latents of x [T, H], and attend. Heads' outputs [T, N * V], before the output projection."""
    down = linear(x, weights.down)
    q, latent, k_rope = down.split((down.shape[1] - widths.latent - widths.rope, widths.latent, widths.rope), 1)
    if weights.query_up is not None:
        assert weights.query_norm is not None, "they come together"
        q = linear(rms_norm(q.contiguous(), weights.query_norm, _EPS)[0], weights.query_up)
    latent, _ = rms_norm(latent.contiguous(), weights.norm, _EPS)
    q = q.unflatten(1, (-1, widths.key + widths.rope))
    turned = rotary(torch.cat((q[..., widths.key :], k_rope[:, None]), 1), *rotation)
    store_latent(latent, turned[:, -1], kv_layer, metadata.slot_mapping, metadata.store)
    q, q_rope = q[..., : widths.key], turned[:, :-1]
    parts = []
    if (rows := metadata.decode) is not None:
        own = pick(q, rows.token_rows), pick(q_rope, rows.token_rows)
        parts.append((rows.token_rows, _decode(*own, weights, widths, scale, kv_layer, rows)))
    if (several := metadata.prefill) is not None:
        own = pick(q, several.token_rows), pick(q_rope, several.token_rows)
        parts.append((several.token_rows, _prefill(*own, weights, widths, scale, kv_layer, several)))
    out = join_parts(len(x), parts)
    if weights.gate is None:
        return out.flatten(1)
    return weigh_by_sigmoid(out.reshape(-1, widths.value), linear(x, weights.gate).view(-1, 1)).view(len(x), -1)


def _decode(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    weights: LatentWeights,
    widths: LatentWidths,
    scale: float,
    kv_layer: torch.Tensor,
    rows: DecodeRows,
) -> torch.Tensor:
    found = latent_attention_decode(
        _absorbed(q, q_rope, weights, widths),
        kv_layer,
        rows.block_tables,
        rows.seq_lens,
        scale=scale,
        latent=widths.latent,
        plan=rows.plans[None],
    )
    return _weigh_values(found, weights, widths)


def _prefill(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    weights: LatentWeights,
    widths: LatentWidths,
    scale: float,
    kv_layer: torch.Tensor,
    rows: PrefillRows,
) -> torch.Tensor:
    plan = rows.plans[None]
    assert isinstance(plan, GatherPlan), "latents are gathered"
    sizes = [(each.last - each.first, len(each.positions)) for each in plan.sequences]  # none on CUDA
    if sizes and widths.prefers_expanded(sizes):
        return expanded_prefill(torch.cat((q, q_rope), 2), kv_layer, weights.up, widths, scale=scale, plan=plan)
    found = latent_attention_prefill(
        _absorbed(q, q_rope, weights, widths),
        kv_layer,
        rows.block_tables,
        rows.seq_lens,
        rows.query_start_loc,
        scale=scale,
        latent=widths.latent,
        plan=plan,
    )
    return _weigh_values(found, weights, widths)


def _absorbed(q: torch.Tensor, q_rope: torch.Tensor, weights: LatentWeights, widths: LatentWidths) -> torch.Tensor:
    """[T, N, R + P] of q [T, N, K]: the query that scores latents as q scores the keys made of them."""
    return torch.cat((torch.bmm(q.transpose(0, 1), weights.up[:, : widths.key]).transpose(0, 1), q_rope), 2)


def _weigh_values(found: torch.Tensor, weights: LatentWeights, widths: LatentWidths) -> torch.Tensor:
    """[T, N, V] of weighed latents [T, N, R]."""
    return torch.bmm(found.transpose(0, 1), weights.up[:, widths.key :].transpose(1, 2)).transpose(0, 1)
