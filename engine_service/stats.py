"""EngineStats: sums over the engine's life, for GetStats. What is true now is asked of the scheduler instead."""

import time
from collections import deque

import numpy as np

from engine_service.generation import Generation
from engine_service.plan import Work
from engine_service.request import RequestState

_NUM_TIMES = 1024


class EngineStats:
    """Counts; names are the protocol's."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.num_completed_requests = 0
        self.num_failed_requests = 0
        self.num_cancelled_requests = 0
        self.num_cached_tokens = 0
        self.num_prefill_tokens = 0
        self.num_new_tokens = 0
        self.num_steps = 0
        self.num_copied_blocks = 0
        self._first_token_seconds: deque[float] = deque(maxlen=_NUM_TIMES)

    def count_step(self, work: Work) -> None:
        """A step that was computed."""
        self.num_steps += 1
        self.num_new_tokens += len(work.sampled)
        self.num_copied_blocks += len(work.copies)
        self.num_prefill_tokens += work.num_prompt_tokens

    def count_end(self, generation: Generation) -> None:
        """A request that ended."""
        state = generation.state
        self.num_completed_requests += state is RequestState.COMPLETED
        self.num_failed_requests += state is RequestState.FAILED
        self.num_cancelled_requests += state is RequestState.CANCELLED
        self.num_cached_tokens += generation.request.num_hit_tokens or 0
        if generation.first_token_seconds is not None:
            self._first_token_seconds.append(generation.first_token_seconds)

    def first_token_ms(self, percentile: int) -> float:
        """Of the time from arrival to the first token; 0 without any."""
        if not self._first_token_seconds:
            return 0.0
        return float(np.percentile(np.array(self._first_token_seconds), percentile) * 1000)
