"""Fronts: the address of an engine, whose calls and streams are served by fronts.

Owns the address, and which fronts there are: so many processes, or one in the engine's own. It takes the state of the service,
drains, stops and gives the address back. A front that dies is started again; its streams end, and their requests with them.
Health on an address of its own is served here, because it is about the engine. serve_at joins its service to its fronts.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import structlog
from grpc_health.v1 import health_pb2
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvkeeper.common.service.endpoint import HealthListener, HealthServicer, SharedAddress
from kvkeeper.common.service.methods import Contract
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.turns import Turns
from kvkeeper.common.trust.guard import Guard

from ..config import EngineConfig
from ..rpc.methods import CONTRACT
from ..rpc.metrics import PREFIX
from ..rpc.service import EngineService
from .calls import FrontServices, served_methods
from .frames import FrontConfig, FrontState
from .front_process import FrontFailed, FrontHandle, start_front_process, start_front_task

log = structlog.get_logger()

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0  # before a front is started again
_SOUND_S = 10.0  # after which a front's end counts as its first
_STOP_S = 5.0  # beyond the grace of its calls, for a front to end


StartFront = Callable[[], Awaitable[FrontHandle]]


class Fronts:
    """Made by open_fronts."""

    def __init__(self, address: SharedAddress, fronts: list[FrontHandle], start_front: StartFront) -> None:
        self.address = address.address
        self._held, self._fronts, self._start_front = address, fronts, start_front
        self.health_listener: HealthListener | None = None
        self._health = HealthServicer()
        self._services: FrontServices
        self._config: FrontConfig
        self._max_len: Callable[[], int] = lambda: 0
        self._is_serving = self._is_leaving = self._is_stopped = False
        self._keeping: list[asyncio.Task[None]] = []
        self.num_restarts = 0
        self._past_refused: Counter[str] = Counter()  # of fronts that have ended
        self._past_processor_s = 0.0

    async def start(self, services: FrontServices, config: FrontConfig, max_len: Callable[[], int]) -> None:
        """Serve calls from now on. max_len: most tokens of a sequence. Raises StartError."""
        self._services, self._config, self._max_len = services, config, max_len
        for front in self._fronts:
            front.set_up(config, self._state(), services)
        try:
            await asyncio.gather(*(front.ready for front in self._fronts))
        except FrontFailed as error:
            raise StartError(f"--listen {self.address}: {error}") from None
        self._keeping = [asyncio.create_task(self._keep(place)) for place in range(len(self._fronts))]
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        if self.health_listener is not None:
            await self.health_listener.start()

    def open_health(self, listen: str) -> None:
        """Takes a second address, where health alone is served from start to stop. Raises StartError."""
        self.health_listener = HealthListener(listen, self._health)

    async def set_serving(self, is_serving: bool) -> None:
        """Whether the service takes requests."""
        self._is_serving = is_serving
        self._send_state()
        statuses = health_pb2.HealthCheckResponse
        await self._health.set(CONTRACT.service.full_name, statuses.SERVING if is_serving else statuses.NOT_SERVING)

    async def drain(self) -> None:
        """NOT_SERVING for good; set_serving has no effect any more."""
        self._is_leaving = True
        self._send_state()
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float | None = 0.2) -> None:
        """Ends the calls that still run, and the fronts. grace: seconds; None: at once."""
        self._is_stopped = True
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        if self.health_listener is not None:
            await self.health_listener.stop()
        await asyncio.gather(*(_end(front, grace) for front in self._fronts))

    def release(self) -> None:
        """Gives the address back."""
        self._held.release()

    @property
    def processes(self) -> list[int]:
        """Ids of the front processes."""
        return [front.runner.pid for front in self._fronts if front.runner.pid is not None]

    @property
    def refused(self) -> Counter[str]:
        """Calls that were not let in, by reason."""
        return sum((front.refused for front in self._fronts), Counter(self._past_refused))

    def metrics(self, prefix: str, model: str) -> Iterator[Metric]:
        """The metrics of the fronts together."""
        label = {"model": model}
        for family, name, text, value in (
            (GaugeMetricFamily, "fronts", "Front processes.", float(len(self.processes))),
            (CounterMetricFamily, "front_restarts", "Front processes that were started again.", float(self.num_restarts)),
            (GaugeMetricFamily, "front_calls", "Calls and requests of clients that fronts have open.", self._num_calls()),
            (CounterMetricFamily, "front_cpu_seconds", "Processor time of the front processes.", self._processor_s()),
        ):
            metric = family(prefix + name, text, labels=list(label))
            metric.add_metric(list(label.values()), value)
            yield metric

    def _num_calls(self) -> float:
        return float(sum(front.num_calls for front in self._fronts))

    def _processor_s(self) -> float:
        return self._past_processor_s + sum(front.processor_s for front in self._fronts)

    def _state(self) -> FrontState:
        return FrontState(self._is_serving, self._is_leaving, self._max_len())

    def _send_state(self) -> None:
        for front in self._fronts:
            front.send_state(self._state())

    async def _keep(self, place: int) -> None:
        """Start a front again whenever it ends."""
        pause = _FIRST_PAUSE_S
        while True:
            began, front = time.monotonic(), self._fronts[place]
            code = await front.wait_end()
            lived_s = time.monotonic() - began
            pause = _FIRST_PAUSE_S if lived_s > _SOUND_S else min(2 * pause, _LONGEST_PAUSE_S)
            log.warning("front_ended", code=code, seconds=round(lived_s, 3))
            following = await self._start_again(pause)
            self._past_refused += front.refused
            self._past_processor_s += front.processor_s
            front = self._fronts[place] = following
            self.num_restarts += 1
            front.set_up(self._config, self._state(), self._services)
            try:
                await front.ready
            except FrontFailed as error:
                log.warning("front_failed", message=str(error))
            else:
                log.info("front_started", process=front.runner.pid)

    async def _start_again(self, pause: float) -> FrontHandle:
        """After so many seconds, and again after longer ones while the machine has no process, descriptor or thread to give."""
        while True:
            await asyncio.sleep(pause)
            try:
                return await self._start_front()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread
                log.warning("front_failed", message=f"no process could be started: {error}")
                pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _end(front: FrontHandle, grace: float | None) -> None:
    if grace is not None:
        front.ask_stop(grace)
        try:
            async with asyncio.timeout(grace + _STOP_S):
                await front.lost.wait()
        except TimeoutError:
            log.warning("front_killed", process=front.runner.pid)
    await front.close()


async def open_fronts(listen: str, num_processes: int, log_level: str) -> Fronts:
    """Takes the address, and starts the fronts; no call is served yet. Raises StartError, AddressInUse.

    num_processes: 0: one front, in this process.
    """
    address = SharedAddress(listen)
    start_front = partial(start_front_process, log_level) if num_processes else start_front_task
    fronts: list[FrontHandle] = []
    try:
        for _ in range(max(num_processes, 1)):
            fronts.append(await start_front())
    except BaseException:
        for front in fronts:
            await front.close()
        address.release()
        raise
    return Fronts(address, fronts, start_front)


Protocols = Sequence[tuple[Contract, Any]]  # beside our own, each with what serves its calls


async def serve_at(
    fronts: Fronts, config: EngineConfig, service: EngineService, turns: Turns, guard: Guard, others: Protocols
) -> None:
    """Returns calls from now on. Raises StartError."""
    own = front_config(config, fronts.address, service.message_bytes, has_gateway=bool(others))
    await fronts.start(_front_services(service, turns, guard, others), own, lambda: service.max_len)


def _front_services(service: EngineService, turns: Turns, guard: Guard, others: Protocols) -> FrontServices:
    own = CONTRACT.with_prompt_bytes(service.message_bytes)
    methods = served_methods(own, service)
    for contract, answering in others:
        methods.update(served_methods(contract.with_prompt_bytes(service.message_bytes), answering))
    return FrontServices(
        methods,
        turns,
        service.admit_for_front,
        service.stop_at,
        service.streams.counted,
        service.pace,
        lambda path, caller: guard.refused.note("TENANT_NOT_ALLOWED", path, caller),
        service.text,
        service.unread,
        own,
    )


def front_config(config: EngineConfig, address: str, message_bytes: int, *, has_gateway: bool) -> FrontConfig:
    """Bounds of connections and of memory are divided among the fronts; each can take one message at least.

    message_bytes: of a message with a prompt.
    """
    own = {each.name: getattr(config, each.name) for each in fields(FrontConfig) if hasattr(config, each.name)}
    num_fronts = max(config.fronts, 1)
    shared = {name: -(-own[name] // num_fronts) for name in ("connections", "many_calls")}
    shared["receive_memory"] = max(message_bytes, own["receive_memory"] // num_fronts)
    given = {"listen": address, "message_bytes": message_bytes, "has_gateway": has_gateway}
    return FrontConfig(**{**own, **shared, **given})


def metrics_at(fronts: Fronts, service: EngineService, guard: Guard) -> Iterator[Metric]:
    """The metrics of a scrape."""
    yield from service.metrics()
    yield from fronts.metrics(PREFIX, service.model_name)
    yield from guard.metrics(PREFIX, fronts.refused, model=service.model_name)
