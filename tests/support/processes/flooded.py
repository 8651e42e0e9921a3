"""Both services on ports of loopback, a client that asks for a few tokens again and again, and floods beside it.

Both ask for tokens, the floods have none. There are four servers: that of the engine's front, that of the cache service, and
the health listeners of both, which their own loops serve.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvkeeper.client import AsyncEngineClient, CallOptions, Credentials
from kvkeeper.common.trust.caller import Caller, Role
from tests.support.processes.fleet import DEADLINE_S, Fleet
from tests.support.processes.service_pair import generate
from tests.support.processes.services import environment, free_ports, short_folder
from tests.support.trust.guarded_server import TokenFile

SERVERS = {
    "engine": "/kvkeeper.engine.v1.EngineService/Generate",
    "cache": "/kvkeeper.cache.v1.CacheService/Step",
    "engine health": "/grpc.health.v1.Health/Check",
    "cache health": "/grpc.health.v1.Health/Check",
}
_PROMPT, _NUM_NEW = [5, 3, 8, 1, 9, 2], 4
_MEMORY_PAUSE_S = 0.05


@dataclass
class Flooded:
    """The services, and a client of the engine that has a token."""

    fleet: Fleet
    addresses: dict[str, str]  # by server
    client: AsyncEngineClient

    async def ask(self) -> float:
        """Seconds until a request was answered."""
        begun = time.perf_counter()
        await generate(self.client, _PROMPT, _NUM_NEW)
        return time.perf_counter() - begun

    def memory_mb(self) -> float:
        """Of both services, with their fronts."""
        pids = [each.process.pid for each in (self.fleet.cache, *self.fleet.engines)]
        return sum(map(_resident_mb, [pid for own in pids for pid in (own, *_children(own))]))

    async def most_memory_mb(self, task: "asyncio.Task[object]") -> float:
        """The most until the task is done."""
        most = 0.0
        while not task.done():
            most = max(most, self.memory_mb())
            await asyncio.wait((task,), timeout=_MEMORY_PAUSE_S)
        return most

    @asynccontextmanager
    async def flood(
        self, server: str, kind: str, num_connections: int, *, num_frames: int = sys.maxsize, seconds: float = DEADLINE_S
    ) -> AsyncIterator["asyncio.Task[list[tuple[int, bool]]]"]:
        """A flood, which ends with the block at the latest; the task's result is that of flood() by connection."""
        words = [f"--path={SERVERS[server]}", f"--connections={num_connections}", f"--frames={num_frames}"]
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "tests.support.processes.flood",
                self.addresses[server],
                kind,
                *words,
                f"--seconds={seconds}",
            ),
            env=environment(self.fleet.folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )

        async def result() -> list[tuple[int, bool]]:
            told, _ = await process.communicate()
            return [(sent, is_refused) for sent, is_refused in json.loads(told or "[]")]

        task = asyncio.create_task(result())
        try:
            yield task
        finally:
            if process.returncode is None:
                process.kill()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()


def _resident_mb(pid: int) -> float:
    """0 where the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(status.partition("VmRSS:")[2].split()[0]) / 1e3


def _children(pid: int) -> list[int]:
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


@asynccontextmanager
async def flooded() -> AsyncIterator[Flooded]:
    """Serves when the block begins, with one front."""
    with short_folder() as folder:
        (cache, engine), health = free_ports(), free_ports()
        tokens = TokenFile(folder / "tokens")
        token_files = {role: _token_file(folder, tokens, role) for role in (Role.ENGINE, Role.CLIENT)}
        guarded = {"auth_tokens": tokens.path}
        found = Fleet(
            folder,
            1,
            {"health_address": health[0], "runtime_dir": folder / "run", **guarded},
            {"health_address": health[1], "fronts": 1, "cache_token_file": token_files[Role.ENGINE], **guarded},
        )
        found.cache_address, found.engine_addresses = cache, [engine]
        addresses = dict(zip(SERVERS, (engine, cache, health[1], health[0]), strict=True))
        try:
            await found.start()
            options = CallOptions(timeout_s=DEADLINE_S)
            async with AsyncEngineClient(engine, options, Credentials(token_file=token_files[Role.CLIENT])) as client:
                world = Flooded(found, addresses, client)
                await world.ask()
                yield world
        except Exception as error:
            error.add_note(found.tails if found.engines else "no engine was started")
            raise
        finally:
            await found.close()


def _token_file(folder: Path, tokens: TokenFile, role: Role) -> Path:
    path = folder / f"token-{role}"
    path.touch(mode=0o600)
    path.write_text(tokens.add(Caller(str(role), "*", role)) + "\n")
    return path
