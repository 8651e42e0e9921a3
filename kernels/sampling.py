"""sample_rows: draw one token per row from filtered logits, by inverse CDF on one uniform number per row.

A row's result depends on that row alone. So filters keep by value, every tie at a threshold included; probability is
summed in token order and in float64 from left to right (cumsum), where adding a zero changes nothing; and a row that
takes the short way, through its top candidates, gets the bits that the long way would have given it.
"""

from dataclasses import dataclass
from typing import Final

import torch

from kernels.checks import require, require_cpu

_OP: Final = "sample_rows"
_MOST_CANDIDATES: Final = 1024  # a larger top_k is no cheaper than sorting the row


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Parameters of R rows, each [R]: float64, top_k int64.

    Attributes:
        temperature: > 0.
        top_k: keep the k largest; 0: all.
        top_p: keep the fewest tokens that hold this much of what top_k left; 1: all.
        min_p: keep tokens at least this likely relative to the likeliest; 0: all.
        typical_p: keep the fewest most typical tokens that hold this much (arXiv 2202.00666); 1: all.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor

    def take(self, rows: torch.Tensor) -> "SamplingTensors":
        """The parameters of some rows."""
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
        UnsupportedDeviceError: not on a CPU.
    """
    require_cpu(_OP, logits)
    require(logits.dim() == 2 and logits.dtype is torch.float32, _OP, "logits", "must be float32 [R, V]")
    fits = uniforms.shape == params.top_k.shape == logits.shape[:1] and uniforms.dtype is torch.float64
    require(fits, _OP, "uniforms", "must be float64 {}, are {} {}", logits.shape[:1], uniforms.dtype, uniforms.shape)
    vocab_size = logits.shape[1]
    top_k = torch.where(params.top_k > 0, params.top_k.clamp(max=vocab_size), vocab_size)
    short = top_k <= min(_MOST_CANDIDATES, vocab_size - 1)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    rows = torch.nonzero(short).flatten()
    if rows.numel():
        values, ids = logits[rows].topk(int(top_k[rows].max()) + 1)
        last = top_k[rows, None] - 1
        # Which of several tokens tied at the threshold topk returns is arbitrary; such rows take the long way.
        tied = (values.gather(1, last) == values.gather(1, last + 1)).flatten()
        beyond = torch.arange(values.shape[1]) > last
        weights = _filtered_weights(values.masked_fill(beyond, -torch.inf), params.take(rows))
        ids, order = ids.sort(dim=1)
        picked = _inverse_cdf(weights.gather(1, order), uniforms[rows])
        tokens[rows] = ids.gather(1, picked[:, None]).flatten()
        short[rows[tied]] = False
    rows = torch.nonzero(~short).flatten()
    if rows.numel():
        values, ids = logits[rows].sort(dim=1, descending=True)
        threshold = values.gather(1, top_k[rows, None] - 1)
        weights = _filtered_weights(values.masked_fill(values < threshold, -torch.inf), params.take(rows))
        tokens[rows] = _inverse_cdf(torch.zeros_like(weights).scatter_(1, ids, weights), uniforms[rows])
    return tokens


def _filtered_weights(values: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Weights [R, C] in float64, 1 for the likeliest and 0 where filtered, of values sorted from large to small."""
    wide = values.double()
    weights = torch.exp((wide - wide[:, :1]) / params.temperature[:, None])
    running = weights.cumsum(1)
    before = torch.nn.functional.pad(running[:, :-1], (1, 0))
    top_p = params.top_p[:, None]
    num_kept = ((before < top_p * running[:, -1:]) | (top_p >= 1)).sum(1, keepdim=True)
    threshold = weights.gather(1, (num_kept - 1).clamp(min=0))
    threshold = torch.maximum(threshold, params.min_p[:, None])
    weights = weights.masked_fill(weights < threshold, 0)
    if bool((params.typical_p < 1).any()):
        weights = _typical_weights(weights, params.typical_p[:, None])
    return weights


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
