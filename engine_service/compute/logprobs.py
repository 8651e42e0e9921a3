"""Log probabilities of the model's own distribution: of a token, its rank, and the likeliest beside it; and of a beam search.

Taken from the logits as the model gave them, before penalties, temperature and filters, so that they compare across requests.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..values.output_chunk import TokenLogprobs
from ..values.sampling_params import Candidates, SearchRow
from .penalties import apply_penalties
from .token_changes import apply_rules


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """R rows: the token, its log probability and rank [R]; ids and log probabilities of the likeliest tokens [R, top]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def fetched(self, fetch: Callable[[torch.Tensor], torch.Tensor]) -> "LogprobTensors":
        """The same, each tensor as fetch returns it."""
        return LogprobTensors(*map(fetch, (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)))

    def to_list(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One entry per row, with so many of the likeliest tokens; the tensors are on the host."""
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
            for token_id, logprob, rank, ids, values, count in zip(*(each.tolist() for each in columns), num_top, strict=True)
        ]


@torch.inference_mode()
def find_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Where the logits are; the host does not wait.

    Args:
        logits: float32 [R, V], finite or -inf.
        token_ids: int64 [R], the token that stands at each position.
        num_top: how many of the likeliest tokens to find; at most V are.
    """
    of_token = logits.gather(1, token_ids[:, None])
    totals = logits.logsumexp(1)
    top = logits.topk(min(num_top, logits.shape[1]), dim=1)
    ranks = (logits > of_token).sum(1) + 1
    return LogprobTensors(token_ids, of_token[:, 0] - totals, ranks, top.indices, top.values - totals[:, None])


@torch.inference_mode()
def find_candidates(logits: torch.Tensor, rows: Sequence[SearchRow]) -> list[Candidates | None]:
    """From a step's logits to the likeliest next tokens of each list of a beam search. The host waits for them.

    One entry per row; None where the logits are not finite. Rules and penalties are applied to the log probabilities, as
    Hugging Face transformers does in beam search, and not to the logits as where a token is drawn; temperature and filters have
    no part.

    Args:
        logits: float32 [R, V], not changed. -inf is a token that never comes.
        rows: R of them. At most V candidates are found, and none of what rules forbid.
    """
    assert logits.shape[0] == len(rows), "one row per row of logits"
    finite = torch.isfinite(logits.amax(dim=1)).tolist()
    own_rows = [each.row for each in rows]
    logprobs = apply_penalties(apply_rules(logits.log_softmax(dim=1), own_rows), own_rows)
    top = logprobs.topk(min(max(each.num_candidates for each in rows), logits.shape[1]), dim=1)
    columns = zip(finite, rows, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        _possible(token_ids[: each.num_candidates], values[: each.num_candidates]) if is_finite else None
        for is_finite, each, token_ids, values in columns
    ]


def _possible(token_ids: list[int], logprobs: list[float]) -> Candidates:
    """Those that may come; the likeliest come first."""
    count = len(logprobs) - logprobs.count(-math.inf)
    return Candidates(token_ids[:count], logprobs[:count])
