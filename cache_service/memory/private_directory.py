"""private_directory: the folder of the attach socket, open to this user only."""

import os
import stat
from pathlib import Path

from kvkeeper.common.service.listen import AddressInUse


def private_directory(path: Path) -> Path:
    """Makes the folder with mode 0700 if there is none. Raises AddressInUse where it is not ours alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise AddressInUse(f"cannot make the folder {path}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise AddressInUse(f"the folder {path} must be yours with mode 0700")
    return path
