"""`kvkeeper cache`, `engine` and `hold`: hand over to the services, which are imported when they are to run.

A service that `kvkeeper up` started ends with it: where KVKEEPER_PARENT_PID is set, the kernel sends SIGTERM when that parent
has ended, for any reason. A kernel that denies this is told on stderr: the service then outlives an `up` that is killed.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

PARENT_VARIABLE = "KVKEEPER_PARENT_PID"
NAMES = {
    "cache": "run the cache service (its flags: kvkeeper cache --help)",
    "engine": "run the engine service (its flags: kvkeeper engine --help)",
    "hold": "hold device memory while the cache service is away (its flags: kvkeeper hold --help)",
}
PACKAGES = {"cache": "kvkeeper.cache_service", "engine": "kvkeeper.engine_service", "hold": "kvkeeper.common.hold"}
_PR_SET_PDEATHSIG = 1


def run(name: str, argv: Sequence[str]) -> int:
    """Serve until stopped; the service's exit code."""
    if not end_with_parent():
        return 1
    service = importlib.import_module(f"{PACKAGES[name]}.__main__")
    return int(service.main(list(argv)) or 0)


def end_with_parent() -> bool:
    """Asks the kernel for SIGTERM when the parent ends that the environment names. False where it has ended already."""
    named = os.environ.pop(PARENT_VARIABLE, None)
    return named is None or _end_with(int(named))


def _end_with(parent: int) -> bool:
    import ctypes  # not above, because every command imports this module

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        why = os.strerror(ctypes.get_errno())
        print(f"kvkeeper: prctl: {why}: where `kvkeeper up` is killed, this service goes on", file=sys.stderr)
    return os.getppid() == parent  # the parent may have ended before prctl
