"""The part of a step that the worker thread does: copy, forward, sample.

Values in, values out; it never sees a request's stream or the session, and a failure ends this batch alone.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
import torch

from ..scheduler.work import PromptScore, Work
from ..values.beam_values import Candidates, SearchRow
from ..values.sampling_params import SamplingRow, are_likeliest
from ..values.token_logprobs import TokenLogprobs
from .beam_candidates import find_candidates
from .logprobs import token_logprobs
from .model_runner import Runner
from .sampler import SampledTokens, draw, taken

log = structlog.get_logger()

_NO_TOKENS = SampledTokens(np.empty(0, np.int64), ())


class StepRows(NamedTuple):
    """How the next tokens of work.sampled, draw by draw, and of work.searched come out of the logits."""

    sampled: list[SamplingRow]
    searched: list[SearchRow]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A step's results.

    Attributes:
        logprobs: by row of sampled, where asked for.
        candidates: one for each of work.searched; None where the logits are not finite.
        prompt_logprobs: one list for each of work.scores.
        broken: indices into work.unfinished of those that have computed K or V that are not finite.
    """

    sampled: SampledTokens = _NO_TOKENS
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: SequenceOf[Candidates | None] = ()
    prompt_logprobs: SequenceOf[list[TokenLogprobs]] = ()
    broken: SequenceOf[int] = ()


def copy_forward_sample(runner: Runner, work: Work, how: StepRows) -> Computed | None:
    """Compute a step. After a failure, which is logged, the answer is None and the loop goes on.

    The exception is not handed back, because its traceback holds views of the arena.
    """
    try:
        runner.copy_blocks(work.copies)
        if work.batch is None:
            runner.synchronize()  # transfer orders and copies are reported as done with the step
            return Computed()
        logits = runner.forward(work.batch)
        scores = [_score(logits, score) for score in work.scores]
        is_finite = _is_finite(logits, work)
        found = _candidates(logits, work, how.searched) if how.searched else ()
        if not (rows := how.sampled):
            return Computed(candidates=found, prompt_logprobs=scores, broken=_broken(is_finite.cpu().numpy()))
        # One prompt's row of logits serves all its continuations.
        is_whole = np.array_equal(work.logit_idx, np.arange(len(logits)))
        logits = logits if is_whole else logits[torch.from_numpy(work.logit_idx).to(logits.device)]
        # The host waits for the device here and, unless log probabilities are asked for, nowhere else.
        sampled, (finite,) = taken(draw(logits, rows), is_finite)
        return Computed(sampled, _logprobs(logits, rows, sampled), found, scores, _broken(finite))
    except Exception:
        log.exception("batch_failed")
        runner.synchronize()
        return None


def _candidates(logits: torch.Tensor, work: Work, rows: list[SearchRow]) -> list[Candidates | None]:
    return find_candidates(logits[torch.from_numpy(work.search_idx).to(logits.device)], rows)


def _is_finite(logits: torch.Tensor, work: Work) -> torch.Tensor:
    """Of each of work.unfinished, on the logits' device."""
    if not len(work.check_idx):
        return logits.new_ones(0, dtype=torch.bool)
    return torch.isfinite(logits[torch.from_numpy(work.check_idx).to(logits.device)].amax(dim=1))


def _broken(is_finite: npt.NDArray[Any]) -> list[int]:
    return [int(index) for index in np.flatnonzero(is_finite == 0)]


def _logprobs(logits: torch.Tensor, rows: list[SamplingRow], sampled: SampledTokens) -> dict[int, TokenLogprobs]:
    if are_likeliest(rows):
        return {}
    bad = {*sampled.bad_rows, *sampled.stuck_rows}
    asked = [(index, row.num_logprobs) for index, row in enumerate(rows) if row.num_logprobs is not None and index not in bad]
    if not asked:
        return {}
    picked = [index for index, _ in asked]
    found = token_logprobs(logits[picked], sampled.token_ids[picked].tolist(), [count for _, count in asked])
    return dict(zip(picked, found, strict=True))


def _score(logits: torch.Tensor, score: PromptScore) -> list[TokenLogprobs]:
    """Non-finite logits show in the sampled row as well, so nothing is said of them here."""
    part = logits[score.first_logit : score.first_logit + len(score.token_ids)]
    return token_logprobs(part, score.token_ids, [score.num_top] * len(score.token_ids))
