"""Sampler: from a step's logits to one token per row.

Vectorised over rows; a row's token is a function of its own logits, parameters, history and (seed, sample index,
position), never of the rows beside it, so that a resumed or re-batched request continues as it would have. A row
whose logits are not finite is reported, and the others are sampled: the failure of one request is no other's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog
import torch

from kvkeeper.kernels.find_likeliest import NOT_FINITE, find_likeliest
from kvkeeper.kernels.philox import uniforms, uniforms_there
from kvkeeper.kernels.sampling import SamplingTensors, sample_rows

from ..values.sampling_params import PlainDraws, SampledRows, SamplingRow, are_likeliest
from .device.token_counts import Counted, LastTokens
from .device.upload import at_device
from .penalties import apply_penalties, counted_logits, penalised_logits
from .token_changes import apply_rules


@dataclass(frozen=True, slots=True, eq=False)
class StepLogits:
    """The logits of R rows.

    Attributes:
        values: float32 [R, vocab_size].
        likeliest: int64 [R], a token also where the logits are not finite; None: they were not looked at.
        outcomes: drawn, or else likeliest, but NOT_FINITE where the logits are not, or STUCK; None likewise.
        drawn: int64 [R], each row's token by its parameters, a token also where none could be drawn; None: nothing was drawn.
    """

    values: torch.Tensor
    likeliest: torch.Tensor | None = None
    outcomes: torch.Tensor | None = None
    drawn: torch.Tensor | None = None

    def first(self, count: int) -> "StepLogits":
        """The same of the first rows."""
        parts = (self.values, self.likeliest, self.outcomes, self.drawn)
        return StepLogits(*(part if part is None else part[:count] for part in parts))  # type: ignore[arg-type]


def with_likeliest(values: torch.Tensor) -> StepLogits:
    """These logits with the first of the likeliest tokens of each row."""
    return StepLogits(values, *find_likeliest(values))


log = structlog.get_logger()

STUCK = -2  # in the place of a token: nothing may be drawn


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """token_ids: int64 [S], meaningless in bad_rows (their logits were not finite) and stuck_rows (nothing may be drawn)."""

    token_ids: npt.NDArray[np.int64]
    bad_rows: tuple[int, ...]
    stuck_rows: tuple[int, ...] = ()


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
    """Draw one token per row, and wait for it; see draw."""
    outcomes = draw(StepLogits(logits), rows).outcomes
    assert outcomes is not None, "of what was drawn"
    return parse_drawn(outcomes.cpu().numpy())


def parse_drawn(outcomes: npt.NDArray[np.int64]) -> SampledTokens:
    """The tokens, and the rows that have none, out of what is outcomes of them."""
    if (outcomes >= 0).all():
        return SampledTokens(outcomes, ())
    bad, stuck = np.flatnonzero(outcomes == NOT_FINITE), np.flatnonzero(outcomes == STUCK)
    return SampledTokens(np.maximum(outcomes, 0), tuple(bad.tolist()), tuple(stuck.tolist()))


@torch.inference_mode()
def draw(step: StepLogits, rows: SampledRows, last: LastTokens | None = None, counted: Counted | None = None) -> StepLogits:
    """Draw one token per row: the step with `drawn`, and with NOT_FINITE or STUCK in `outcomes` where none could be.

    Args:
        step: logits float32 [S, V], not changed. -inf is a token that must not be drawn. What a graph drew was by these rows.
        rows: S of them, in the order of the logits.
        last: has the tokens that rows await; None: none does.
        counted: of the rows that are penalised, where the device has their counts; then there is `last`, too.
    """
    logits = step.values
    assert logits.shape[0] == len(rows), "one row per row of logits"
    if step.drawn is not None:
        return step
    if step.outcomes is None or step.likeliest is None:
        if are_likeliest(rows) and not logits.is_cpu:
            step = with_likeliest(logits)
        else:
            step = _looked_at(logits)
    likeliest, outcomes = step.likeliest, step.outcomes
    assert outcomes is not None
    if are_likeliest(rows):
        assert likeliest is not None
        return replace(step, drawn=likeliest)
    raw, is_finite, ruled, constrained = logits, outcomes >= 0, logits, logits
    if isinstance(rows, PlainDraws):
        if counted is not None:
            assert last is not None
            logits = constrained = counted_logits(logits, counted, last)
        elif rows.penalised is not None:
            logits = constrained = penalised_logits(logits, rows.penalised, last)
    else:
        ruled = apply_rules(raw, rows, last)
        logits = apply_penalties(ruled, rows, last)
        constrained = _apply_constraints(logits, rows)
    can_go_on = None if constrained is logits and ruled is raw else constrained.amax(dim=1) > -torch.inf
    logits = _with_sound_rows(constrained, is_finite if can_go_on is None else is_finite & can_go_on)
    if logits is not raw:
        likeliest = None
    drawn = _drawn(logits, likeliest, rows if isinstance(rows, PlainDraws) else PlainDraws.of(rows))
    if can_go_on is not None:
        outcomes = torch.where(is_finite & ~can_go_on, STUCK, outcomes)
    return replace(step, drawn=drawn, outcomes=torch.where(outcomes >= 0, drawn, outcomes))


def draw_plain(step: StepLogits, params: torch.Tensor, numbers: torch.Tensor) -> StepLogits:
    """The step with a token of each row, as draw gives it. It reads nothing back, so it can be captured.

    Args:
        step: with_likeliest's, on a device.
        params: float64 [5, S], as PlainDraws has them.
        numbers: int64 [3, S], the bits of seeds, sample indices and positions.
    """
    assert step.likeliest is not None and step.outcomes is not None
    return _drawn_there(step, step.values, step.likeliest, step.outcomes, params, numbers)


def draw_penalised(step: StepLogits, penalised: torch.Tensor, params: torch.Tensor, numbers: torch.Tensor) -> StepLogits:
    """As draw_plain, from the step's logits less penalties, float32 [S, V]."""
    assert step.outcomes is not None
    can_go_on = penalised.amax(dim=1) > -torch.inf
    outcomes = torch.where((step.outcomes < 0) | can_go_on, step.outcomes, STUCK)
    return _drawn_there(step, penalised, penalised.argmax(dim=1), outcomes, params, numbers)


