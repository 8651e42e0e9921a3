"""Logits as the rules of requests change them, on the host's logits or on a device's, which is not waited for.

All rows at once, by cell. A device gets the cells in a few copies, and decides itself about those that a token decides which
the host has not read.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..values.sampling_params import NOTHING_AWAITED, SamplingRow
from ..values.token_rules import ANY_TOKEN
from .device.token_counts import LastTokens
from .device.upload import at_device


def apply_rules(logits: torch.Tensor, rows: Sequence[SamplingRow], last: LastTokens | None = None) -> torch.Tensor:
    """Changed logits, float32 [S, V], with -inf for what must not be drawn: a copy if any row has rules.

    last: has the tokens that rows await, where the logits are; None: none does.
    """
    ruled = [(at, row, row.rules) for at, row in enumerate(rows) if row.rules is not None]
    if not ruled:
        return logits
    logits, vocab_size = logits.clone(memory_format=torch.contiguous_format), logits.shape[1]
    flat = logits.view(-1)
    if limited := [(at, rules.allowed) for at, _, rules in ruled if rules.allowed is not None]:
        kept = at_device(np.concatenate([at * vocab_size + allowed.astype(np.int64) for at, allowed in limited]), logits)
        values = flat[kept]
        logits.index_fill_(0, at_device(np.array([at for at, _ in limited]), logits), -torch.inf)
        flat.index_put_((kept,), values)
    changes = [rules.changes(row.output, is_awaited=row.awaited_row is not None) for _, row, rules in ruled]
    counts = [len(each.token_ids) for each in changes]
    cells = np.concatenate([each.token_ids for each in changes]) + np.repeat([at * vocab_size for at, _, _ in ruled], counts)
    amounts = at_device(np.concatenate([each.amounts for each in changes]), logits)
    needed = np.concatenate([each.needed for each in changes])
    places = at_device(cells, logits)
    if last is not None and (needed != ANY_TOKEN).any():
        awaited = np.repeat([NOTHING_AWAITED if row.awaited_row is None else row.awaited_row for _, row, _ in ruled], counts)
        wanted, whose = at_device(np.stack((needed, np.where(needed == ANY_TOKEN, NOTHING_AWAITED, awaited))), logits)
        amounts = torch.where(last.filled_there(wanted, whose) == wanted, amounts, 0.0)
    flat.index_add_(0, places, amounts)
    return logits
