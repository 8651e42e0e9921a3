"""The engine service as a process of its own, with the hash toy, and its log."""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

from tests.support.processes.service_pair import DEADLINE_S, num_fronts


@contextlib.asynccontextmanager
async def engine_process(*flags: str, module: str = "kvkeeper.engine_service") -> AsyncIterator[Process]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    always = ("--model", "hash-toy", "--block-size", "4", "--fronts", str(num_fronts()))
    command = [sys.executable, "-m", module, *always, *flags]
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # its pipes would close after the loop


async def logged(process: Process, event: str, seconds: float = DEADLINE_S) -> dict[str, object]:
    """Wait until the log tells the event: that line."""
    assert process.stderr is not None
    async with asyncio.timeout(seconds):
        while line := await process.stderr.readline():
            told: dict[str, object] = json.loads(line)
            if told["event"] == event:
                return told
    raise AssertionError(f"the engine ended before it logged {event}")


async def ready(process: Process) -> None:
    """Wait until the log says so."""
    await logged(process, "ready")
