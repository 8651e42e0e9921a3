"""Row 19: a service dies, stands still or is held up at any of its failpoints, and no client of an engine sees a wrong thing.

Real processes with a call at each await, and before each statement that writes what outlives a process. Under the load of two
tenants, and of a third that uses the one-item calls, one point after the other is armed in one of them; half of the services
that are started again meet another one before they serve, and some points fire while one cache service takes over from another.
In half of the units one engine computes the other one's prompts.
The history of all requests is checked when the load has ended, and the pool for blocks that leaked.
"""

import asyncio
import random
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from tests.soak.bystander import Bystander
from tests.soak.cache_kills import check_nothing_is_left
from tests.soak.row import Counts
from tests.support.failpoints.board import Action, Armed, Board
from tests.support.failpoints.points import all_points
from tests.support.failpoints.process import FIRED
from tests.support.processes.fleet import Fleet, Service, fleet
from tests.support.processes.fleet_load import Load, load_on
from tests.support.worlds.memory_folder import memory_folder

NUM_ENGINES = 2
LEASE_MS = 1000
_REFUSALS = frozenset({"CACHE_SERVICE_DOWN"})
_TENANTS = ("first", "second")
_ACTIONS = (Action.KILL, Action.STOP, Action.DELAY)
_WORKERS = {"plain": 2, "resubmitting": 2, "threaded": 1}
_CACHE = NUM_ENGINES  # its number among the services
_LEARNING_CHUNKS = 200
_PATIENCE_CHUNKS = 400  # of both engines, for a point that may not be passed again
_MOST_PASSES = 20
_UPGRADES = 0.15  # of the faults come while another cache service takes over
_LEAST_REACHED = 120  # points that the services of one unit pass
_STRIDE = 17  # places of the order for each point that fires, so that units near each other break different ones
_BRIEF_S, _LONG_S = (0.02, 0.3), (1.5, 2.5)  # of a stop or a delay; the long ones are past a lease


async def run(seed: int, num_fired: int) -> Counts:
    """Counts failpoints that fired, each a fault by itself."""
    rng, points = random.Random(seed), all_points()
    is_kept, has_digests, has_prefill_engine = rng.random() < 0.7, rng.random() < 0.5, rng.random() < 0.5
    with memory_folder() if is_kept else nullcontext() as folder:
        flags: dict[str, Any] = {"num_blocks": 64 * NUM_ENGINES, "host_memory": "1MiB"}
        flags |= {"memory_dir": folder} if folder else {}
        switches = ["--keep", *(["--block-digests"] if has_digests else [])] if is_kept else []
        options = {"lease_ms": LEASE_MS, "has_prefill_engine": has_prefill_engine}
        async with fleet(NUM_ENGINES, flags, None, switches, len(points), **options) as services:
            bystander = Bystander(services.cache_address, random.Random(seed))
            async with load_on(services, rng, _REFUSALS, _TENANTS) as load, asyncio.TaskGroup() as beside:
                breaking = _Breaking(services, load, rng, len(points), seed * num_fired, has_prefill_engine)
                load.start(**_WORKERS)
                beside.create_task(bystander.run())
                await load.until_chunks(_LEARNING_CHUNKS)
                while len(breaking.fired) < num_fired:
                    if is_kept and rng.random() < _UPGRADES:
                        await breaking.break_upgrade()
                    else:
                        await breaking.break_one()
                await load.until_chunks(1, *range(NUM_ENGINES))
                bystander.is_over = True
                await load.stop()
            assert bystander.num_calls > 0
            breaking.check_reach()
            await check_nothing_is_left(services)
    return Counts(len(breaking.fired), len(breaking.fired))


