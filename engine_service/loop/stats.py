"""EngineStats: sums over the engine's life, for GetStats and the metrics. Iteration: what one turn of the loop computed.

Timings is how long something took, as a histogram over the engine's life and exact percentiles of the latest values. A step
with hundreds of sequences has hundreds of gaps between tokens, and many steps come a second, but they are looked at once in a
while. So what comes is kept as it is, and sorted in when they are looked at or much has come.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..outputs.generation import Generation
from ..scheduler.plan import NewTokens, StepWait, Task, Work
from ..values.request import FinishReason, RequestState

_NUM_RECENT = 4096
# Seconds. A request on a CPU, or in a long queue, takes minutes.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
TOKEN_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Values by size. counts [len(bounds) + 1]: values up to each bound and above the one before; the last is above all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts: npt.NDArray[np.int64] = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count these values."""
        self.counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.total += float(values.sum())

    def count(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Timings:
    """Durations of one kind of thing, in seconds."""

    def __init__(self) -> None:
        self._histogram = Histogram(BOUNDS)
        self._recent = np.zeros(_NUM_RECENT)
        self._num_seen = 0
        self._singles: list[float] = []  # not sorted in yet; those behind the runs
        self._runs: list[npt.NDArray[np.float64]] = []
        self._num_in_runs = 0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Record several durations in order. The array is kept, and not to be changed."""
        if not len(seconds):
            return
        if self._singles:
            self._close_run()
        self._runs.append(seconds)
        self._num_in_runs += len(seconds)
        if self._num_in_runs >= _NUM_RECENT:
            self._sort_in()

    def note(self, seconds: float) -> None:
        """Record one duration."""
        self._singles.append(seconds)
        if len(self._singles) >= _NUM_RECENT:
            self._sort_in()

    @property
    def histogram(self) -> Histogram:
        """The histogram of all durations so far."""
        self._sort_in()
        return self._histogram

    @property
    def num(self) -> int:
        return int(self.histogram.counts.sum())

    def percentile_ms(self, percentile: float) -> float:
        """A percentile of the latest 4,096 durations, in milliseconds; 0 without any."""
        self._sort_in()
        recent = self._recent[: min(self._num_seen, _NUM_RECENT)]
        return float(np.percentile(recent, percentile) * 1000) if len(recent) else 0.0

    def _close_run(self) -> None:
        self._runs.append(np.array(self._singles, np.float64))
        self._num_in_runs += len(self._singles)
        self._singles = []

    def _sort_in(self) -> None:
        self._close_run()
        values, self._runs, self._num_in_runs = np.concatenate(self._runs), [], 0
        if not len(values):
            return
        self._histogram.add(values)
        values = values[-_NUM_RECENT:]
        self._recent[(self._num_seen + np.arange(len(values))) % _NUM_RECENT] = values
        self._num_seen += len(values)


_NUM_STEPS = 256


class EngineStats:
    """Counts and timings of requests, tokens and steps; names of counts are the protocol's."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.num_completed_requests = 0
        self.num_failed_requests = 0
        self.num_cancelled_requests = 0
        self.num_handed_over_requests = self.num_taken_over_requests = 0
        self.num_remote_prefills = self.num_failed_remote_prefills = 0
        self.num_ended: Counter[FinishReason] = Counter()
        self.num_cached_tokens = 0
        self.num_prefill_tokens = 0
        self.num_new_tokens = 0
        self.num_steps = 0
        self.num_copied_blocks = 0
        self.num_waits: Counter[StepWait] = Counter()
        self.first_token = Timings()
        self.between_tokens = Timings()
        self.requests = Timings()
        self.prompt_lens = Histogram(TOKEN_BOUNDS)  # of requests that ended
        self.output_lens = Histogram(TOKEN_BOUNDS)  # of all their continuations together
        self.steps = Timings()
        self.cache_waits = Timings()
        self._recent: deque[tuple[int, int, float, float]] = deque(maxlen=_NUM_STEPS)  # sequences, tokens, seconds, waited

    def count_step(self, work: Work, taken: NewTokens) -> None:
        """A step that was computed, and the tokens that each of work.sampled got."""
        self.num_steps += 1
        self.num_new_tokens += taken.size if isinstance(taken, np.ndarray) else sum(map(len, taken))
        self.num_copied_blocks += len(work.copies)
        self.num_prefill_tokens += work.num_prompt_tokens

    def time_token(self, generation: Generation, index: int) -> None:
        """A continuation got a token now."""
        now, before = time.monotonic(), generation.last_token_time(index)
        if before is not None:
            self.between_tokens.note(now - before)
        elif not generation.last_token_at:
            self.first_token.note(now - generation.started_at)
            generation.first_token_at = now
        generation.note_token_time(index, now)

    def time_first_tokens(self, generation: Generation) -> None:
        """The tokens that the continuations of a request have came now, from another engine."""
        generation.last_token_at.clear()
        for sequence in generation.request.sequences:
            if generation.count_taken(sequence.index):
                self.time_token(generation, sequence.index)

    def time_step(self, work: Work, seconds: float, cache_wait_seconds: float) -> None:
        """A turn that computed something: how long it took, and how much of that it waited for the cache service."""
        self.steps.note(seconds)
        self.cache_waits.note(cache_wait_seconds)
        self._recent.append((len(work.rows), work.num_tokens, seconds, cache_wait_seconds))

    def count_end(self, generation: Generation) -> None:
        """A request that ended, or goes on in another engine."""
        if generation.has_moved:
            self.num_handed_over_requests += 1
            return
        state = generation.state
        self.num_completed_requests += state is RequestState.COMPLETED
        self.num_failed_requests += state is RequestState.FAILED
        self.num_cancelled_requests += state is RequestState.CANCELLED
        self.num_cached_tokens += generation.request.num_hit_tokens or 0
        self.num_ended[generation.finish_reason] += 1
        self.prompt_lens.count(len(generation.request.prompt))
        self.output_lens.count(generation.usage.new_tokens)
        self.requests.note(time.monotonic() - generation.started_at)

    def utilization(self, max_sequences: int, token_budget: int) -> dict[str, float]:
        """The utilization of the latest steps; names are the protocol's. All 0 before the first."""
        count = max(len(self._recent), 1)
        columns = list(zip(*self._recent, strict=True)) or [(0,)] * 4
        sequences, tokens, seconds, waited = (sum(column) for column in columns)
        return {
            "batch_utilization": sequences / count / max_sequences,
            "token_budget_utilization": tokens / count / token_budget,
            "cache_wait_share": waited / seconds if seconds else 0.0,
        }


@dataclass(frozen=True, slots=True)
class Iteration:
    """One turn of the loop, for which requests, and what it cost; a value to print and log.

    Made of what the step had at hand, so that keeping the last one costs nothing; the readable form is made on demand. seconds:
    of the whole turn; cache_wait_seconds: the part that waited for the cache service.
    """

    step_id: int
    work: Work
    num_waiting: int
    seconds: float
    cache_wait_seconds: float

    def prefills(self) -> list[Task]:
        """The tasks that computed prompt tokens."""
        return [task for task in self._tasks() if task.num_context < len(task.sequence.request.prompt)]

    def decodes(self) -> list[Task]:
        """The tasks that computed one new token, or more where they resumed or speculated."""
        return [task for task in self._tasks() if task.num_context >= len(task.sequence.request.prompt)]

    def started(self) -> list[Task]:
        """The prefills and decodes of sequences that were waiting before."""
        chosen = set(self.work.changes.started)
        return [task for task in self._tasks() if task.sequence in chosen]

    def preempted(self) -> list[Task]:
        """The sequences that gave their blocks back so that others could go on, and that are computed again."""
        return [Task(sequence, 0, 0) for sequence in self.work.changes.preempted]

    def swapped_out(self) -> list[Task]:
        """The sequences that gave their blocks back while the host tier keeps their K and V."""
        return list(self.work.changes.swapped_out)

    def swapped_in(self) -> list[Task]:
        """The sequences whose K and V come back from the host tier."""
        return list(self.work.changes.swapped_in)

    def __str__(self) -> str:
        prefills, decodes = self.prefills(), self.decodes()
        num_tokens, changes = self.work.num_tokens, self.work.changes
        lines = [
            f"step {self.step_id}: {num_tokens} tokens, {len(prefills)} prefills, {len(decodes)} decodes, "
            f"{len(changes.started)} started, {len(changes.preempted)} preempted, {len(changes.swapped_out)} swapped out, "
            f"{len(changes.swapped_in)} in, {self.num_waiting} waiting; "
            f"{self.seconds * 1e3:.2f} ms, {self.cache_wait_seconds * 1e3:.2f} ms of it for the cache service"
        ]
        lines += [f"  prefill {task}" for task in prefills]
        lines += [f"  decode {task}" for task in decodes]
        lines += [f"  preempted {task.name}" for task in self.preempted()]
        lines += [f"  swapped out {task.name} with {task.num_context} tokens" for task in changes.swapped_out]
        lines += [f"  swapped in {task.name} with {task.num_context} tokens" for task in changes.swapped_in]
        return "\n".join(lines)

    def _tasks(self) -> Iterator[Task]:
        columns = (self.work.num_context.tolist(), self.work.num_new.tolist())
        for sequence, num_context, num_query in zip(self.work.sequences, *columns, strict=True):
            yield Task(sequence, num_context, num_query)
