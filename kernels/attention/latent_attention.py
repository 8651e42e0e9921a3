"""Attention over latent vectors, as of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), absorbed.

A token has one latent vector and one rotated key, which all heads share; keys and values of a head are linear in the latent.
Absorbed, a query is brought into the latent's space instead: scores are those of one key of latent and rotated part, and what
the weights add up are latents, which are the key's first dimensions. So a layer of latents is a layer of K and V that lie in
the same memory: latent_layer gives it that shape, with a stride of zero from K to V. The CPU's paths are those of paged
attention on it. On CUDA a kernel of its own reads each latent once.

Prefill may go the other way: expanded_prefill makes keys and values of each head from the latents of a sequence. That costs a
product per token of the sequence, and saves the difference between a latent and a head's key for each pair of query and key.
"""

from collections.abc import Iterator

import torch

from ..checks import on_cuda, require
from .gathered import Gathered, attend_gathered
from .latent_widths import LatentWidths
from .paged_attention_decode import DecodePlan, paged_attention_decode, plan_decode
from .paged_attention_prefill import paged_attention_prefill
from .paged_rows import GatherPlan

_OP = "latent_attention"


def latent_layer(view: torch.Tensor) -> torch.Tensor:
    """[..., 2, block_size, 1, D] of a view [..., 1, block_size, 1, D] of latents: K and V in the same memory."""
    return view.expand(*view.shape[:-4], 2, *view.shape[-3:])


def latent_attention_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent: int,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Attend one absorbed query per sequence to its latents.

    Args:
        q: [S, num_heads, latent + rope], the cache's dtype.
        kv_layer: [num_blocks, 2, block_size, 1, latent + rope], of latent_layer.
        latent: numbers of a latent vector.
        block_tables, seq_lens, scale, plan: see paged_attention_decode.

    Returns:
        [S, num_heads, latent].

    Raises:
        KernelArgumentError: as paged_attention_decode; a layer that is none of latents.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    _require_latents(q, kv_layer, latent)
    if not on_cuda(_OP, q):
        return paged_attention_decode(q, kv_layer, block_tables, seq_lens, scale=scale, plan=plan)[..., :latent]
    from ..gpu.latent_attention import latent_decode

    require(block_tables.stride(1) == 1, _OP, "block_tables", "must be contiguous in their last dimension")
    if plan is None:
        plan = plan_decode(block_tables, seq_lens, kv_layer, q.dtype, None)
    return latent_decode(q, kv_layer, block_tables, seq_lens, scale, latent, plan.scratch, plan.work)


def latent_attention_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    latent: int,
    plan: GatherPlan | None = None,
) -> torch.Tensor:
    """Attend absorbed queries [T, num_heads, latent + rope] causally; arguments as in latent_attention_decode and
    paged_attention_prefill.

    Returns:
        [T, num_heads, latent].
    """
    _require_latents(q, kv_layer, latent)
    if not on_cuda(_OP, q):
        args = (q, kv_layer, block_tables, seq_lens, query_start_loc)
        return paged_attention_prefill(*args, scale=scale, plan=plan)[..., :latent]
    from ..gpu.latent_attention import latent_prefill

    require(block_tables.stride(1) == 1, _OP, "block_tables", "must be contiguous in their last dimension")
    return latent_prefill(q, kv_layer, block_tables, seq_lens, query_start_loc, scale, latent)


def expanded_prefill(
    q: torch.Tensor, kv_layer: torch.Tensor, up: torch.Tensor, widths: LatentWidths, *, scale: float, plan: GatherPlan
) -> torch.Tensor:
    """The same attention, with keys and values of each head made from the latents; on a CPU.

    Args:
        q: [T, num_heads, key + rope], a head's own part first.
        up: [num_heads, key + value, latent], what makes a head's key and value of a latent.
        plan: plan_prefill of the step, without a window.

    Returns:
        [T, num_heads, value].
    """
    return attend_gathered(q, _expanded(plan, kv_layer, up, widths), up.shape[0], scale=scale, value_size=widths.value)


def _expanded(plan: GatherPlan, kv_layer: torch.Tensor, up: torch.Tensor, widths: LatentWidths) -> Iterator[Gathered]:
    """Keys and values of each head, of each sequence's latents."""
    num_heads = up.shape[0]
    for each, keys, _ in plan.read(kv_layer):
        latents, shared = keys[:, 0, : widths.latent], keys[..., widths.latent :].expand(-1, num_heads, -1)
        made = torch.nn.functional.linear(latents, up.flatten(0, 1)).unflatten(1, (num_heads, -1))
        yield each, torch.cat((made[..., : widths.key], shared), 2), made[..., widths.key :]


def _require_latents(q: torch.Tensor, kv_layer: torch.Tensor, latent: int) -> None:
    fits = kv_layer.dim() == 5 and kv_layer.stride(1) == 0 and kv_layer.shape[3] == 1
    require(fits, _OP, "kv_layer", "must be of latent_layer, is {} by {}", kv_layer.shape, kv_layer.stride())
    fits = q.dim() == 3 and q.shape[2] == kv_layer.shape[4] > latent > 0
    require(fits, _OP, "q", "{} does not fit {} of latents of {}", q.shape, kv_layer.shape, latent)
