"""Supervisor: keeps services running, each a process of its own. A service that dies is started again while the others stay.

Rules: services start in order, each when the one before it serves, and end in the opposite order. Until all of them have
served, the end of one is a failed start and ends the others. From then on a service that dies is started again, after a pause
that doubles while it dies young. A service that dies young several times in a row is given up, which ends the others too. Every
event is reported.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_YOUNG_S = 30.0  # since it was started
_MAX_YOUNG = 5  # deaths in a row
_SHORTAGE_S = 1.0  # between two tries where the host has no process to give


class Running(Protocol):
    """A process of a service, such as ServiceProcess. ended is done when the process has ended."""

    name: str
    ended: "asyncio.Task[int]"

    @property
    def exit_code(self) -> int | None: ...

    def how_it_ended(self) -> str: ...

    async def end(self, grace_s: float) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """How a service is started, and a call that returns when it serves."""

    name: str
    start: Callable[[], Awaitable[Running]]
    until_serving: Callable[[], Awaitable[None]]


class GivenUp(Exception):
    """A service cannot be kept running. The text is one line; process is the service's last process."""

    def __init__(self, text: str, process: Running) -> None:
        super().__init__(text)
        self.process = process


class RestartRule:
    """How long to wait before a service that died is started again. Pure: its age is handed in."""

    def __init__(self) -> None:
        self._num_young = 0

    def pause_after(self, age_s: float) -> float | None:
        """Seconds to wait; None when the service is given up. age_s: how long it lived."""
        self._num_young = self._num_young + 1 if age_s < _YOUNG_S else 1
        if self._num_young >= _MAX_YOUNG:
            return None
        return min(_FIRST_PAUSE_S * 2 ** (self._num_young - 1), _LONGEST_PAUSE_S)


class Supervisor:
    """Starts services in order, restarts those that die, and ends all of them. report gets a line for people on each event."""

    def __init__(self, services: Sequence[Service], report: Callable[[str], None]) -> None:
        self._services = services
        self._report = report
        self._running: dict[str, Running] = {}  # in order of start
        self._started_at: dict[str, float] = {}

    async def start(self) -> None:
        """Returns when all services serve. Raises GivenUp when one of them ends first."""
        for service in self._services:
            self._report(f"starting the {service.name} service")
            await self._start(service)
            serving = asyncio.ensure_future(service.until_serving())
            try:
                ends = {process.ended for process in self._running.values()}
                await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
                self._raise_if_ended()
                await serving
            finally:
                serving.cancel()

    async def keep(self) -> None:
        """Keeps the services running, after start; never returns. Raises GivenUp."""
        keeping = [asyncio.create_task(self._keep(service)) for service in self._services]
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def end(self, grace_s: float) -> None:
        """Ends all running services, the one started last first."""
        for service in reversed(self._services):
            if service.name in self._running:
                await self._running[service.name].end(grace_s)

    def kill(self) -> None:
        """Kills all running services at once."""
        for process in self._running.values():
            process.kill()

    async def _start(self, service: Service) -> None:
        self._running[service.name] = await service.start()
        self._started_at[service.name] = time.monotonic()

    def _raise_if_ended(self) -> None:
        for process in self._running.values():
            if process.ended.done():
                others = "".join(f"; ending the {name} service" for name in self._running if name != process.name)
                raise GivenUp(f"the {process.name} service {process.how_it_ended()}{others}", process)

    async def _keep(self, service: Service) -> None:
        rule = RestartRule()
        while True:
            process = self._running[service.name]
            await asyncio.shield(process.ended)
            pause = rule.pause_after(time.monotonic() - self._started_at[service.name])
            how = f"the {service.name} service {process.how_it_ended()}"
            if pause is None:
                raise GivenUp(f"{how}, {_MAX_YOUNG} times in a row soon after its start; ending all", process)
            self._report(f"{how}; starting it again in {pause:g} s, the other stays")
            await asyncio.sleep(pause)
            await self._start_again(service)
            await self._report_serving(service)

    async def _start_again(self, service: Service) -> None:
        """Starts a service, as soon as the host has a process and what it needs for it."""
        while True:
            try:
                return await self._start(service)
            except (OSError, RuntimeError) as error:
                self._report(f"the {service.name} service cannot be started now: {error}; trying again in {_SHORTAGE_S:g} s")
            await asyncio.sleep(_SHORTAGE_S)

    async def _report_serving(self, service: Service) -> None:
        """Reports when the service serves; returns without a word when it ends first."""
        serving = asyncio.ensure_future(service.until_serving())
        try:
            await asyncio.wait({serving, self._running[service.name].ended}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not self._running[service.name].ended.done():
                self._report(f"the {service.name} service serves again")
        finally:
            serving.cancel()
