"""`kvkeeper cache` and `kvkeeper engine`: hand over to the services, which are imported only here and only then.

A service that `kvkeeper up` started ends with it: where KVKEEPER_PARENT_PID is set, the kernel sends SIGTERM when that
parent is gone, however it ended.
"""

import importlib
import os
import signal
from collections.abc import Sequence

PARENT_VARIABLE = "KVKEEPER_PARENT_PID"
NAMES = {
    "cache": "run the cache service (its flags: kvkeeper cache --help)",
    "engine": "run the engine service (its flags: kvkeeper engine --help)",
}
_PR_SET_PDEATHSIG = 1


def run(name: str, argv: Sequence[str]) -> int:
    """Serve until stopped; the service's exit code."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None and not _end_with(int(parent)):
        return 1
    service = importlib.import_module(f"kvkeeper.{name}_service.__main__")
    return int(service.main(list(argv)) or 0)


def _end_with(parent: int) -> bool:
    """Whether the parent still lives and will take this process along."""
    import ctypes  # for this alone, and every command imports this module

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent  # it may have gone before prctl
