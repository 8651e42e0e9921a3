"""EngineStats: sums over the engine's life, for GetStats and the metrics. The scheduler knows what is true now."""

import time
from collections import Counter, deque

import numpy as np
import numpy.typing as npt

from ..outputs.generation import Generation
from ..scheduler.plan import NewTokens, StepWait, Work
from ..values.request import FinishReason, RequestState
from .timings import TOKEN_BOUNDS, Histogram, Timings

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

    def time_next_tokens(self, gaps: npt.NDArray[np.float64]) -> None:
        """Continuations that have tokens already got one more each, so many seconds after the one before."""
        self.between_tokens.add(gaps)

    def time_first_tokens(self, generation: Generation) -> None:
        """The tokens that the continuations of a request have came now, from another engine."""
        generation.last_token_at.clear()
        for sequence in generation.request.sequences:
            if generation.num_taken_of(sequence.index):
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
