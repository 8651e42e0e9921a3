"""The part of a step that the worker thread does: copy, forward, sample.

Values in, values out; it never sees a request's stream or the session. A failure ends this batch alone, unless the device is
lost with it. A step is launched, and read later: on a device the next one may be launched in between, and goes on from tokens
that the host has not read.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog
import torch

from ..scheduler.plan import PromptScore, Work
from ..values.batch import Batch
from ..values.errors import DeviceLost
from ..values.output_chunk import TokenLogprobs
from ..values.sampling_params import NOTHING_AWAITED, Candidates, PlainDraws, SampledRows, SearchRow, are_likeliest
from .device.device_errors import find_fault, keep_until_end, lost_by
from .device.device_queue import DeviceQueue, HostQueue, Mark, Moves, Queued, submit_step
from .device.token_counts import Counted, Counting, LastTokens
from .device.upload import Staged, at_device
from .logprobs import LogprobTensors, find_candidates, find_logprobs
from .model_runner import Concluding, Runner, StagingRunner
from .sampler import SampledTokens, StepLogits, draw, parse_drawn

log = structlog.get_logger()

_SAVES_MEMORY = "a lower --token-budget, --prefill-budget or --chunk-size of the engine takes less in a step"
_NO_TOKENS = SampledTokens(np.empty(0, np.int64), ())


class StepRows(NamedTuple):
    """How the next tokens of work.sampled, draw by draw, and of work.searched come out of the logits."""

    sampled: SampledRows
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

    outcomes: torch.Tensor | None = None  # the tokens that were drawn, or why there is none
    is_finite: torch.Tensor | None = None  # of each of unfinished
    logprobs: LogprobTensors | None = None
    scores: list[LogprobTensors] = field(default_factory=list)
    candidates: SequenceOf[Candidates | None] = ()
    has_failed: bool = False
    is_launched: bool = False
    moves_error: BaseException | None = None
    lost: DeviceLost | None = None

    def fail(self, error: Exception) -> None:
        """The step has failed; the error is being handled. Logs why, unless the device is lost, which the loop reports once."""
        self.has_failed = True
        self.lost = self.lost or lost_by(error)
        if self.lost is not None:
            return
        fault = find_fault(error)
        if fault is not None and fault.is_out_of_memory:
            log.error("batch_failed", message=fault.text(_SAVES_MEMORY))
        else:
            log.exception("batch_failed", **({} if fault is None else {"message": fault.text()}))


class Launched:
    """A step on its way through the device."""

    def __init__(self, runner: Runner, work: Work, how: StepRows, results: _Results, mark: Mark) -> None:
        self._runner, self._work, self._how, self._results, self._mark = runner, work, how, results, mark

    def read(self) -> Computed | None:
        """Wait until the device has done it. None: it failed, which is logged, and the loop goes on.

        The exception is not handed back, because its traceback holds views of the arena. One of the transfers is raised: the
        cache service would never hear of their orders.

        Raises DeviceLost.
        """
        try:
            self._mark.wait()
            assert self._results.is_launched, "the device has not got that far"
            if self._results.has_failed:
                self._runner.synchronize()
            else:
                return self._collect()
        except Exception as error:
            self._results.fail(error)
        if self._results.lost is not None:
            keep_until_end(self._results)
            raise self._results.lost
        if self._results.moves_error is not None:
            raise self._results.moves_error
        return None

    def _collect(self) -> Computed:
        results, work, rows = self._results, self._work, self._how.sampled
        scores = [
            found.to_list([score.num_top] * len(score.token_ids))
            for score, found in zip(work.scores, results.scores, strict=True)
        ]
        broken = [] if results.is_finite is None else torch.nonzero(~results.is_finite)[:, 0].tolist()
        sampled = _NO_TOKENS if results.outcomes is None else parse_drawn(results.outcomes.numpy())
        logprobs: dict[int, TokenLogprobs] = {}
        if results.logprobs is not None:
            asked = _asked(rows)
            bad = {*sampled.bad_rows, *sampled.stuck_rows}
            pairs = zip(asked, results.logprobs.to_list([count for _, count in asked]), strict=True)
            logprobs = {row: found for (row, _), found in pairs if row not in bad}
        return Computed(sampled, logprobs, results.candidates, scores, broken)


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """The forward pass of a step, staged.

    Attributes:
        counted: the rows that are penalised by counts on the device; None: none is.
        in_order: whether each row of its logits is drawn from once, in their order.
    """

    staged: Staged[StepLogits]
    counted: Counted | None
    in_order: bool

    def drop(self) -> None:
        """It has failed, or does not come to its end. Idempotent."""
        self.staged.give_back()
        if self.counted is not None:
            self.counted.forget()


class StepCompute:
    """A model on one session's memory, and the tokens that its steps have drawn."""

    def __init__(self, runner: Runner, queue: DeviceQueue | None = None) -> None:
        """queue: the order in which the model's device works; None: the runner's own, or it computes when it is called."""
        self._runner = runner
        self._counting = runner if isinstance(runner, Counting) else None
        self._queue = queue or (runner.queue if isinstance(runner, Queued) else HostQueue())
        self._last = runner.last_tokens if isinstance(runner, StagingRunner) else LastTokens()
        self._lost: DeviceLost | None = None

    @property
    def is_immediate(self) -> bool:
        """Whether a step is to be read by the thread that launched it."""
        return self._queue.is_immediate

    def launch(self, work: Work, how: StepRows, moves: Moves | None = None) -> Launched:
        """Begin a step behind those that were launched before, with its transfers. At most two are not read yet.

        Raises DeviceLost where the device was lost in the launch of an earlier one.
        """
        if self._lost is not None:
            raise self._lost
        results, forward = _Results(), None
        if moves is not None:
            moves = replace(moves, run=partial(_move, moves.run, results))
        try:
            forward = None if work.batch is None else self._prepare(work, work.batch, how.sampled)
        except Exception as error:
            results.fail(error)  # its transfers are made nevertheless: they are of other sequences
        try:
            copy_blocks = partial(self._copy, work, results)
            run = partial(self._run, forward, work, how, results)
            submit_step(self._queue, work, moves, self._runner.layout.block_size, copy_blocks, run)
        except Exception as error:
            results.fail(error)
            results.is_launched = True
            if moves is not None:
                results.moves_error = error  # which of them were made is not known
            if forward is not None:
                forward.drop()
        self._lost = results.lost
        return Launched(self._runner, work, how, results, self._queue.mark())

    def _prepare(self, work: Work, batch: Batch, rows: SampledRows) -> _Forward:
        in_order, counted = _is_in_order(work), self._count(rows)
        try:
            return _Forward(self._stage(batch, rows if in_order else (), counted), counted, in_order)
        except BaseException:
            if counted is not None:
                counted.forget()
            raise

    def _count(self, rows: SampledRows) -> Counted | None:
        """The rows that are penalised, where the device counts their tokens; None: it does not."""
        if self._counting is None or not isinstance(rows, PlainDraws) or rows.penalised is None:
            return None
        counts = self._counting.counts
        return None if counts is None else counts.stage(rows.penalised)

    def _stage(self, batch: Batch, rows: SampledRows, counted: Counted | None) -> Staged[StepLogits]:
        """The forward pass, to be run in the order of the device. rows: of all logits, in their order, or ()."""
        if isinstance(self._runner, StagingRunner):
            return self._runner.stage(batch, rows, counted)
        return Staged(lambda: StepLogits(self._runner.forward(self._last.known(batch))))

    def _copy(self, work: Work, results: _Results) -> None:
        try:
            self._runner.copy_blocks(work.copies)
        except Exception as error:
            results.fail(error)

    def _run(self, forward: _Forward | None, work: Work, how: StepRows, results: _Results) -> None:
        try:
            if forward is not None and not results.has_failed:
                self._forward_and_sample(forward, work, how, results)
            elif work.batch is None and isinstance(self._runner, Concluding):
                self._runner.end_without_batch()
        except Exception as error:
            results.fail(error)
        finally:
            if forward is not None and results.has_failed:
                forward.drop()
        results.is_launched = True

    @torch.inference_mode()
    def _forward_and_sample(self, forward: _Forward, work: Work, how: StepRows, results: _Results) -> None:
        counted = forward.counted
        # A graph leaves its own tokens, and the histories of rows that are drawn behind it end with those of the step before.
        last = self._last.copied() if counted is None and _depend_on_awaited(how.sampled) else self._last
        fetch, step = self._queue.fetch, forward.staged()
        logits = step.values
        results.scores = [_score(logits, score).fetched(fetch) for score in work.scores]
        if len(work.check_idx):
            results.is_finite = fetch(torch.isfinite(logits[at_device(work.check_idx, logits)].amax(dim=1)))
        if how.searched:
            results.candidates = find_candidates(logits[at_device(work.search_idx, logits)], how.searched)
        if not len(rows := how.sampled):
            return
        if not forward.in_order:  # one prompt's row of logits serves all its continuations
            logits = logits[at_device(work.logit_idx, logits)]
            step = StepLogits(logits)
        found = draw(step, rows, last, counted)
        assert found.outcomes is not None and found.drawn is not None
        results.outcomes, drawn = fetch(found.outcomes), found.drawn
        # The graph that found the likeliest, or drew, has left them there.
        are_kept = drawn is step.likeliest or drawn is step.drawn
        if not are_kept and len(rows) == len(work.sampled):  # of guesses the host has to say which are right
            self._last.put(work.sample_rows, drawn[: len(work.sample_rows)])
        if asked := _asked(rows):
            picked = at_device(np.array([row for row, _ in asked]), logits)
            likeliest = find_logprobs(logits[picked], drawn[picked], max(count for _, count in asked))
            results.logprobs = likeliest.fetched(fetch)


