"""The service that has a memory directory now, and that another one takes over from.

Owns how it is found, asked to stop, and waited for. Rules: only the process that the kernel names as the owner of the folder's
lock is signalled, through a descriptor of that process, so that a number used again reaches no other program; a service that
would remove its memory is not asked.
"""

import asyncio
import os
import signal
from pathlib import Path

import structlog

from kvkeeper.common.service.listen import AddressInUse

from . import file_locks
from .kept.memory_directory import MemoryRefused
from .private_file import private_directory

log = structlog.get_logger()


async def end_predecessor(folder: Path, max_seconds: float) -> None:
    """Asks the service that has the folder, if there is one, to stop, and waits at most so long for its end.

    Raises MemoryRefused: it would not keep its memory, it may not be signalled, or it has not ended by then.
    """
    try:
        owner = file_locks.folder_owner(private_directory(folder))
        process = os.pidfd_open(owner.pid) if owner is not None else -1
    except ProcessLookupError:  # it has just ended
        return
    except AddressInUse as error:
        raise MemoryRefused(str(error)) from None
    except OSError as error:
        raise MemoryRefused(f"the folder's lock cannot be read: {error.strerror}") from None
    if owner is None:
        log.info("nothing_to_take_over")
        return
    try:
        if file_locks.folder_owner(folder) != owner:  # it ended before the descriptor was there, which may be another's
            return
        if not owner.keeps:
            raise MemoryRefused("the service that has the folder runs without --keep, and removes its memory when it stops")
        log.info("taking_over", from_pid=owner.pid)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        async with asyncio.timeout(max_seconds):
            await _wait_for_end(process)
    except PermissionError:
        raise MemoryRefused("the service that has the folder belongs to another user") from None
    except TimeoutError:
        raise MemoryRefused(f"the service that has the folder has not ended within {max_seconds:g} s") from None
    finally:
        os.close(process)


async def _wait_for_end(process: int) -> None:
    """Returns when the process of a descriptor has ended: the descriptor is readable from then on."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process)