def _drawn_there(
    step: StepLogits,
    logits: torch.Tensor,
    likeliest: torch.Tensor,
    outcomes: torch.Tensor,
    params: torch.Tensor,
    numbers: torch.Tensor,
) -> StepLogits:
    """See draw_plain. outcomes [S]: below 0 where a row is not to be drawn from."""
    temperature, top_k, top_p, min_p, typical_p = params
    is_sound, is_greedy = outcomes >= 0, temperature == 0
    sound = torch.where(is_sound[:, None], logits, 0.0)
    own = SamplingTensors(torch.where(is_greedy, 1.0, temperature), top_k.long(), top_p, min_p, typical_p)
    drawn = torch.where(is_greedy, likeliest, sample_rows(sound, own, uniforms_there(numbers)))
    return replace(step, drawn=drawn, outcomes=torch.where(is_sound, drawn, outcomes))


def _drawn(logits: torch.Tensor, likeliest: torch.Tensor | None, draws: PlainDraws) -> torch.Tensor:
    """A token of each row, all of which can be drawn from. likeliest: of each row, where it is known."""
    picked = np.flatnonzero(draws.params[0])
    if not len(picked):
        return _likeliest(logits) if likeliest is None else likeliest
    where = None if len(picked) == len(draws) else at_device(picked, logits)
    own = logits if where is None else logits[where]
    drawn = sample_rows(own, *_tensors(draws if where is None else draws.picked(picked), logits))
    if where is None:
        return drawn
    return (_likeliest(logits) if likeliest is None else likeliest).index_copy(0, where, drawn)


def _looked_at(logits: torch.Tensor) -> StepLogits:
    """Which rows are finite; and the likeliest tokens, where finding them costs nothing more.

    NaN and +inf win a maximum; -inf only if all are.
    """
    if not logits.is_cpu:
        is_finite = torch.isfinite(logits.amax(dim=1))
        return StepLogits(logits, None, is_finite.long() - 1)
    values, found = logits.numpy(), _likeliest(logits)
    is_finite = np.isfinite(values[np.arange(len(values)), found.numpy()])
    return StepLogits(logits, found, torch.from_numpy(np.where(is_finite, found.numpy(), NOT_FINITE)))


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


def _tensors(draws: PlainDraws, logits: torch.Tensor) -> tuple[SamplingTensors, torch.Tensor]:
    """Parameters of the rows and their uniform numbers, in one copy."""
    columns = np.empty((6, len(draws)))
    columns[:5] = draws.params
    columns[5] = uniforms(draws.seeds, draws.sample_idx, draws.positions)
    temperature, top_k, top_p, min_p, typical_p, drawn = at_device(columns, logits)
    return SamplingTensors(temperature, top_k.long(), top_p, min_p, typical_p), drawn


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
