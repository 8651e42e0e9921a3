"""Penalties on tokens that a row has seen already, on the host's logits or on a device's, to the same bits.

A device gets the histories in one copy, and counts them itself. A cell that several places of a history name is written by
each of them with one value, so their order does not matter.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..values.sampling_params import SamplingParams, SamplingRow
from .device.last_tokens import LastTokens
from .device.upload import at_device


def apply_penalties(logits: torch.Tensor, rows: Sequence[SamplingRow], last: LastTokens | None = None) -> torch.Tensor:
    """Penalised logits, float32 [S, V]: a copy if any row has a penalty. Every token of a history is in the vocabulary.

    last: has the tokens that rows await, where the logits are; None: none does.
    """
    penalised = [index for index, row in enumerate(rows) if row.params.is_penalised]
    if not penalised:
        return logits
    penalties = np.array([_penalties(rows[index].params) for index in penalised], np.float32)
    apply = _on_host if logits.is_cpu else _on_device
    return apply(logits, penalised, [rows[index] for index in penalised], penalties, last)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _on_host(
    logits: torch.Tensor,
    indices: Sequence[int],
    rows: Sequence[SamplingRow],
    penalties: npt.NDArray[np.float32],
    last: LastTokens | None,
) -> torch.Tensor:
    """By numpy, which starts no threads for so little work."""
    histories = _histories(rows, None if last is None else last.tensor.numpy())
    logits = torch.from_numpy(logits.numpy().copy())
    flat, vocab_size = logits.view(-1).numpy(), logits.shape[1]
    repetition, frequency, presence = penalties.T
    counted = np.flatnonzero((frequency != 0) | (presence != 0))
    with np.errstate(all="ignore"):  # rows that are not finite are told elsewhere
        if (repetition != 1).any():
            cells, lens = _cells(histories, indices, vocab_size)
            seen, penalty = flat[cells], np.repeat(repetition, lens)
            flat[cells] = np.where(seen > 0, seen / penalty, seen * penalty)  # a token seen twice gets one value twice
        if len(counted):
            outputs = [histories[at][rows[at].num_prompt_tokens :] for at in counted.tolist()]
            cells, lens = _cells(outputs, [indices[at] for at in counted.tolist()], vocab_size)
            named, firsts, counts = np.unique(cells, return_index=True, return_counts=True)
            of = np.repeat(counted, lens)[firsts]
            flat[named] -= (frequency[of] * counts + presence[of]).astype(np.float32)
    return logits


def _histories(rows: Sequence[SamplingRow], last: npt.NDArray[np.int64] | None) -> list[npt.NDArray[np.integer]]:
    """All tokens before the one that is drawn. last: by row, what is awaited; None: a zero stands for it."""
    return [
        row.token_ids if (at := row.awaited_row) is None else np.append(row.token_ids, 0 if last is None else last[at])
        for row in rows
    ]


def _cells(
    histories: Sequence[npt.NDArray[np.integer]], indices: Sequence[int], vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cells of the flat logits that the histories of these rows name, and the length of each history."""
    lens = np.fromiter((len(history) for history in histories), np.int64, len(histories))
    return np.concatenate(histories) + np.repeat(np.array(indices, np.int64) * vocab_size, lens), lens


def _on_device(
    logits: torch.Tensor,
    indices: Sequence[int],
    rows: Sequence[SamplingRow],
    penalties: npt.NDArray[np.float32],
    last: LastTokens | None,
) -> torch.Tensor:
    """All at once, and without a word from the device: the host knows how many tokens there are."""
    device, vocab_size = logits.device, logits.shape[1]
    history = np.concatenate(_histories(rows, None), dtype=np.int32)
    num_tokens = len(history)
    lens = np.fromiter((row.position for row in rows), np.int64, len(rows))
    outputs = np.cumsum(lens) - lens + np.fromiter((row.num_prompt_tokens for row in rows), np.int64, len(rows))
    where, num_tokens_of, first_outputs = at_device(np.stack((np.array(indices), lens, outputs)), logits)
    tokens = at_device(history, logits)
    if last is not None and (awaiting := [at for at, row in enumerate(rows) if row.awaited_row is not None]):
        places = np.stack((np.cumsum(lens)[awaiting] - 1, [rows[at].awaited_row for at in awaiting]))
        ends, their_rows = at_device(places, logits)
        tokens.index_copy_(0, ends, last.tensor[their_rows].to(tokens.dtype))
    repetition, frequency, presence = at_device(np.ascontiguousarray(penalties.T), logits)

    owners = torch.repeat_interleave(torch.arange(len(rows), device=device), num_tokens_of, output_size=num_tokens)
    cells = where[owners] * vocab_size + tokens
    seen, penalty = logits.reshape(-1)[cells], repetition[owners]
    penalised = torch.where(seen > 0, seen / penalty, seen * penalty)
    if penalties[:, 1:].any():
        own_cells = owners * vocab_size + tokens
        is_output = torch.arange(num_tokens, device=device) >= first_outputs[owners]
        counts = torch.zeros(len(rows) * vocab_size, dtype=torch.int32, device=device)
        counts = counts.index_add_(0, own_cells, is_output.int())[own_cells]
        less = frequency[owners].double() * counts + presence[owners]
        penalised = torch.where(counts > 0, penalised - less.float(), penalised)
    return logits.clone().view(-1).index_put_((cells,), penalised).view_as(logits)
