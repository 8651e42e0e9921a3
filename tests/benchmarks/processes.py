"""Services as processes of their own, for figures that include what crossing a process costs."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO

from tests.support.processes.service_logs import open_log


@asynccontextmanager
async def process(
    *args: str, ready_on: str = "stderr", python: str = sys.executable
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python ARGS`, which has said "ready" on one of its streams by the time the body runs, and is gone after it."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(python, *args, stdin=pipe, stdout=pipe, stderr=pipe)
    assert child.stdout is not None and child.stderr is not None
    told = child.stderr if ready_on == "stderr" else child.stdout
    last, log = b"", open_log(next((word for word in args if word.startswith("kvkeeper.")), "process").rpartition(".")[2])
    try:
        while b"ready" not in (line := await told.readline()):
            log.write(line)
            if not line:
                raise RuntimeError(f"{' '.join(args)} ended before it was ready: {last.decode(errors='replace')}")
            last = line
        log.write(line)
        drained = asyncio.gather(_drain(child.stderr, log), _drain(child.stdout, log))
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
    await drained
    log.close()


async def _drain(stream: asyncio.StreamReader, log: BinaryIO) -> None:
    """Reads to the end, so that a talkative child never waits for its pipe."""
    while line := await stream.readline():
        log.write(line)


async def start_child(*args: str) -> asyncio.subprocess.Process:
    """`python ARGS`, which has said "ready", and waits for a word."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, *args, stdin=pipe, stdout=pipe)
    assert child.stdout is not None
    if b"ready" not in await child.stdout.readline():
        raise RuntimeError(f"{' '.join(args)} ended before it was ready")
    return child


async def tell_child(child: asyncio.subprocess.Process, word: bytes = b"go") -> bytes:
    """Tells it a word. Returns the line that it says then."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(word + b"\n")
    return await child.stdout.readline()
