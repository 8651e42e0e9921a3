"""What kind of file system a folder lies on, as the kernel shows it."""

import os
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


def file_system(path: Path) -> str:
    """The kind of file system that a folder lies on. Raises OSError where there is no such folder."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "an unknown file system"
