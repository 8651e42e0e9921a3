"""Log probabilities of the model's own distribution: of a token, its rank, and the likeliest tokens beside it.

Taken from the logits as the model gave them, before penalties, temperature and filters, so that they compare across requests.
"""

from collections.abc import Sequence

import torch

from ..values.token_logprobs import TokenLogprobs


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One answer per row.

    Args:
        logits: float32 [R, V], finite or -inf.
        token_ids: [R], the token that stands at each position.
        num_top: [R], how many of the likeliest tokens to tell; at most V are.
    """
    if not len(token_ids):
        return []
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    of_token = logits.gather(1, tokens)
    ranks = (logits > of_token).sum(1) + 1
    totals = logits.logsumexp(1)
    most = min(max(num_top), logits.shape[1])
    top = logits.topk(most, dim=1)
    columns = zip(
        token_ids,
        (of_token[:, 0] - totals).tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        (top.values - totals[:, None]).tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
        for token_id, logprob, rank, ids, values, count in columns
    ]
