"""dense_attention: attention over gathered keys and values, the last part of the CPU paths of the paged ops."""

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
    q_sink: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., Q, D] of q [..., Q, D], k and v [..., T, D]; mask is added to the scores, broadcast to [..., Q, T].

    soft_cap: scores s become soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv 2408.00118); None: torch's fused attention.
    sinks: bool, broadcast to [..., Q, number of first keys]: True for keys that are scored with q_sink [..., Q, D] instead of q
        (see retention.py); None: none.
    sink_logits: broadcast to [..., Q, 1], the score of one more key, which has no value; None: there is none.
    """
    if soft_cap is None and sinks is None and sink_logits is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = q @ k.transpose(-2, -1)
    if sinks is not None:
        assert q_sink is not None, "sinks come with the query that scores them"
        part = slice(sinks.shape[-1])
        scores[..., part] = torch.where(sinks, q_sink @ k[..., part, :].transpose(-2, -1), scores[..., part])
    scores = scores.mul_(scale) if soft_cap is None else scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), -torch.inf)
    if mask is not None:
        scores = scores + mask
    if sink_logits is not None:
        scores = torch.cat((scores, sink_logits.expand(*scores.shape[:-1], 1).to(scores.dtype)), -1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights if sink_logits is None else weights[..., :-1]) @ v
