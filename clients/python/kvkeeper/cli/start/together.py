"""Services under a supervisor, until a signal ends them. A second signal ends them at once.

Owns the signals and what is told: one text when all of them serve, and a line for each end.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvkeeper.cli.console.problems import EXIT_FAILED, EXIT_USAGE, complain
from kvkeeper.cli.start.supervisor import GivenUp, Service, Supervisor
from kvkeeper.client import KvkeeperError
from kvkeeper.common.service import output

_GRACE_S = 20.0  # a service has its own, shorter limit for draining; a second signal ends at once
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Together:
    """The services of one command."""

    def __init__(self, services: Sequence[Service], ready_text: Callable[[], Awaitable[str]], *, is_json: bool) -> None:
        """ready_text: what is printed when all serve; it may raise KvkeeperError where one has died again."""
        self._services = services
        self._ready_text = ready_text
        self._is_json = is_json
        self._supervisor = Supervisor(services, tell)
        self._stop: asyncio.Future[signal.Signals]

    def run(self, last_words: str) -> int:
        """The exit code. last_words: what is told where a signal has ended them. An output that no one takes ends nothing."""
        with output.queued():
            exit_code = asyncio.run(self._run())
            if exit_code > 128:
                tell(last_words)
        return exit_code

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        for signum in _STOP_SIGNALS:
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # with nohup it stays ignored
                loop.add_signal_handler(signum, self._on_signal, signum)
        serving = asyncio.create_task(self._serve())
        try:
            either: set[asyncio.Future[Any]] = {serving, self._stop}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                return 128 + self._stop.result()
            await serving
        except GivenUp as given_up:
            complain(str(given_up), reason="SERVICE_ENDED", is_json=self._is_json)
            return EXIT_USAGE if given_up.process.exit_code == EXIT_USAGE else EXIT_FAILED
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self._supervisor.end(_GRACE_S)
        raise AssertionError("services are kept running until a signal")

    async def _serve(self) -> None:
        """Start the services, report when they serve, and keep them running. Raises GivenUp."""
        await self._supervisor.start()
        telling = asyncio.create_task(self._tell_ready())
        try:
            await self._supervisor.keep()
        finally:
            telling.cancel()

    async def _tell_ready(self) -> None:
        while True:
            try:
                return print(await self._ready_text(), flush=True)
            except KvkeeperError:  # a service has died already and is being started again
                for service in self._services:
                    await service.until_serving()

    def _on_signal(self, signum: signal.Signals) -> None:
        if not self._stop.done():
            self._stop.set_result(signum)
            return
        self._supervisor.kill()  # asked twice: no more grace


def tell(text: str) -> None:
    print(f"kvkeeper: {text}", file=sys.stderr, flush=True)
