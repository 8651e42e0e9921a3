"""Both services as processes whose output goes to a descriptor of a test's, which need not be read or may be broken.

So their logs tell nothing: that they serve is seen by their health.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions
from tests.support.processes.fleet import DEADLINE_S
from tests.support.processes.services import environment, short_folder

_CACHE_FLAGS = ("--pool-memory", "8MiB", "--num-pools", "2")


@dataclass(frozen=True, slots=True)
class UnreadServices:
    """The processes, and clients of them that give up at once where a service does not answer."""

    folder: Path
    cache: asyncio.subprocess.Process
    engine: asyncio.subprocess.Process
    cache_client: AsyncCacheClient
    engine_client: AsyncEngineClient

    async def end(self) -> list[int]:
        """Asks the engine and then the cache service to stop; their exit codes."""
        codes = []
        for process in (self.engine, self.cache):
            process.terminate()
            async with asyncio.timeout(DEADLINE_S):
                codes.append(await process.wait())
        return codes


async def start(
    module: str, descriptor: int, folder: Path, *flags: str, output: int | None = None
) -> asyncio.subprocess.Process:
    """A program of ours whose outputs are the descriptor, but stdout where output is given."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, env=environment(folder),
        stdin=asyncio.subprocess.DEVNULL, stdout=descriptor if output is None else output, stderr=descriptor,
    )  # fmt: skip


@asynccontextmanager
async def unread_services(descriptor: int, engine_flags: Sequence[str]) -> AsyncIterator[UnreadServices]:
    """Serve when the block begins, and are gone after it."""
    options = CallOptions(timeout_s=DEADLINE_S, retry_s=0.0)
    processes: list[asyncio.subprocess.Process] = []
    with short_folder() as folder:
        cache, engine = f"unix:{folder}/cache", f"unix:{folder}/engine"
        try:
            flags = ("--listen", cache, *_CACHE_FLAGS)
            processes.append(await start("kvkeeper.cache_service", descriptor, folder, *flags))
            flags = ("--listen", engine, "--cache", cache, *engine_flags)
            processes.append(await start("kvkeeper.engine_service", descriptor, folder, *flags))
            async with asyncio.timeout(DEADLINE_S):
                await until_serving(cache)
                await until_serving(engine)
            async with AsyncCacheClient(cache, options) as cache_client, AsyncEngineClient(engine, options) as engine_client:
                yield UnreadServices(folder, *processes, cache_client, engine_client)
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()
