"""dense_attention: attention over keys and values that were gathered, what the CPU paths of the paged ops end in."""

import torch


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """[..., Q, D] of q [..., Q, D], k and v [..., T, D]; mask is added to the scores, broadcast to [..., Q, T].

    soft_cap: scores s become soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv 2408.00118); None: torch's fused attention.
    """
    if soft_cap is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = (q @ k.transpose(-2, -1)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), -torch.inf)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
