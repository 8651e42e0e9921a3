"""How much memory this process may still take, asked before any is taken.

A memfd has no size limit of its own: filling one beyond the memory of the machine or of the control group does not fail, but a
process is killed. So the limits are read first. The answer is an estimate, good enough to refuse what can never work.
"""

import resource
from pathlib import Path

from kvkeeper.common.service.sizes import size

_HEADROOM = 64 << 20  # left to other processes


class OutOfMemory(Exception):
    """The machine, its control group, the process's limits or the device have too little memory. The text is one sentence.

    on_device: it is memory of a device, and may come back when a process that maps an earlier run's has ended.
    """

    def __init__(self, text: str, *, on_device: bool = False) -> None:
        super().__init__(text)
        self.on_device = on_device


def require(num_bytes: int) -> None:
    """Raises OutOfMemory where so many bytes are not available now."""
    available = available_bytes()
    if num_bytes > available:
        raise OutOfMemory(f"{size(num_bytes)} are wanted, {size(available)} are available")


def available_bytes() -> int:
    """Bytes that can be taken now: the least of the machine's, the control groups' and the process's own limits."""
    limits = [_machine_bytes(), *_cgroup_bytes(), *_process_bytes()]
    return max(0, min(limits) - _HEADROOM)


def _machine_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def _process_bytes() -> list[int]:
    """What RLIMIT_AS leaves to map. The other limits of a process make the system refuse, which needs no foresight."""
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space == resource.RLIM_INFINITY:
        return []
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return [address_space - num_pages * resource.getpagesize()]


def _cgroup_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What each control group on the way up leaves, in version 2 and 1. Page cache that can be reclaimed counts as free."""
    limits = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (base / group, *(base / parent for parent in group.parents)):
            limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
            if limit.isdigit() and usage.isdigit():
                statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                page_cache = statistics.get("total_inactive_file", statistics.get("inactive_file", "0"))
                limits.append(int(limit) - int(usage) + int(page_cache))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not this version, not this level, or not readable here: no limit is known
