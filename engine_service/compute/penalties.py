"""Penalties on tokens that a row has seen already, on the host's logits or on a device's, to the same bits.

All rows at once, by column. A host with compiled kernels walks each history; else, and on a device, cells that the histories
name are gathered, changed and put back. A device gets the histories in one copy, and counts them itself. A cell that several
places of a history name is written by each of them with one value, so their order does not matter. Rows whose counts the
device keeps have no history to bring.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.cpu.rows import penalise as compiled_penalise
from kvkeeper.kernels.penalise_counted import penalise_counted
from kvkeeper.kernels.types import CountedTensors

from ..values.sampling_params import NOTHING_AWAITED, PenalisedRows, SamplingRow
from .device.token_counts import Counted, LastTokens
from .device.upload import at_device

_COLUMN_UNIT = 16  # a kernel is compiled anew where a column begins at, or is as long as, no multiple of 16


def apply_penalties(logits: torch.Tensor, rows: Sequence[SamplingRow], last: LastTokens | None = None) -> torch.Tensor:
    """Penalised logits, float32 [S, V]: a copy if any row has a penalty. Every token of a history is in the vocabulary.

    last: has the tokens that rows await, where the logits are; None: none does.
    """
    return penalised_logits(logits, PenalisedRows.of(rows), last)


def penalised_logits(logits: torch.Tensor, rows: PenalisedRows, last: LastTokens | None = None) -> torch.Tensor:
    """The same of rows by column."""
    if not len(rows):
        return logits
    return (_by_walking if compiled.serves(logits) else _by_gathering)(logits, rows, last)


def counted_logits(logits: torch.Tensor, counted: Counted, last: LastTokens) -> torch.Tensor:
    """The same of rows whose tokens are counted on the device, which counts the ones that the step computes."""
    counted.bring()
    rows, count = counted.rows, len(counted.rows.where)
    columns = np.zeros((8, -(-count // _COLUMN_UNIT) * _COLUMN_UNIT), np.int64)
    columns[:5, :count] = rows.where, rows.slots, rows.addends, rows.tokens, rows.awaited
    columns[5:].view(np.float64)[:, :count] = rows.penalties
    there = at_device(columns, logits)[:, :count]
    where, slots, addends, tokens, awaited = there[:5]
    if (rows.awaited != NOTHING_AWAITED).any():
        tokens = last.filled_there(tokens, awaited)
    own = logits if count == len(logits) else logits[where]
    penalised = penalise_counted(own, counted.counts, CountedTensors(slots, tokens, addends, there[5:].view(torch.float64)))
    return penalised if own is logits else logits.index_copy(0, where, penalised)


def _by_walking(logits: torch.Tensor, rows: PenalisedRows, last: LastTokens | None) -> torch.Tensor:
    """Penalise on a host, without threads, which so little work does not pay for."""
    logits, awaited = torch.from_numpy(logits.numpy().copy()), _awaited_tokens(rows, last)
    compiled_penalise(logits, rows.where, rows.penalties, rows.tokens, rows.which, rows.num_known, rows.num_prompts, awaited)
    return logits


def _awaited_tokens(rows: PenalisedRows, last: LastTokens | None) -> npt.NDArray[np.int64]:
    """What each row awaits, or NOTHING_AWAITED."""
    if last is None or not len(last.tensor):
        return np.where(rows.awaited == NOTHING_AWAITED, NOTHING_AWAITED, 0)
    return np.where(rows.awaited == NOTHING_AWAITED, NOTHING_AWAITED, last.tensor.numpy()[rows.awaited])


def _by_gathering(logits: torch.Tensor, rows: PenalisedRows, last: LastTokens | None) -> torch.Tensor:
    """All at once, and without a word from a device: the host knows how many tokens there are."""
    device, vocab_size = logits.device, logits.shape[1]
    history, lens = rows.histories(), rows.lens
    num_tokens, ends = len(history), np.cumsum(lens)
    where, num_tokens_of, first_outputs = at_device(np.stack((rows.where, lens, ends - lens + rows.num_prompts)), logits)
    tokens = at_device(history, logits)
    if last is not None and len(awaiting := np.flatnonzero(rows.awaited != NOTHING_AWAITED)):
        places, their_rows = at_device(np.stack((ends[awaiting] - 1, rows.awaited[awaiting])), logits)
        tokens.index_copy_(0, places, last.tensor[their_rows].to(tokens.dtype))
    repetition, frequency, presence = at_device(rows.penalties, logits)

    owners = torch.repeat_interleave(torch.arange(len(rows), device=device), num_tokens_of, output_size=num_tokens)
    cells = where[owners] * vocab_size + tokens
    seen, penalty = logits.reshape(-1)[cells], repetition[owners]
    penalised = torch.where(seen > 0, seen / penalty, seen * penalty)
    if rows.penalties[1:].any():
        own_cells = owners * vocab_size + tokens
        is_output = torch.arange(num_tokens, device=device) >= first_outputs[owners]
        counts = torch.zeros(len(rows) * vocab_size, dtype=torch.int32, device=device)
        counts = counts.index_add_(0, own_cells, is_output.int())[own_cells]
        less = frequency[owners].double() * counts + presence[owners]
        penalised = torch.where(counts > 0, penalised - less.float(), penalised)
    return logits.clone().view(-1).index_put_((cells,), penalised).view_as(logits)
