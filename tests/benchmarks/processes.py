"""Services as processes of their own, for figures that include what crossing a process costs."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def process(
    *args: str, ready_on: str = "stderr", python: str = sys.executable
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python ARGS`, which has said "ready" on one of its streams by the time the body runs, and is gone after it."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(python, *args, stdin=pipe, stdout=pipe, stderr=pipe)
    assert child.stdout is not None and child.stderr is not None
    told = child.stderr if ready_on == "stderr" else child.stdout
    last = b""
    try:
        while b"ready" not in (line := await told.readline()):
            if not line:
                raise RuntimeError(f"{' '.join(args)} ended before it was ready: {last.decode(errors='replace')}")
            last = line
        drained = asyncio.gather(_drain(child.stderr), _drain(child.stdout))
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
    await drained


async def _drain(stream: asyncio.StreamReader) -> None:
    """Reads to the end, so that a talkative child never waits for its pipe."""
    while await stream.readline():
        pass
