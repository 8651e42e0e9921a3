"""Engine: the one loop.

A step is schedule, reserve, copy, forward, sample, emit. The task that runs the loop is the only one that moves
sequences, and the one that renews the lease; the middle three run in one worker thread, so that streams, arrivals and
renewals go on meanwhile. Other tasks submit and cancel; that takes effect when the next step is planned.

Steps overlap: while the device computes one, the blocks of the next are asked for, counting on the tokens that will come, so
that the device does not wait for the cache service. Only its tokens have to be there before the next one can be put together.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import structlog

from ..cache_session.kv_memory import KvMemory
from ..outputs.generation import Generation
from ..scheduler.plan import Plan
from ..scheduler.planner import NO_GUESSES
from ..scheduler.scheduler import Scheduler
from ..scheduler.state.limits import Limits
from ..scheduler.state.waiting import WaitingSequences
from ..speculation.speculator import Proposer, Speculator
from ..values.errors import CacheServiceDown, Draining, NeverFits
from ..values.request import Int32Array, RequestState
from .iteration import Iteration
from .open_requests import OpenRequests, bounded
from .sequence_creator import SequenceCreator
from .stats import EngineStats
from .step_worker import StepWorker
from .tracing import EngineTracing

log = structlog.get_logger()
T = TypeVar("T")

_PACE_S = 0.005  # before the next step, when one was refused all that it asked for
_RENEW_SHARE = 1 / 3  # of the lease


class Engine:
    """Requests in, pieces of text out. run_session serves on one session until it is lost or the engine is stopped."""

    def __init__(
        self,
        max_waiting: int,
        proposer: Proposer | None = None,
        tracing: EngineTracing | None = None,
        waiting: WaitingSequences | None = None,
    ) -> None:
        """proposer: guesses next tokens; None: every token takes a step. waiting: by arrival, by default."""
        self._tracing = tracing or EngineTracing(None)
        self.stats = EngineStats()
        self.scheduler = Scheduler(Limits(block_size=1, max_len=0, max_known_sequences=0), waiting)
        self.requests = OpenRequests(self.scheduler, self.stats, self._tracing, max_waiting, self._wake_up)
        self.memory: KvMemory | None = None  # of the session that is served on
        self.last_iteration: Iteration | None = None
        self.kv_utilization = 0.0  # as of the last step
        self._creator: SequenceCreator | None = None
        self._num_reported = 0
        self.speculator = None if proposer is None else Speculator(proposer, self.requests.may_guess)
        self._wake = asyncio.Event()
        self._device = StepWorker()
        self._stopping = False

    # -- for other tasks

    def check_open(self) -> None:
        """Whether requests are taken now. Raises Draining, CacheServiceDown."""
        if self._stopping:
            raise Draining("the service is stopping")
        if self.memory is None:
            raise CacheServiceDown("the cache service does not answer")

    def submit(self, generation: Generation) -> None:
        """Queue a request, or refuse it; no other task comes between check and queueing."""
        self.check_open()
        self.requests.submit(generation)

    def stop(self) -> None:
        """Take no more requests; run_session ends once the open ones have."""
        self._stopping = True
        self._wake_up()

    def close(self) -> None:
        """After the last session."""
        self._device.close()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    async def wait_for_stop(self, seconds: float) -> None:
        """So long, or until the engine is stopped."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not self._stopping and (left := deadline - asyncio.get_running_loop().time()) > 0:
            self._wake.clear()
            await self._pause(left)

    def counts(self) -> dict[str, float]:
        """What GetStats and the metrics tell, by the protocol's names."""
        stats, scheduler = self.stats, self.scheduler
        states = [generation.state for generation in self.requests.generations.values()]
        names = (
            *("num_completed_requests", "num_failed_requests", "num_cancelled_requests", "num_cached_tokens"),
            *("num_prefill_tokens", "num_new_tokens", "num_steps", "num_copied_blocks"),
        )
        return {
            **{name: getattr(stats, name) for name in names},
            **stats.utilization(scheduler.limits.max_running, scheduler.limits.token_budget),
            "num_running_requests": states.count(RequestState.RUNNING),
            "num_waiting_requests": len(states) - states.count(RequestState.RUNNING),
            "num_preempted_requests": states.count(RequestState.PREEMPTED),
            "num_preemptions": scheduler.num_preemptions,
            "num_swapped_out": scheduler.num_swapped_out,
            "num_policy_switches": scheduler.waiting.ordering.num_switches,
            "num_guessed_tokens": self.speculator.switch.num_guessed if self.speculator else 0,
            "num_kept_guesses": self.speculator.switch.num_kept if self.speculator else 0,
            "acceptance_rate": self.speculator.switch.acceptance_rate if self.speculator else 0.0,
            "kv_utilization": self.kv_utilization if self.memory is not None else 0.0,
        }

    # -- the loop

    async def run_session(self, memory: KvMemory, limits: Limits, tell_ready: Callable[[], Awaitable[None]]) -> None:
        """Serve until the engine is stopped. Raises KvkeeperError when the session is lost; the requests live on.

        tell_ready is awaited once requests are taken, so that nobody who was told is refused.
        """
        self.memory, self._num_reported = memory, 0
        self.requests.end_closed()
        for request in self.scheduler.reset(limits):
            limit = limits.max_len_of(request.retention)
            text = bounded(f"{request.max_len} tokens are too much for the pool as it is now", limits, request)
            refusal = NeverFits(text, requested=request.max_len, limit=limit)
            self.requests.fail(request, refusal)
        self._creator = SequenceCreator(self.scheduler, memory.session, self._wake, self.requests.fail, self._tracing)
        try:
            await tell_ready()
            while not (self._stopping and not self.requests.generations and self.scheduler.is_empty):
                await self.step(memory)
        finally:
            self.memory = None
            self.requests.deliver()
            await self._creator.close()
            self._creator = None
            await self._device.drop()
            self._tracing.drop_steps()
            self.requests.end_closed()

    async def step(self, memory: KvMemory) -> None:
        """One turn: schedule, reserve; emit what was computed meanwhile; copy, forward, sample go on during the next."""
        device, session = self._device, memory.session
        if is_guessing := self._is_guessing():
            await self._finish(memory)  # guesses start from the tokens that are computed now
        await device.wait_until_due(session.ttl_ms / 1000 * _RENEW_SHARE)
        self._take_in()
        plan = self._schedule(await self._guess(memory) if is_guessing else NO_GUESSES)
        wants_step = not plan.is_empty or (bool(self.scheduler.loading) and device.in_flight is None)
        if not wants_step and device.in_flight is None:
            return await self._idle(memory)
        answer = None
        if wants_step:
            traceparent = self._tracing.begin_step(session.step_id + 1, plan, self.scheduler.running)
            answer = await device.time_reply(memory.step(plan, device.last_completed(session.step_id), traceparent))
            self.kv_utilization = 1 - (answer.num_free + answer.num_evictable) / max(session.pool.num_blocks - 1, 1)
        await self._finish(memory)
        if answer is not None:
            work = self.scheduler.apply(plan, answer)
            self._tracing.note_computing(work.sequences)
            run_orders = partial(memory.run_orders, answer)
            device.start(session.step_id, work, memory.runner, self.requests.rows(work), run_orders, is_guessing=is_guessing)
            if work.batch is None and plan.only_asks and not len(answer.transfer_ids) and not len(answer.ready_ids):
                await self._pause(_PACE_S)
        self.requests.deliver()
        return None

    async def _finish(self, memory: KvMemory) -> None:
        """Take over what the device computes, when it has."""
        if (flight := self._device.in_flight) is None:
            return
        computed = await self._while_renewing(memory, flight.computing)
        await memory.require_lease()  # else what was computed may have read what others wrote: it is computed again
        self._device.take()
        if memory.note_ended_orders():
            self.scheduler.give_up_loads()
        work = flight.work
        self.scheduler.costs.note_step(len(work.rows), int(work.num_new.sum()), flight.seconds, memory.take_moved())
        self._tracing.end_step(flight)
        taken = self.requests.emit(work, computed)
        self.requests.end_closed()
        if self.speculator is not None and taken:
            self.speculator.note(work, taken, flight.seconds + flight.idle_seconds, was_guessing=flight.is_guessing)
        if work.batch is not None or work.changes.is_move:
            seconds, waited = flight.seconds + flight.cache_wait_seconds, flight.cache_wait_seconds
            self.last_iteration = Iteration(flight.step_id, work, self.scheduler.num_waiting, seconds, waited)
            self.stats.time_step(work, seconds, waited)

    def _take_in(self) -> None:
        """What other tasks did since the last step."""
        self._wake.clear()
        if self._creator is not None:
            self._creator.proceed()
        self.requests.end_closed()

    def _schedule(self, guesses: Mapping[int, Int32Array]) -> Plan:
        ordering = self.scheduler.waiting.ordering
        num_switches = ordering.num_switches
        plan = self.scheduler.schedule(time.monotonic(), guesses)
        if ordering.num_switches > num_switches:
            log.info("policy_switched", policy=ordering.policy.name, num_waiting=self.scheduler.num_waiting)
        return plan

    def _is_guessing(self) -> bool:
        """Whether the next step may get guesses, or the one that is computed has some: how many tokens it gives is open then.

        Only then does the next step wait for it; plain steps overlap as they do without a speculator.
        """
        if self.speculator is None:
            return False
        flight = self._device.in_flight
        has_guesses = flight is not None and any(len(guesses) for guesses in flight.work.guesses)
        return has_guesses or self.speculator.wants_to_guess(self.scheduler.running)

    async def _guess(self, memory: KvMemory) -> Mapping[int, Int32Array]:
        """Guesses for the sequences that decode. The loop alone appends tokens, so theirs stay as they are meanwhile."""
        assert self.speculator is not None
        asking = self.speculator.ask(self.scheduler.running)
        if asking is None:
            return NO_GUESSES
        return await self._while_renewing(memory, self._device.call(asking)) if self.speculator.is_slow else asking()

    # -- waiting

    async def _idle(self, memory: KvMemory) -> None:
        """Nothing to compute: tell that the last step is done, then renew the lease until there is something."""
        session = memory.session
        self.requests.deliver()
        self._device.rest()
        if self._num_reported != session.step_id or memory.has_ended_orders:
            self._num_reported = session.step_id
            await memory.renew(session.step_id)
        elif not await self._pause(session.ttl_ms / 1000 * _RENEW_SHARE):
            await memory.renew()

    async def _pause(self, seconds: float) -> bool:
        """Wait until another task did something, or so long. Whether one did."""
        try:
            async with asyncio.timeout(seconds):
                return await self._wake.wait()
        except TimeoutError:
            return False

    async def _while_renewing(self, memory: KvMemory, work: asyncio.Future[T]) -> T:
        """The work's result; the lease is renewed for as long as it takes."""
        while True:
            done, _ = await asyncio.wait({work}, timeout=memory.session.ttl_ms / 1000 * _RENEW_SHARE)
            if done:
                return work.result()
            await memory.renew()

    def _wake_up(self) -> None:
        self._wake.set()
        if self._creator is not None:
            self._creator.kick()
