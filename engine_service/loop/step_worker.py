"""StepWorker: computes the steps' work in a thread of its own, and knows how long it took and what it waited for.

The loop puts the next step together while one is computed. It begins as late as it can, so that requests that arrive
meanwhile are part of it, and early enough to be ready in time: the moment follows from how long the last steps of the same kind
took, their launches, and the last ones' preparation. The next step may be started before this one has ended: it runs ahead,
behind it in the thread or on the device.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kvkeeper.common.service.threads import WorkThread

from ..compute.device.device_errors import lost_by
from ..compute.device.device_queue import Moves
from ..compute.step_compute import Computed, Launched, StepCompute, StepRows
from ..scheduler.plan import Work
from ..values.errors import DeviceLost

T = TypeVar("T")

_SMOOTHING = 0.2
_NUM_PREPARATIONS = 1.5  # times the usual duration of one, to be on the safe side
_MARGIN_S = 0.0005
_TICKS_PER_S = 1000  # of a timer of the event loop: epoll counts milliseconds, and a wait is rounded up to the next one


@dataclass(slots=True)
class InFlight:
    """The work of a step that is being computed, or was computed and is not taken yet. Times are of time.perf_counter."""

    step_id: int
    work: Work
    cache_wait_seconds: float  # before it, without computing, because the cache service had not answered yet
    is_guessing: bool
    idle_since: float | None  # without computing, for any reason but that there was nothing to compute; None: it was not
    has_transfers: bool = False
    has_loads: bool = False  # among them, of blocks from the host tier
    started_at: float | None = None  # None: it waits for the step before
    launch_seconds: float = 0.0  # of a device, which computes by itself once the launch has returned
    launched_at: float | None = None
    ended_at: float | None = None
    computing: asyncio.Future[Computed | None] = field(
        init=False, default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _waiter: asyncio.Future[None] | None = field(init=False, default=None)

    def end(self, outcome: Computed | BaseException | None) -> None:
        """Hand over what came of it; called in a thread."""
        self.computing.get_loop().call_soon_threadsafe(self._end, outcome)

    def _end(self, outcome: Computed | BaseException | None) -> None:
        _settle(self.computing, outcome)
        if self._waiter is not None:
            _settle(self._waiter, None)

    async def wait(self, seconds: float) -> None:
        """Wait until it has ended, for at most so many seconds. What asyncio.wait does beside costs a step one more turn."""
        if not self.computing.done():
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, _settle, self._waiter, None)
            try:
                await self._waiter
            finally:
                timer.cancel()

    @property
    def seconds(self) -> float:
        """Seconds since its computation began."""
        if self.started_at is None:
            return 0.0
        return (time.perf_counter() if self.ended_at is None else self.ended_at) - self.started_at

    @property
    def device_seconds(self) -> float:
        """The same without its launch, as far as nothing else was computed meanwhile."""
        if self.launched_at is None or self.ended_at is None:
            return self.seconds
        return min(self.seconds, self.ended_at - self.launched_at)

    @property
    def idle_seconds(self) -> float:
        """Seconds that nothing was computed before it."""
        is_known = self.idle_since is not None and self.started_at is not None
        return max(self.started_at - self.idle_since, 0.0) if is_known else 0.0  # type: ignore[operator]


@dataclass(slots=True)
class _Usual:
    """Means of the last steps of one kind, in seconds: of the computation, by token where it has prompts, and of the launch."""

    computation: float = 0.0
    launch: float = 0.0

    def note(self, seconds: float, launch_seconds: float) -> None:
        self.computation += _SMOOTHING * (seconds - self.computation)
        self.launch += _SMOOTHING * (launch_seconds - self.launch)


class StepWorker:
    """Computes steps' work in a thread, and reads what a device did in another. in_flight is None while nothing is computed."""

    def __init__(self) -> None:
        # Now, because a step that has begun cannot wait for a thread.
        self._thread, self._reader = WorkThread("forward"), WorkThread("results")
        self._flights: deque[InFlight] = deque()  # the one that is computed, and one that runs ahead
        # A step with a prompt takes many times as long as one that only decodes: with one mean for both, decoding steps behind
        # it would end before their successors' blocks were asked for. So each kind has its own; prompts count by the token.
        self._usual_decode, self._usual_prefill, self._usual_preparation = _Usual(), _Usual(), 0.0
        self._due_at: float | None = None  # when the preparation of the next step began, beside one that was computed
        self._cache_wait = 0.0
        self._idle_since: float | None = None  # None: there was nothing to compute

    @property
    def in_flight(self) -> InFlight | None:
        """The step that is computed, or is not taken yet; the first of two."""
        return self._flights[0] if self._flights else None

    def start(
        self,
        step_id: int,
        work: Work,
        compute: StepCompute,
        how: StepRows,
        moves: Moves | None,
        *,
        is_guessing: bool = False,
        has_loads: bool = False,
    ) -> None:
        """Compute a step's work, with its transfer orders; the step before may not have been taken yet, but the one before it.

        is_guessing: the loop waited for the step before, for the sake of guesses, whether there are any or not.
        has_loads: whether its orders bring blocks from the host tier.
        """
        assert len(self._flights) < 2, "one step runs ahead"
        idle_since = None if self._flights else self._idle_since
        flight = InFlight(step_id, work, self._cache_wait, is_guessing, idle_since, moves is not None, has_loads)
        self._flights.append(flight)
        self._thread.submit(partial(self._compute, flight, compute, how, moves))
        self._cache_wait = 0.0

    def _compute(
        self,
        flight: InFlight,
        compute: StepCompute,
        how: StepRows,
        moves: Moves | None,
    ) -> None:
        """Runs in the thread. What a device has done is read in the other, so that the next step can be launched meanwhile."""
        flight.started_at = began = time.perf_counter()
        try:
            launched = compute.launch(flight.work, how, moves)
        except BaseException as error:
            flight.end(error)
            return
        read = partial(_read, flight, launched)
        if compute.is_immediate:
            read()
        else:
            flight.launched_at = time.perf_counter()
            flight.launch_seconds = flight.launched_at - began
            self._reader.submit(read)

    def take_step(self) -> InFlight:
        """Hands over the computed step; the worker is idle from now on, or computes the one that ran ahead."""
        done = self._flights.popleft()
        self._idle_since = done.ended_at
        if self._flights and done.ended_at is not None:  # a device began with it when it had done this one
            following = self._flights[0]
            following.idle_since = done.ended_at
            following.started_at = max(following.started_at or 0.0, done.ended_at)
        if done.work.num_prompt_tokens:
            self._usual_prefill.note(done.device_seconds / done.work.num_tokens, done.launch_seconds)
        elif done.work.batch is not None:
            self._usual_decode.note(done.device_seconds, done.launch_seconds)
        return done

    def rest(self) -> None:
        """Nothing is there to compute: idle time does not count from now on."""
        self._idle_since = None

    def last_completed(self, step_id: int) -> int:
        """The last step up to step_id whose work is known to be done."""
        return self._flights[0].step_id - 1 if self._flights else step_id

    async def wait_until_due(self, longest: float) -> None:
        """Wait until it is time to prepare the next step, but no longer than so many seconds."""
        flight, self._due_at = self.in_flight, None
        if flight is not None:
            work, has_prompts = flight.work, flight.work.num_prompt_tokens
            usual = self._usual_prefill if has_prompts else self._usual_decode
            left = usual.computation * (work.num_tokens if has_prompts else 1) - flight.seconds
            left -= _NUM_PREPARATIONS * (self._usual_preparation + usual.launch) + _MARGIN_S
            if (whole := _whole_ticks(left)) > 0:
                await flight.wait(min(whole, longest))
            self._due_at = time.perf_counter()

    async def time_reply(self, reply: Awaitable[T]) -> T:
        """The cache service's answer. Notes for how long nothing was computed because of it."""
        asked_at = time.perf_counter()
        answer = await reply
        now = time.perf_counter()
        if self._due_at is not None:
            self._usual_preparation += _SMOOTHING * (now - self._due_at - self._usual_preparation)
        flight = self.in_flight
        idle_since = asked_at if flight is None else flight.ended_at or now
        self._cache_wait = now - max(asked_at, idle_since)
        return answer

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run something else in the thread, after the steps that are computed."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._thread.submit(partial(_call, function, future))
        return future

    async def drop_step(self) -> DeviceLost | None:
        """Wait for the steps that are computed, and drop them. Returns whether the device was lost in one of them."""
        dropped = [flight.computing for flight in self._flights]
        self._flights.clear()
        outcomes = await asyncio.gather(*dropped, return_exceptions=True)
        await self.call(lambda: None)
        found = (lost_by(outcome) for outcome in outcomes if isinstance(outcome, BaseException))
        return next((lost for lost in found if lost is not None), None)

    def close(self) -> None:
        """No more calls."""
        self._thread.close()
        self._reader.close()


def _whole_ticks(seconds: float) -> float:
    """The wait that ends before so many seconds are over. A step of a device may be as short as a tick or two."""
    return max(int(seconds * _TICKS_PER_S), 0) / _TICKS_PER_S


def _call(function: Callable[[], T], future: asyncio.Future[T]) -> None:
    try:
        outcome: Any = function()
    except BaseException as error:
        outcome = error
    future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """An outcome that is an exception is raised where it is awaited."""
    if future.done():  # no turn waits any more
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _read(flight: InFlight, launched: Launched) -> None:
    try:
        found = launched.read()
    except BaseException as error:
        flight.end(error)
        return
    flight.ended_at = time.perf_counter()
    flight.end(found)
