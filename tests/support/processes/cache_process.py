"""A cache service as a process of its own, for tests that look at it from outside or kill it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from tests.support.processes.services import environment, short_folder

_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class CacheProcess:
    """Where it listens, and what runs it."""

    address: str
    process: asyncio.subprocess.Process
    log_path: Path


@asynccontextmanager
async def cache_process(*flags: str) -> AsyncIterator[CacheProcess]:
    """Returns calls when the block begins, and is gone after it."""
    with short_folder() as folder:
        address, log_path = f"unix:{folder}/s", folder / "log"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvkeeper.cache_service", "--listen", address, *flags,
                env=environment(folder), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                ended = asyncio.ensure_future(process.wait())
                ready = asyncio.ensure_future(channel.channel_ready())
                await asyncio.wait([ended, ready], timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
                if not ready.done():
                    ready.cancel()
                    raise RuntimeError(f"the cache service did not start: {log_path.read_text()}")
            yield CacheProcess(address, process, log_path)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