def _is_in_order(work: Work) -> bool:
    """Whether each row of the batch's logits is drawn from once, in their order."""
    return work.batch is not None and np.array_equal(work.logit_idx, np.arange(len(work.batch.logit_rows)))


def _depend_on_awaited(rows: SampledRows) -> bool:
    """Whether penalties or rules depend on a token that the step before draws."""
    if isinstance(rows, PlainDraws):
        return rows.penalised is not None and bool((rows.penalised.awaited != NOTHING_AWAITED).any())
    return not are_likeliest(rows) and any(row.depends_on_awaited for row in rows)


def _move(run: Callable[[], None], results: _Results) -> None:
    try:
        run()
    except BaseException as error:
        results.has_failed, results.moves_error = True, error


def _asked(rows: SampledRows) -> list[tuple[int, int]]:
    """The rows whose log probabilities are asked for, and how many likeliest tokens beside each."""
    if isinstance(rows, PlainDraws) or are_likeliest(rows):
        return []
    return [(index, row.num_logprobs) for index, row in enumerate(rows) if row.num_logprobs is not None]


def _score(logits: torch.Tensor, score: PromptScore) -> LogprobTensors:
    """Non-finite logits show in the sampled row as well, so nothing is said of them here."""
    part = logits[score.first_logit : score.first_logit + len(score.token_ids)]
    return find_logprobs(part, at_device(np.array(score.token_ids, np.int64), logits), score.num_top)
