"""One cache service and several engines, each a process of its own that a test may kill, stop and start again.

Owns the processes, their addresses in one folder, and what their logs say. Rule: everything is waited for by an event in a log
or by the end of a process, nothing by time. The model is the hash toy where no other is named.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.failpoints.board import Board
from tests.support.failpoints.points import write_code
from tests.support.processes.service_logs import open_log
from tests.support.processes.service_pair import num_fronts
from tests.support.processes.services import environment, short_folder

BLOCK_SIZE = 4
DEADLINE_S = 120.0  # of anything that is waited for, on a machine however busy
_LAST_LINES = 40
_PREFILL_TIMEOUT_S = 5.0


class Service:
    """One process of a service, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, name: str = "service") -> None:
        self.process = process
        self._name = name
        self._log = open_log(name)
        self.lines: list[str] = []
        self.events: Counter[str] = Counter()
        self.ready_after = 0.0  # seconds from its start until it said so, less those that it waited for a core
        self._started_at, self._own_wait = time.monotonic(), _core_wait_s("self")
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def until(self, event: str, count: int = 1) -> None:
        """Its log has said so that many times. Raises RuntimeError with the log when the process ends before that."""
        async with asyncio.timeout(DEADLINE_S):
            while self.events[event] < count:
                if self.is_ended:
                    raise RuntimeError(f"ended with {self.process.returncode} before {event}:\n{self.tail}")
                self._news.clear()
                await self._news.wait()

    async def until_stopped(self) -> None:
        """Until a signal has stopped it, its own or another's. It continues with resume."""
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(os.waitid, os.P_PID, self.process.pid, os.WSTOPPED)

    async def stop(self) -> None:
        """SIGSTOP, and until all its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        await self.until_stopped()

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, and until it is gone."""
        self.process.kill()
        await self.end()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def end(self) -> int:
        """Until the process has ended; its exit code."""
        async with asyncio.timeout(DEADLINE_S):
            code = await self.process.wait()
            await self._reading
        self.process._transport.close()  # type: ignore[attr-defined]  # its pipe would close after the loop
        return code

    @property
    def is_ended(self) -> bool:
        """Its log has ended, so the process has, too."""
        return self._reading.done()

    @property
    def tail(self) -> str:
        """The end of its log, and what became of it: a process that a signal ended says nothing itself."""
        state = "runs" if self.process.returncode is None else f"has ended with {self.process.returncode}"
        return f"{self._name}, pid {self.process.pid}, {state}:\n" + "".join(self.lines[-_LAST_LINES:])

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.lines.append(line.decode())
            self._log.write(line)
            del self.lines[: -10 * _LAST_LINES]
            try:
                event = json.loads(line)["event"]
            except (ValueError, KeyError):
                continue
            if event == "ready" and not self.events["ready"]:
                wall = time.monotonic() - self._started_at
                waited = _core_wait_s(str(self.process.pid)) + _core_wait_s("self") - self._own_wait
                self.ready_after = max(0.0, wall - waited)
            self.events[event] += 1
            self._news.set()
        self._log.close()
        self._news.set()


