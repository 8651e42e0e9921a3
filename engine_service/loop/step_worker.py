"""StepWorker: computes one step's work at a time in a thread of its own, and knows how long it took and what it waited for.

The loop puts the next step together while this one is computed. It begins as late as it can, so that requests that arrive
meanwhile are part of it, and early enough for the answer to be there in time: the durations of the last steps of the same kind
and of the last answers tell when.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ..compute.model_runner import Runner
from ..compute.step_compute import Computed, StepRows, copy_forward_sample
from ..scheduler.work import Work

T = TypeVar("T")

_SMOOTHING = 0.2
_NUM_REPLIES = 3  # times the usual duration of an answer, to be on the safe side
_MARGIN_S = 0.0005


@dataclass(slots=True)
class InFlight:
    """The work of a step that is being computed, or was computed and is not taken yet. Times are of time.perf_counter."""

    step_id: int
    work: Work
    cache_wait_seconds: float  # before it, without computing, because the cache service had not answered yet
    idle_seconds: float  # before it, without computing, for any reason but that there was nothing to compute
    is_guessing: bool
    started_at: float = field(default_factory=time.perf_counter)
    ended_at: float | None = None
    computing: asyncio.Future[Computed | None] = field(init=False)

    @property
    def seconds(self) -> float:
        """Seconds since its computation began."""
        return (time.perf_counter() if self.ended_at is None else self.ended_at) - self.started_at


class StepWorker:
    """Computes one step's work at a time, in a thread. in_flight is None while nothing is computed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "forward")
        self.in_flight: InFlight | None = None
        # A step with a prompt takes many times as long as one that only decodes: with one mean for both, decoding steps behind
        # it would end before their successors' blocks were asked for. So each kind has its own; prompts count by the token.
        self._usual_decode = self._usual_token = self._usual_reply = 0.0
        self._cache_wait = 0.0
        self._idle_since: float | None = None  # None: there was nothing to compute

    def start(
        self,
        step_id: int,
        work: Work,
        runner: Runner,
        how: StepRows,
        run_transfers: Callable[[], None],
        *,
        is_guessing: bool = False,
    ) -> None:
        """Compute a step's work, its transfer orders first; the step before has been taken.

        is_guessing: the loop waited for the step before, for the sake of guesses, whether there are any or not.
        """
        assert self.in_flight is None, "one step at a time"
        idle = 0.0 if self._idle_since is None else time.perf_counter() - self._idle_since
        self.in_flight = InFlight(step_id, work, self._cache_wait, idle, is_guessing)
        self.in_flight.computing = self.call(partial(_compute, self.in_flight, runner, how, run_transfers))
        self._cache_wait = 0.0

    def take_step(self) -> InFlight:
        """Hands over the computed step; the worker is idle from now on."""
        done, self.in_flight = self.in_flight, None
        assert done is not None
        self._idle_since = done.ended_at
        if done.work.num_prompt_tokens:
            self._usual_token += _SMOOTHING * (done.seconds / _num_tokens(done.work) - self._usual_token)
        elif done.work.batch is not None:
            self._usual_decode += _SMOOTHING * (done.seconds - self._usual_decode)
        return done

    def rest(self) -> None:
        """Nothing is there to compute: idle time does not count from now on."""
        self._idle_since = None

    def last_completed(self, step_id: int) -> int:
        """The last step up to step_id whose work is known to be done."""
        return step_id if self.in_flight is None else self.in_flight.step_id - 1

    async def wait_until_due(self, longest: float) -> None:
        """Wait until it is time to ask for the next step's blocks, but no longer than so many seconds."""
        flight = self.in_flight
        if flight is not None:
            work = flight.work
            usual = _num_tokens(work) * self._usual_token if work.num_prompt_tokens else self._usual_decode
            left = usual - flight.seconds - _NUM_REPLIES * self._usual_reply - _MARGIN_S
            if left > 0:
                await asyncio.wait({flight.computing}, timeout=min(left, longest))

    async def time_reply(self, reply: Awaitable[T]) -> T:
        """The cache service's answer. Notes for how long nothing was computed because of it."""
        asked_at = time.perf_counter()
        answer = await reply
        now = time.perf_counter()
        self._usual_reply += _SMOOTHING * (now - asked_at - self._usual_reply)
        idle_since = asked_at if self.in_flight is None else self.in_flight.ended_at or now
        self._cache_wait = now - max(asked_at, idle_since)
        return answer

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run something else in the thread, after the step that is computed."""
        return asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def drop_step(self) -> None:
        """Wait for the step that is computed, and drop it."""
        self.in_flight = None
        await self.call(lambda: None)

    def close(self) -> None:
        """No more calls."""
        self._thread.shutdown()


def _num_tokens(work: Work) -> int:
    return int(work.num_new.sum())


def _compute(flight: InFlight, runner: Runner, how: StepRows, run_transfers: Callable[[], None]) -> Computed | None:
    run_transfers()
    computed = copy_forward_sample(runner, flight.work, how)
    flight.ended_at = time.perf_counter()
    return computed
