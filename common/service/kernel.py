"""What the services need of the kernel: looked at by trying it, with what to do where a container or an old kernel denies it.

Imports no grpc, so that what is missing is reported at once.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvkeeper.common.service.process import StartError


class Lacking(Exception):
    """What is missing, in words."""


@dataclass(frozen=True, slots=True)
class Need:
    """One thing that the kernel gives. look() says in words what was found. Raises Lacking. mend: what to do then."""

    what: str
    look: Callable[[], str]
    mend: str


def _memfd() -> str:
    try:
        descriptor = os.memfd_create("kvkeeper-look", os.MFD_CLOEXEC)
    except OSError as error:
        raise Lacking(f"memfd_create: {error.strerror}") from None
    os.close(descriptor)
    return "memfd_create works"


def _pidfd() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise Lacking(f"pidfd_open: {error.strerror}") from None
    return "pidfd_open works"


SHARED_MEMORY = Need(
    "shared memory", _memfd, "run a Linux kernel of 3.17 or later, or allow memfd_create in the container's seccomp"
)
ENDS_OF_PROCESSES = Need(
    "ends of processes", _pidfd, "run a Linux kernel of 5.3 or later, or allow pidfd_open in the container's seccomp"
)


def require(needs: Iterable[Need]) -> None:
    """Raises StartError where one of them is missing."""
    for need in needs:
        try:
            need.look()
        except Lacking as lacking:
            raise StartError(f"{need.what}: {lacking}; {need.mend}") from None
