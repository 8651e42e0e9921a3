"""sample_rows: draw one token per row from filtered logits, by inverse CDF on one uniform number per row.

A row's result depends on that row alone. So filters keep by value, every tie at a threshold included; probability is
summed in token order and in float64 from left to right (cumsum), where adding a zero changes nothing; and a row that
takes the short way, through its top candidates, gets the same bits as on the long way.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from .checks import on_cuda, require

_OP: Final = "sample_rows"
_MOST_CANDIDATES: Final = 1024  # a larger top_k is no cheaper than sorting the row


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Parameters of R rows, each [R]: float64, top_k int64.

    Attributes:
        temperature: > 0.
        top_k: keep the k largest; 0: all.
        top_p: keep the fewest tokens that hold this share of the probability that top_k left; 1: all.
        min_p: keep tokens at least this likely relative to the likeliest; 0: all.
        typical_p: keep the fewest most typical tokens that hold this share (arXiv 2202.00666); 1: all.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor

    def take(self, rows: torch.Tensor) -> "SamplingTensors":
        """The parameters of these rows."""
        return SamplingTensors(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.typical_p[rows]
        )


def sample_rows(logits: torch.Tensor, params: SamplingTensors, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token id per row. Filters apply in the order top_k, top_p, min_p, typical_p, after temperature.

    Args:
        logits: float32 [R, V], finite or -inf, each row with a finite value.
        uniforms: float64 [R] in [0, 1).

    Returns:
        int64 [R].

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, logits)
    require(logits.dim() == 2 and logits.dtype is torch.float32, _OP, "logits", "must be float32 [R, V]")
    fits = uniforms.shape == params.top_k.shape == logits.shape[:1] and uniforms.dtype is torch.float64
    require(fits, _OP, "uniforms", "must be float64 {}, are {} {}", logits.shape[:1], uniforms.dtype, uniforms.shape)
    if cuda:
        from .gpu import sampling as gpu

        require(logits.stride(1) == 1, _OP, "logits", "must be contiguous in their last dimension")
        columns = (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p, uniforms)
        require(all(column.is_contiguous() for column in columns), _OP, "params", "and uniforms must be contiguous")
        return gpu.sample_rows(logits, *columns)
    vocab_size = logits.shape[1]
    top_k = torch.where(params.top_k > 0, params.top_k.clamp(max=vocab_size), vocab_size)
    short = top_k <= min(_MOST_CANDIDATES, vocab_size - 1)
    if bool(short.all()):
        tokens, tied = _sample_short(logits, top_k, params, uniforms)
        if not bool(tied.any()):
            return tokens
        long = torch.nonzero(tied).flatten()
    else:
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        rows = torch.nonzero(short).flatten()
        if rows.numel():
            tokens[rows], tied = _sample_short(logits[rows], top_k[rows], params.take(rows), uniforms[rows])
            short[rows] = ~tied
        long = torch.nonzero(~short).flatten()
    tokens[long] = _sample_long(logits[long], top_k[long], params.take(long), uniforms[long])
    return tokens


def _sample_short(
    logits: torch.Tensor, top_k: torch.Tensor, params: SamplingTensors, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the top candidates: token ids [R], and a mask [R] of the rows whose draw is not valid.

    A row with several tokens tied at the threshold is not valid, because topk returns an arbitrary one of them.
    """
    ranked, ids = logits.topk(int(top_k.max()) + 1)
    last = top_k[:, None] - 1
    threshold = ranked.gather(1, last)
    tied = (threshold == ranked.gather(1, last + 1)).flatten()
    ids, order = ids.sort(dim=1)
    picked = _draw(ranked.gather(1, order), ranked, threshold, params, uniforms)
    return ids.gather(1, picked[:, None]).flatten(), tied


def _sample_long(logits: torch.Tensor, top_k: torch.Tensor, params: SamplingTensors, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from the whole vocabulary, ranked only if a filter asks for ranks. numpy sorts many times faster than torch."""
    if bool((top_k < logits.shape[1]).any()) or bool((params.top_p < 1).any()):
        ranked = torch.from_numpy(-np.sort(-logits.numpy(), axis=1))
        threshold = ranked.gather(1, top_k[:, None] - 1)
    else:
        ranked, threshold = logits.amax(dim=1, keepdim=True), torch.full((1, 1), -torch.inf)
    return _draw(logits, ranked, threshold, params, uniforms)


def _draw(
    values: torch.Tensor, ranked: torch.Tensor, threshold: torch.Tensor, params: SamplingTensors, uniforms: torch.Tensor
) -> torch.Tensor:
    """Index [R] into values [R, C], which are in token order.

    Args:
        ranked: the values, or those that filters by rank need, from large to small.
        threshold: [R, 1], the smallest value that top_k keeps.
    """
    most, temperature = ranked[:, :1].double(), params.temperature[:, None]
    if bool((params.top_p < 1).any()):
        running = ((ranked.double() - most) / temperature).exp_().masked_fill_(ranked < threshold, 0).cumsum(1)
        num_below = (running < params.top_p[:, None] * running[:, -1:]).sum(1, keepdim=True)
        by_top_p = ranked.gather(1, num_below.clamp_(max=ranked.shape[1] - 1))
        threshold = torch.where(params.top_p[:, None] < 1, torch.maximum(threshold, by_top_p), threshold)
    scaled = (values.double() - most) / temperature
    # Compared as values, never as exponentials, which may differ in the last bit between two places of an array.
    dropped = values < threshold
    if bool((params.min_p > 0).any()):
        dropped |= scaled < params.min_p[:, None].log()
    weights = scaled.exp_().masked_fill_(dropped, 0)
    if bool((params.typical_p < 1).any()):
        weights = _typical_weights(weights, params.typical_p[:, None])
    return _inverse_cdf(weights, uniforms)


def _typical_weights(weights: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Zero the weights of tokens whose surprise is far from the expected surprise."""
    probs = weights / weights.cumsum(1)[:, -1:]
    surprise = -probs.log()  # inf where filtered
    entropy = (probs * surprise).nan_to_num(0).cumsum(1)[:, -1:]
    distance, order = (surprise - entropy).abs().sort(dim=1)
    before = torch.nn.functional.pad(probs.gather(1, order).cumsum(1)[:, :-1], (1, 0))
    num_kept = ((before < typical_p) | (typical_p >= 1)).sum(1, keepdim=True)
    threshold = distance.gather(1, (num_kept - 1).clamp(min=0))
    return weights.masked_fill((surprise - entropy).abs() > threshold, 0)


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index [R] of the first entry whose running sum exceeds its share of the total; never one of weight 0."""
    running = weights.cumsum(1)
    total = running[:, -1:].contiguous()
    picked = torch.searchsorted(running, uniforms[:, None] * total, right=True)
    # u * total can round up to the total: then the last entry that has weight.
    return torch.minimum(picked, torch.searchsorted(running, total)).flatten()