def _core_wait_s(pid: str) -> float:
    """Seconds that a process was ready to run and had no core: load of the machine, no work of its own.

    0 where it has ended before its log was read: nothing tells any more.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


class Fleet:
    """One cache service and several engines as processes, and the folder of their addresses."""

    def __init__(
        self,
        folder: Path,
        num_engines: int,
        cache_flags: dict[str, Any],
        engine_flags: dict[str, Any],
        first_flags: dict[str, Any] | None = None,
        cache_switches: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.cache_address = f"unix:{folder}/cache"
        self.engine_addresses = [f"unix:{folder}/engine{number}" for number in range(num_engines)]
        self.cache: Service
        self.engines: list[Service] = []
        self._cache_flags = {"num_blocks": 64, "drain_timeout": 0.5, "num_pools": 1} | cache_flags
        self._engine_flags = {
            "model": "hash-toy", "block_size": BLOCK_SIZE, "token_budget": 64, "chunk_size": 16, "threads": 1,
            "reconnect_timeout": DEADLINE_S, "drain_timeout": DEADLINE_S, "fronts": num_fronts(),
        } | engine_flags  # fmt: skip
        self._first_flags = first_flags
        self._cache_switches = cache_switches
        self.flags_of: dict[int, dict[str, Any]] = {}  # of single engines, by number, beside those of all
        self._all: list[Service] = []
        self.wrapper = ""  # a module that runs each service's, which it is handed with the flags; empty: none
        self.boards: dict[str, Path] = {}  # by address: the service there has failpoints, and this file is their board
        self._failpoint_code = self.folder / "failpoint_code"

    def add_boards(self, num_points: int) -> None:
        """All services have failpoints from their next start on."""
        write_code(self._failpoint_code)
        for number, address in enumerate([self.cache_address, *self.engine_addresses]):
            self.boards[address] = Board(self.folder / f"board{number}", num_points).path

    async def start(self) -> None:
        """Everything, until it serves."""
        await self.start_cache()
        self.engines = list(await asyncio.gather(*(self.spawn_engine(number) for number in range(len(self.engine_addresses)))))
        await asyncio.gather(*(engine.until("ready") for engine in self.engines))

    async def start_cache(self, *switches: str) -> None:
        """Until it serves. switches: flags without a value, beside those of all."""
        self.cache = await self.spawn_cache(*switches)
        await self.cache.until("ready")

    async def spawn_cache(self, *switches: str) -> Service:
        flags = {"listen": self.cache_address} | self._cache_flags
        return await self._spawn("kvkeeper.cache_service", *self._cache_switches, *switches, **flags)

    async def start_engine(self, number: int) -> None:
        """Until it serves."""
        self.engines[number] = await self.spawn_engine(number)
        await self.engines[number].until("ready")

    async def spawn_engine(self, number: int) -> Service:
        module, flags = "kvkeeper.engine_service", self._engine_flags | {"listen": self.engine_addresses[number]}
        flags |= self.flags_of.get(number, {})
        if number == 0 and self._first_flags is not None:
            module, flags = "tests.support.processes.stopping_engine", flags | self._first_flags
        return await self._spawn(module, cache=self.cache_address, **flags)

    async def _spawn(self, module: str, *switches: str, **flags: Any) -> Service:
        words = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
        words += switches
        if (board := self.boards.get(flags["listen"])) is not None:
            words, module = [str(board), str(self._failpoint_code), module, *words], "tests.support.failpoints.process"
        elif self.wrapper:
            words, module = [module, *words], self.wrapper
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *words, env=environment(self.folder),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._all.append(service := Service(process, module.rpartition(".")[2]))
        return service

    async def close(self) -> None:
        for service in self._all:
            if service.process.returncode is None:
                service.process.kill()
            await service.end()

    @property
    def tails(self) -> str:
        """The ends of all logs, for a failure's report."""
        return "\n\n".join(service.tail for service in [self.cache, *self.engines])


@asynccontextmanager
async def fleet(
    num_engines: int,
    cache_flags: dict[str, Any] | None = None,
    first_flags: dict[str, Any] | None = None,
    cache_switches: Sequence[str] = (),
    num_failpoints: int = 0,
    *,
    has_prefill_engine: bool = False,
    wrapper: str = "",
    **engine_flags: Any,
) -> AsyncIterator[Fleet]:
    """Serves when the block begins; a failure in it is told with the ends of the logs.

    first_flags: of the first engine, which then is one of stopping_engine.py. cache_switches: flags without a value.
    num_failpoints: of each service; 0: they run as they are. has_prefill_engine: the last engine computes the first one's
    prompts, beside its own requests. wrapper: see Fleet.
    """
    with short_folder() as folder:
        found = Fleet(folder, num_engines, cache_flags or {}, engine_flags, first_flags, cache_switches)
        found.wrapper = wrapper
        if num_failpoints:
            found.add_boards(num_failpoints)
        if has_prefill_engine:
            found.flags_of[0] = {"role": "decode", "prefill": found.engine_addresses[-1], "prefill_min_tokens": 1}
            found.flags_of[0] |= {"prefill_timeout": _PREFILL_TIMEOUT_S}
        try:
            await found.start()
            yield found
        except Exception as error:
            error.add_note(found.tails if found.engines else "no engine was started")
            raise
        finally:
            await found.close()
