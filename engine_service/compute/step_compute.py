"""The part of a step that the worker thread does: copy, forward, sample.

Values in, values out; it never sees a request's stream or the session, and a failure ends this batch alone. A step is launched,
and read later: on a device the next one may be launched in between, and goes on from tokens that nobody has read.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog
import torch

from ..scheduler.work import PromptScore, Work
from ..values.beam_values import Candidates, SearchRow
from ..values.sampling_params import SamplingRow, are_likeliest
from ..values.token_logprobs import TokenLogprobs
from .beam_candidates import find_candidates
from .device_queue import DeviceQueue, HostQueue, Mark
from .last_tokens import LastTokens
from .logprobs import LogprobTensors, find_logprobs
from .model_runner import Runner
from .sampler import SampledTokens, draw, joined, split
from .upload import at_device

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


@dataclass(slots=True, eq=False)
class _Results:
    """What the device leaves for the host: to be read once it has got that far."""

    flat: torch.Tensor | None = None  # tokens, whether each is finite and can go on, and whether each of unfinished is finite
    logprobs: LogprobTensors | None = None
    scores: list[LogprobTensors] = field(default_factory=list)
    candidates: SequenceOf[Candidates | None] = ()
    has_failed: bool = False


class Launched:
    """A step on its way through the device."""

    def __init__(self, runner: Runner, work: Work, how: StepRows, results: _Results, mark: Mark) -> None:
        self._runner, self._work, self._how, self._results, self._mark = runner, work, how, results, mark

    def read(self) -> Computed | None:
        """Wait until the device has done it. None: it failed, which is logged, and the loop goes on.

        The exception is not handed back, because its traceback holds views of the arena.
        """
        try:
            self._mark.wait()
            if self._results.has_failed:
                self._runner.synchronize()
                return None
            return self._told()
        except Exception:
            log.exception("batch_failed")
            return None

    def _told(self) -> Computed:
        results, work, rows = self._results, self._work, self._how.sampled
        scores = [
            found.told([score.num_top] * len(score.token_ids)) for score, found in zip(work.scores, results.scores, strict=True)
        ]
        if results.flat is None:
            return Computed()
        sampled, is_finite = split(results.flat, len(rows))
        logprobs: dict[int, TokenLogprobs] = {}
        if results.logprobs is not None:
            asked = _asked(rows)
            bad = {*sampled.bad_rows, *sampled.stuck_rows}
            told = zip(asked, results.logprobs.told([count for _, count in asked]), strict=True)
            logprobs = {row: found for (row, _), found in told if row not in bad}
        return Computed(sampled, logprobs, results.candidates, scores, np.flatnonzero(is_finite == 0).tolist())


class StepCompute:
    """A model on one session's memory, and the tokens that its steps have drawn."""

    def __init__(self, runner: Runner, queue: DeviceQueue | None = None) -> None:
        """queue: of the device that the model computes on; None: it computes when it is called."""
        self._runner, self._queue = runner, queue or HostQueue()
        self._last = LastTokens()

    @property
    def is_immediate(self) -> bool:
        """Whether a step is done when it is launched, so that reading it does not wait."""
        return self._queue.is_immediate

    def launch(self, work: Work, how: StepRows) -> Launched:
        """Begin a step behind those that were launched before. At most two are not read yet."""
        results = _Results()
        self._queue.submit(partial(self._run, work, how, results))
        return Launched(self._runner, work, how, results, self._queue.mark())

    def _run(self, work: Work, how: StepRows, results: _Results) -> None:
        try:
            self._copy_forward_sample(work, how, results)
        except Exception:
            log.exception("batch_failed")
            results.has_failed = True

    def _copy_forward_sample(self, work: Work, how: StepRows, results: _Results) -> None:
        runner, fetch, batch = self._runner, self._queue.fetch, work.batch
        runner.copy_blocks(work.copies)
        if batch is None:
            return
        if batch.awaited_rows is not None:
            batch = replace(batch, token_ids=self._last.filled(batch.token_ids, batch.awaited_rows), awaited_rows=None)
        logits = runner.forward(batch)
        results.scores = [_score(logits, score).fetched(fetch) for score in work.scores]
        is_finite = _is_finite(logits, work)
        if how.searched:
            results.candidates = find_candidates(logits[at_device(work.search_idx, logits)], how.searched)
        if not (rows := how.sampled):
            results.flat = fetch(is_finite.long())
            return
        # One prompt's row of logits serves all its continuations.
        is_whole = np.array_equal(work.logit_idx, np.arange(len(logits)))
        logits = logits if is_whole else logits[at_device(work.logit_idx, logits)]
        drawn = draw(logits, rows, self._last)
        if len(rows) == len(work.sampled):  # behind guesses the host has to look which of them are kept
            self._last.put(work.sample_rows, drawn.token_ids[: len(work.sample_rows)])
        if asked := _asked(rows):
            picked = at_device(np.array([row for row, _ in asked]), logits)
            found = find_logprobs(logits[picked], drawn.token_ids[picked], max(count for _, count in asked))
            results.logprobs = found.fetched(fetch)
        results.flat = fetch(joined(drawn, is_finite))


def _asked(rows: SequenceOf[SamplingRow]) -> list[tuple[int, int]]:
    """The rows whose log probabilities are asked for, and how many likeliest tokens beside each."""
    if are_likeliest(rows):
        return []
    return [(index, row.num_logprobs) for index, row in enumerate(rows) if row.num_logprobs is not None]


def _is_finite(logits: torch.Tensor, work: Work) -> torch.Tensor:
    """Of each of work.unfinished, on the logits' device."""
    if not len(work.check_idx):
        return logits.new_ones(0, dtype=torch.bool)
    return torch.isfinite(logits[at_device(work.check_idx, logits)].amax(dim=1))


def _score(logits: torch.Tensor, score: PromptScore) -> LogprobTensors:
    """Non-finite logits show in the sampled row as well, so nothing is said of them here."""
    part = logits[score.first_logit : score.first_logit + len(score.token_ids)]
    return find_logprobs(part, at_device(np.array(score.token_ids, np.int64), logits), score.num_top)
