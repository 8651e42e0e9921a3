"""Engine: the one loop.

A step is schedule, reserve, copy, forward, sample, emit. The task that runs the loop is the only one that moves
sequences, and the one that renews the lease; the middle three run in one worker thread, so that streams, arrivals and
renewals go on meanwhile. Other tasks submit and cancel; that takes effect when the next step is planned.

Steps overlap: Engine.step says what does, and why.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import structlog

from kvkeeper.client.steps import StepResult

from ..cache_session.kv_memory import KvMemory, create_sequences
from ..cache_session.transfer_runner import has_loads
from ..compute.step_compute import StepCompute
from ..outputs.generation import Generation
from ..scheduler.limits import Limits
from ..scheduler.plan import Plan, StepWait
from ..scheduler.planner import NO_GUESSES
from ..scheduler.scheduler import Scheduler
from ..scheduler.waiting import WaitingSequences
from ..speculation.speculator import Proposer, Speculator
from ..values.errors import CacheServiceDown, Draining, NeverFits
from ..values.request import Int32Array
from .between_steps import BetweenSteps, Wake, wait_for
from .open_requests import OpenRequests, with_bound
from .sequence_creator import SequenceCreator
from .stats import EngineStats, Iteration
from .step_worker import InFlight, StepWorker
from .tracing import EngineTracing

log = structlog.get_logger()
T = TypeVar("T")

_PACE_S = 0.005  # before the next step, when nothing was granted in this one


class Engine:
    """Requests in, chunks of output out. run_session serves on one session until it is lost or the engine is stopped."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: OpenRequests,
        stats: EngineStats,
        tracing: EngineTracing,
        wake: Wake,
        speculator: Speculator | None = None,
        *,
        runs_ahead: bool = True,
    ) -> None:
        """requests, wake: the same wake, by which requests notify the loop. speculator None: every token takes a step.

        runs_ahead: whether a step may be launched before the tokens of the one before are read.
        """
        self.scheduler, self.requests, self.stats, self.speculator = scheduler, requests, stats, speculator
        self.memory: KvMemory | None = None  # of the session that is served on
        self.on_turn: Callable[[bool], None] = lambda is_computing: None  # called in each turn of the loop
        self.last_iteration: Iteration | None = None
        self._tracing, self._wake = tracing, wake
        self._step_worker, self._runs_ahead = StepWorker(), runs_ahead
        self._compute: StepCompute | None = None  # of the session
        self._creator: SequenceCreator | None = None  # of the session
        self._num_reported = 0  # steps that the cache service knows to be done
        self._stopping = False
        self._changes = BetweenSteps()
        self.is_handing_over = False  # all requests are leaving for another engine
        self._has_turned = asyncio.Event()  # there is a session, or never again

    # -- for other tasks

    def check_open(self) -> None:
        """Require that requests are taken now. Raises Draining, CacheServiceDown."""
        if self._stopping or self.is_handing_over:
            raise Draining("the service is stopping" if self._stopping else "another engine takes over")
        if self.memory is None:
            raise CacheServiceDown("the cache service does not answer")

    def submit(self, generation: Generation) -> None:
        """Queue a request, or refuse it; no other task comes between check and queueing."""
        self.check_open()
        self.requests.submit(generation)

    def stop(self) -> None:
        """Take no more requests; run_session ends once the open ones have."""
        self._stopping = True
        self._has_turned.set()
        self._wake.all()

    async def wait_memory(self) -> KvMemory | None:
        """That of the session that is served on, or of the next one; None once the engine is asked to stop."""
        while not self._stopping and self.memory is None:
            await self._has_turned.wait()
        return None if self._stopping else self.memory

    def between_steps(self, change: Callable[[], None], when: Callable[[], bool] = lambda: True) -> asyncio.Event:
        """Make a change once it is due, where no step is running.

        The event is set once the change is made and the cache service knows all that was computed before, or has ended the
        session.
        """
        event = self._changes.add(change, when)
        if self.memory is None:
            self._changes.make()
            self._changes.note_reported()
        self._wake.all()
        return event

    def wake(self) -> None:
        """Have the loop look whether its session can go on."""
        self._wake.loop.set()

    def close(self) -> None:
        """End the worker thread, after the last session."""
        self._step_worker.close()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    async def wait_for_stop(self, seconds: float) -> None:
        """Wait for so many seconds, or until the engine is stopped."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not self._stopping and (left := deadline - asyncio.get_running_loop().time()) > 0:
            self._wake.loop.clear()
            await wait_for(self._wake.loop, left)

    # -- the loop

    async def run_session(self, memory: KvMemory, limits: Limits, notify_ready: Callable[[], Awaitable[None]]) -> None:
        """Serve until the engine is stopped. Raises KvkeeperError when the session is lost; the requests live on.

        Raises DeviceLost, also where the session was lost for the same reason, as where ranks share a model.

        notify_ready is awaited once requests are taken, so that no client that was notified is refused.
        """
        self.memory, self._num_reported = memory, 0
        self._has_turned.set()
        self.requests.end_closed()
        for request in self.scheduler.reset(limits):
            text = with_bound(f"{request.max_len} tokens are too many for the pool as it is now", limits, request)
            limit = limits.get_max_len(request.retention)
            self.requests.fail(request, NeverFits(text, requested=request.max_len, limit=limit))
        create = partial(create_sequences, memory.session)
        self._creator = SequenceCreator(self.scheduler, create, self._wake, self.requests.fail, self._tracing)
        self._compute = StepCompute(memory.runner)
        try:
            await notify_ready()
            while not (self._stopping and not self.requests.generations and self.scheduler.is_empty):
                memory.require_ranks()
                await self.step(memory)
        finally:
            self.memory = None
            if not self._stopping:
                self._has_turned.clear()
            self.on_turn(False)
            self._changes.make()
            self._changes.note_reported()
            self.requests.deliver()
            await self._creator.close()
            self._creator = None
            lost = await self._step_worker.drop_step()
            self._compute = None  # it looks into the memory
            self._tracing.drop_steps()
            self.requests.end_closed()
            if lost is not None:
                raise lost

    async def step(self, memory: KvMemory) -> None:
        """One turn: plan a step, reserve its blocks, start it, and finish the one before.

        Two things overlap with a step that is computed. The cache service decides on the next one, counting on the tokens that
        will come, so that the device does not wait for blocks. And where nothing about the next one depends on these tokens, it
        is started behind the one that is computed, and takes its tokens from the device, which does not wait for this loop
        either. Else the loop finishes the step before first, for the reason that StepWait gives. Streams get their text last,
        while the device computes.
        """
        worker = self._step_worker
        if (wait := self._wait_before_plan()) is not None:
            await self._finish(memory, worker.in_flight, wait)
        is_guessing = wait is StepWait.GUESSES
        await worker.wait_until_due(memory.lease.renew_s)
        self._note_changes()
        plan = self._schedule(await self._guess(memory) if is_guessing else NO_GUESSES)
        before = worker.in_flight
        wants_step = not plan.is_empty or (before is None and bool(self.scheduler.state.loading))
        self.on_turn(wants_step or before is not None)
        if wants_step:
            await self._begin(memory, plan, before, is_guessing=is_guessing)
        elif before is not None:
            await self._finish(memory, before, StepWait.BEAM_SEARCHES if self.scheduler.running.num_searching else None)
        else:
            return await self._idle(memory)
        return self.requests.deliver()

    async def _begin(self, memory: KvMemory, plan: Plan, before: InFlight | None, *, is_guessing: bool) -> None:
        """Reserve and start the planned step, and finish the one before: afterwards, where nothing speaks against it."""
        answer = await self._reserve(memory, plan)
        if before is not None and (wait := self._wait_before_start(before, plan, answer)) is not None:
            await self._finish(memory, before, wait)
            before = None
        is_granted = self._start(memory, plan, answer, is_guessing=is_guessing)
        await self._finish(memory, before)
        if not is_granted:
            self.stats.num_waits[StepWait.NOTHING_GRANTED] += 1
            await wait_for(self._wake.loop, _PACE_S)

    def _note_changes(self) -> None:
        """Apply the changes that other tasks made since the last step."""
        self._wake.loop.clear()
        if self._creator is not None:
            self._creator.proceed()
        self.requests.end_closed()
        if self._step_worker.in_flight is None:
            self._changes.make()
        self.scheduler.enter()

    def _schedule(self, guesses: Mapping[int, Int32Array]) -> Plan:
        ordering = self.scheduler.waiting.ordering
        num_switches = ordering.num_switches
        plan = self.scheduler.schedule(time.monotonic(), guesses)
        if ordering.num_switches > num_switches:
            log.info("policy_switched", policy=ordering.policy.name, num_waiting=self.scheduler.num_waiting)
        return plan

    async def _reserve(self, memory: KvMemory, plan: Plan) -> StepResult:
        """The cache service's answer to the plan."""
        step_id = memory.session.step_id
        traceparent = self._tracing.begin_step(step_id + 1, plan, self.scheduler.running)
        self.stats.num_waits.update(plan.waits)
        reply = memory.step(plan, self._step_worker.last_completed(step_id), traceparent)
        answer = await self._step_worker.time_reply(reply)
        self._changes.note_reported()
        return answer

    def _wait_before_plan(self) -> StepWait | None:
        """Why the step that is computed has to be finished before the next one is planned; None: it need not."""
        if self._is_guessing():
            return StepWait.GUESSES  # they start from the tokens that are computed now
        # Requests leave between two steps.
        return StepWait.LEAVING_REQUESTS if self._changes.is_due else None

    def _wait_before_start(self, before: InFlight, plan: Plan, answer: StepResult) -> StepWait | None:
        """Why the step before has to be finished before the planned one is started; None: it need not."""
        if not self._runs_ahead:
            return StepWait.OVERLAP_OFF
        if before.has_loads or has_loads(answer):
            return StepWait.TRANSFERS
        return self.scheduler.find_wait(plan, answer)

    def _start(self, memory: KvMemory, plan: Plan, answer: StepResult, *, is_guessing: bool) -> bool:
        """Copy, forward, sample, in the worker thread from now on. False where nothing was granted."""
        assert self._compute is not None
        work = self.scheduler.apply(plan, answer)
        if work.copies:
            self.stats.num_waits[StepWait.COPIES] += 1
        self._tracing.note_computing(work.sequences)
        rows = self.requests.rows(work)
        moves, step_id = memory.transfers.make_moves(answer), memory.session.step_id
        options = {"is_guessing": is_guessing, "has_loads": has_loads(answer)}
        self._step_worker.start(step_id, work, self._compute, rows, moves, **options)
        return not (work.batch is None and plan.only_asks and not len(answer.transfer_ids) and not len(answer.ready_ids))

    async def _finish(self, memory: KvMemory, step: InFlight | None, wait: StepWait | None = None) -> None:
        """Wait for this step, the first of those that are computed, and emit its tokens. wait: why the next one does so."""
        if step is None:
            return
        if wait is not None:
            self.stats.num_waits[wait] += 1
        computed = await self._while_renewing(memory, step.computing, step.wait)
        if not memory.lease.is_certain:
            self.stats.num_waits[StepWait.LEASE] += 1
        await memory.require_lease()  # if the lease is lost, blocks may hold other engines' K and V: computed again
        self._step_worker.take_step()
        work = step.work
        if step.has_transfers and memory.transfers.note_computed():
            self.scheduler.give_up_loads()
        self.scheduler.note_step(work, step.seconds, memory.transfers.take_moved())
        self._tracing.end_step(step)
        taken = self.requests.emit(work, computed)
        self.requests.end_closed()
        if self.speculator is not None and len(taken):
            self.speculator.note(work, taken, step.seconds + step.idle_seconds, was_guessing=step.is_guessing)
        if work.batch is not None or work.changes.is_move:
            seconds, waited = step.seconds + step.cache_wait_seconds, step.cache_wait_seconds
            self.last_iteration = Iteration(step.step_id, work, self.scheduler.num_waiting, seconds, waited)
            self.stats.time_step(work, seconds, waited)

    def _is_guessing(self) -> bool:
        """Whether the next step may get guesses, or the computing step has some, so that its number of tokens is not known yet.

        Only then does the next step wait for the computing one; plain steps overlap as they do without a speculator.
        """
        if self.speculator is None:
            return False
        step = self._step_worker.in_flight
        has_guesses = step is not None and any(len(guesses) for guesses in step.work.guesses)
        return has_guesses or self.speculator.wants_to_guess(self.scheduler.running)

    async def _guess(self, memory: KvMemory) -> Mapping[int, Int32Array]:
        """Guesses for the sequences that decode. Only the loop appends tokens, so the sequences do not change meanwhile."""
        assert self.speculator is not None
        asking = self.speculator.ask(self.scheduler.running)
        if asking is None:
            return NO_GUESSES
        if not self.speculator.is_slow:
            return asking()
        guessing = self._step_worker.call(asking)
        return await self._while_renewing(memory, guessing, lambda seconds: asyncio.wait({guessing}, timeout=seconds))

    # -- waiting

    async def _idle(self, memory: KvMemory) -> None:
        """Nothing to compute: report the last step as done, then renew the lease until there is something."""
        step_id = memory.session.step_id
        self.requests.deliver()
        self._step_worker.rest()
        if self._num_reported != step_id or memory.transfers.has_unreported:
            self._num_reported = step_id
            await memory.renew(step_id)
            return
        self._changes.note_reported()
        if not await wait_for(self._wake.loop, memory.lease.renew_s):
            await memory.renew()

    async def _while_renewing(self, memory: KvMemory, work: asyncio.Future[T], wait: Callable[[float], Awaitable[object]]) -> T:
        """The work's result. The lease is renewed while the work goes on; work that is done costs no turn of asyncio's loop.

        wait: for the work, for at most so many seconds.
        """
        while not work.done():
            await wait(memory.lease.renew_s)
            if not work.done():
                await memory.renew()
        return work.result()


NO_POOL = Limits(block_size=1, max_len=0, max_known_sequences=0)  # before the first session


def make_engine(
    max_waiting: int,
    proposer: Proposer | None = None,
    tracing: EngineTracing | None = None,
    waiting: WaitingSequences | None = None,
    *,
    runs_ahead: bool = True,
) -> Engine:
    """An engine with its parts. proposer None: no guesses; waiting None: by arrival; runs_ahead: see Engine."""
    tracing, stats, wake = tracing or EngineTracing(None), EngineStats(), Wake()
    scheduler = Scheduler(NO_POOL, waiting, runs_ahead=runs_ahead)
    requests = OpenRequests(scheduler, stats, tracing, max_waiting, wake.all)
    speculator = None if proposer is None else Speculator(proposer, requests.may_guess)
    return Engine(scheduler, requests, stats, tracing, wake, speculator, runs_ahead=runs_ahead)
