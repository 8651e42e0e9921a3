"""Sampler: from a step's logits to one token per row.

Vectorised over rows; a row's token is a function of its own logits, parameters, history and (seed, sample index,
position), never of the rows beside it, so that a resumed or re-batched request continues as it would have. A row
whose logits are not finite is reported, and the others are sampled: the failure of one request is no other's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog
import torch

from kvkeeper.kernels.philox import uniforms
from kvkeeper.kernels.sampling import SamplingTensors, sample_rows

from ..values.sampling_params import SamplingRow, are_likeliest
from .last_tokens import LastTokens
from .penalties import apply_penalties
from .upload import at_device

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """token_ids: int64 [S], meaningless in bad_rows (their logits were not finite) and stuck_rows (nothing may be drawn)."""

    token_ids: npt.NDArray[np.int64]
    bad_rows: tuple[int, ...]
    stuck_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Tokens of S rows, still on the device of the logits: the host has not waited for them.

    Attributes:
        token_ids: int64 [S], meaningless where a row is not sound.
        is_finite, can_go_on: bool [S]; sound is both. What can not go on may draw nothing.
    """

    token_ids: torch.Tensor
    is_finite: torch.Tensor
    can_go_on: torch.Tensor


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
    """Draw one token per row, and wait for it; see draw."""
    drawn = draw(logits, rows)
    return split(joined(drawn, drawn.is_finite[:0]).cpu(), len(rows))[0]


def joined(drawn: Drawn, other: torch.Tensor) -> torch.Tensor:
    """The tokens, what is told of them, and the other tensor [n] in one, int64 [3 S + n], so that one copy brings all."""
    return torch.cat([column.long() for column in (drawn.token_ids, drawn.is_finite, drawn.can_go_on, other)])


def split(flat: torch.Tensor, num_rows: int) -> tuple[SampledTokens, npt.NDArray[np.int64]]:
    """The tokens and the other tensor out of what joined made, on the host."""
    values = flat.numpy()
    told, rest = values[: 3 * num_rows].reshape(3, num_rows), values[3 * num_rows :]
    if told[1:].all():
        return SampledTokens(told[0], ()), rest
    token_ids, is_finite, can_go_on = told
    bad, stuck = np.flatnonzero(is_finite == 0), np.flatnonzero((is_finite == 1) & (can_go_on == 0))
    return SampledTokens(token_ids, tuple(bad.tolist()), tuple(stuck.tolist())), rest


@torch.inference_mode()
def draw(logits: torch.Tensor, rows: Sequence[SamplingRow], last: LastTokens | None = None) -> Drawn:
    """Draw one token per row.

    Args:
        logits: float32 [S, V], not changed. -inf is a token that must not be drawn.
        rows: S of them, in the order of the logits.
        last: has the tokens that rows await; None: none does.
    """
    assert logits.shape[0] == len(rows), "one row per row of logits"
    likeliest, is_finite = _likeliest_and_finite(logits)
    if are_likeliest(rows):
        return Drawn(_likeliest(logits) if likeliest is None else likeliest, is_finite, torch.ones_like(is_finite))
    raw, logits = logits, apply_penalties(logits, rows, last)
    constrained = _apply_constraints(logits, rows)
    can_go_on = torch.ones_like(is_finite) if constrained is logits else constrained.amax(dim=1) > -torch.inf
    logits = _with_sound_rows(constrained, is_finite & can_go_on)
    if logits is not raw:
        likeliest = None
    greedy = np.fromiter((row.params.temperature == 0 for row in rows), np.bool_, len(rows))
    if greedy.all():
        return Drawn(_likeliest(logits) if likeliest is None else likeliest, is_finite, can_go_on)
    picked = np.flatnonzero(~greedy)
    chosen = [rows[index] for index in picked.tolist()]
    where = None if len(picked) == len(rows) else at_device(picked, logits)
    own = logits if where is None else logits[where]
    drawn = sample_rows(own, *_tensors(chosen, logits))
    if where is not None:
        drawn = (_likeliest(logits) if likeliest is None else likeliest).index_copy_(0, where, drawn)
    return Drawn(drawn, is_finite, can_go_on)


def _likeliest_and_finite(logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The likeliest token of each row where finding it costs nothing more, and whether the row can be drawn from, bool [S].

    NaN and +inf win a maximum; -inf only if all are.
    """
    if not logits.is_cpu:
        return None, torch.isfinite(logits.amax(dim=1))
    values, found = logits.numpy(), _likeliest(logits)
    return found, torch.from_numpy(np.isfinite(values[np.arange(len(values)), found.numpy()]))


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the likeliest tokens of each row, int64 [S].

    On the host by numpy: it starts no threads, which would cost more than the work, and takes a fifth of the time.
    """
    return torch.from_numpy(logits.numpy().argmax(axis=1)) if logits.is_cpu else logits.argmax(dim=1)


def _with_sound_rows(logits: torch.Tensor, is_sound: torch.Tensor) -> torch.Tensor:
    """Replace rows from which nothing can be drawn, so that every row can be sampled; their tokens mean nothing."""
    if logits.is_cpu and bool(is_sound.all()):
        return logits
    return torch.where(is_sound[:, None], logits, 0.0)


def _tensors(rows: Sequence[SamplingRow], logits: torch.Tensor) -> tuple[SamplingTensors, torch.Tensor]:
    """Parameters of the rows and their uniform numbers, in one copy."""
    columns = np.empty((6, len(rows)))
    chosen = [row.params for row in rows]
    columns[:5] = np.array([(it.temperature, it.top_k, it.top_p, it.min_p, it.typical_p) for it in chosen]).T
    columns[5] = _uniforms(rows)
    temperature, top_k, top_p, min_p, typical_p, drawn = at_device(columns, logits)
    return SamplingTensors(temperature, top_k.long(), top_p, min_p, typical_p), drawn


def _uniforms(rows: Sequence[SamplingRow]) -> npt.NDArray[np.float64]:
    return uniforms(
        np.array([row.seed for row in rows], dtype=np.uint64),
        np.array([row.sample_idx for row in rows], dtype=np.uint64),
        np.array([row.position for row in rows], dtype=np.uint64),
    )


def _apply_constraints(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits with -inf for tokens that must not be drawn: a copy if any row is constrained."""
    constrained = [index for index, row in enumerate(rows) if row.constraint is not None]
    if not constrained:
        return logits
    logits = logits.clone()
    for index in constrained:
        constraint = rows[index].constraint
        assert constraint is not None
        try:
            allowed = constraint.allowed()
        except Exception:  # its request's fault alone: it may draw nothing
            log.exception("constraint_failed")
            allowed = np.zeros(logits.shape[1], np.bool_)
        logits[index].masked_fill_(at_device(~allowed, logits), -torch.inf)
    return logits
