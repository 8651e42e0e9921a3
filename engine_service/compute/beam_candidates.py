"""Candidates of a beam search: from a step's logits to each list's likeliest next tokens.

Penalties are applied to the log probabilities, as Hugging Face transformers does in beam search, and not to the logits as
where a token is drawn; temperature and filters have no part in it.
"""

from collections.abc import Sequence

import torch

from ..values.sampling_params import Candidates, SearchRow
from .penalties import apply_penalties


@torch.inference_mode()
def find_candidates(logits: torch.Tensor, rows: Sequence[SearchRow]) -> list[Candidates | None]:
    """One entry per row; None where the logits are not finite. The host waits for them.

    Args:
        logits: float32 [R, V], not changed. -inf is a token that never comes.
        rows: R of them. At most V candidates are found.
    """
    assert logits.shape[0] == len(rows), "one row per row of logits"
    finite = torch.isfinite(logits.amax(dim=1)).tolist()
    logprobs = apply_penalties(logits.log_softmax(dim=1), [each.row for each in rows])
    top = logprobs.topk(min(max(each.num_candidates for each in rows), logits.shape[1]), dim=1)
    columns = zip(finite, rows, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        Candidates(token_ids[: each.num_candidates], values[: each.num_candidates]) if is_finite else None
        for is_finite, each, token_ids, values in columns
    ]