class _Breaking:
    """Arms points in the services of a fleet, and brings back what they ended."""

    def __init__(
        self, services: Fleet, load: Load, rng: random.Random, num_points: int, first: int, has_prefill_engine: bool
    ) -> None:
        """first: how many points the units before this one have broken."""
        self._helper = NUM_ENGINES - 1 if has_prefill_engine else None  # computes prompts of engine 0
        self.fired: list[Armed] = []
        self._services, self._load, self._rng = services, load, rng
        self._boards = [Board(services.boards[address]) for address in (*services.engine_addresses, services.cache_address)]
        self._at_start = [board.passed_points() for board in self._boards]  # passed before anything was asked
        # All units go through the points in one order, each from where the one before it ended.
        order = np.random.default_rng(0).permutation(num_points)
        self._place = (order - first * _STRIDE) % num_points  # of each point, from here on
        self._round = first * _STRIDE // num_points
        self._at_upgrade: list[int] = []  # passed while another cache service took over; not known before the first time
        self._times_armed: Counter[int] = Counter()  # by point

    async def break_one(self) -> None:
        """Arms one point, and when it fires sees that everything comes back."""
        await self._load.until_chunks(1, *range(NUM_ENGINES))
        number = self._rng.choice([_CACHE, *range(NUM_ENGINES)])
        armed = self._draw(number, self._boards[number].passed_points(), _ACTIONS)
        service = self._service(number)
        num_before = service.events[FIRED]
        self._note_fault(number, armed)
        if number == self._helper:
            self._load.note_shaken(0)
        self._boards[number].arm(armed)
        if await self._has_fired(number, service, num_before):
            await self._mend(number, service, armed)
        else:
            self._load.note_start(number)
        if number == self._helper:
            self._load.note_shaken(0, is_over=True)

    def _draw(self, number: int, passed: list[int], actions: tuple[Action, ...]) -> Armed:
        """The next of the points that the service passes; in each round through all points another action for each."""
        point = min(passed, key=lambda point: (self._times_armed[point], self._place[point]))
        self._times_armed[point] += 1
        action = actions[(self._round + point) % len(actions)]
        is_rare = self._boards[number].counts[point] <= _MOST_PASSES
        seconds = self._rng.uniform(*(_BRIEF_S if self._rng.random() < 0.7 else _LONG_S))
        return Armed(point, action, 0 if is_rare else self._rng.randrange(_MOST_PASSES), seconds)

    def _note_fault(self, number: int, armed: Armed) -> None:
        if number == _CACHE:
            self._load.note_fault(*range(NUM_ENGINES))
        elif armed.action is Action.KILL:
            self._load.note_kill(number)
        else:
            self._load.note_fault(number)

    async def _has_fired(self, number: int, service: Service, num_before: int) -> bool:
        """False where it was not passed again for long, and is not armed any more."""
        firing = asyncio.ensure_future(service.until(FIRED, num_before + 1))
        going = asyncio.ensure_future(self._load.until_chunks(_PATIENCE_CHUNKS))
        try:
            await asyncio.wait({firing, going}, return_when=asyncio.FIRST_COMPLETED)
            if not firing.done() and self._boards[number].disarm():
                return False
            await firing
        finally:
            for waiting in (firing, going):
                waiting.cancel()
            await asyncio.gather(firing, going, return_exceptions=True)
        return True

    async def _mend(self, number: int, service: Service, armed: Armed) -> None:
        self.fired.append(armed)
        if armed.action is Action.STOP:
            await service.until_stopped()
            await asyncio.sleep(armed.seconds)  # how long it stands still is a part of the fault
            service.resume()
        elif armed.action is Action.KILL:
            await service.end()
            await self._start_again(number)

    async def _start_again(self, number: int) -> None:
        """Perhaps by a start that is killed or held up, too."""
        board = self._boards[number]
        armed = self._draw(number, self._at_start[number], (Action.KILL, Action.DELAY))
        is_armed = self._rng.random() < 0.5
        if is_armed:
            board.arm(armed)
        service = await self._spawn(number)
        with suppress(RuntimeError):  # it ended before it served
            await service.until("ready")
        if is_armed and not board.disarm():
            self.fired.append(armed)
            if armed.action is Action.KILL:
                await service.end()
                service = await self._spawn(number)
        await service.until("ready")
        self._load.note_start(number)

    async def break_upgrade(self) -> None:
        """Another cache service takes over from the one that serves, and either may be killed or held up meanwhile."""
        await self._load.until_chunks(1, *range(NUM_ENGINES))
        board, old, before = self._boards[_CACHE], self._services.cache, self._boards[_CACHE].counts.copy()
        num_fired = old.events[FIRED]
        self._load.note_fault(*range(NUM_ENGINES))
        is_armed = bool(self._at_upgrade)
        if is_armed:
            armed = replace(self._draw(_CACHE, self._at_upgrade, (Action.KILL, Action.DELAY)), num_passes=0)
            board.arm(armed)
        new = await self._services.spawn_cache("--take-over")
        with suppress(RuntimeError):  # it ended before it served
            await new.until("ready")
        if is_armed and not board.disarm():
            self.fired.append(armed)
            if armed.action is Action.KILL and await _fired_first(new, 1, old, num_fired + 1):
                await new.end()
                with suppress(ProcessLookupError):  # it may have been asked already, and have ended
                    old.terminate()
                await old.end()
                new = await self._spawn(_CACHE)
                await new.until("ready")
        await old.end()
        self._services.cache = new
        self._at_upgrade = np.flatnonzero(board.counts != before).tolist()

    def check_reach(self) -> None:
        """A load that passes few points would show little."""
        reached = set().union(*(board.passed_points() for board in self._boards))
        assert len(reached) >= _LEAST_REACHED, f"only {len(reached)} failpoints were passed"

    async def _spawn(self, number: int) -> Service:
        if number == _CACHE:
            self._services.cache = await self._services.spawn_cache()
        else:
            self._services.engines[number] = await self._services.spawn_engine(number)
        return self._service(number)

    def _service(self, number: int) -> Service:
        return self._services.cache if number == _CACHE else self._services.engines[number]


async def _fired_first(one: Service, count: int, other: Service, other_count: int) -> bool:
    """Whether the log of the one tells of so many points that fired, before that of the other does. One of them will."""
    told = asyncio.ensure_future(_tells(one, count))
    others = asyncio.ensure_future(_tells(other, other_count))
    try:
        while not any(task.done() and task.result() for task in (told, others)):
            await asyncio.wait({task for task in (told, others) if not task.done()}, return_when=asyncio.FIRST_COMPLETED)
        return told.done() and told.result()
    finally:
        for task in (told, others):
            task.cancel()
        await asyncio.gather(told, others, return_exceptions=True)


async def _tells(service: Service, count: int) -> bool:
    """Whether its log tells of so many points that fired before it ends."""
    with suppress(RuntimeError):
        await service.until(FIRED, count)
        return True
    return False
