"""A child process of a service: the same Python with the same modules, in a session of its own.

Signals of a terminal do not reach it: its service ends it. What it prints as errors goes through the log of its service.
"""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from contextlib import suppress
from typing import Any

from kvkeeper.common.service.log import passing_on


def child_environment() -> dict[str, str]:
    """The environment of a child: modules are found where this process finds them."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",
    }


async def start_child(name: str, module: str, *arguments: str, **streams: Any) -> Process:
    """Run a module. name: in the log; streams: as for asyncio.create_subprocess_exec. Raises OSError, RuntimeError."""
    with passing_on(name) as log_end:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stderr=log_end,
            env=child_environment(),
            start_new_session=True,
            **streams,
        )


async def wait_end(process: Process, seconds: float) -> int:
    """The exit code of a process that has been asked to end; after so many seconds it is killed.

    Not killed at once: Process.kill polls first, which takes the exit code away from asyncio, and asyncio then reports 255.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await process.wait()
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()
