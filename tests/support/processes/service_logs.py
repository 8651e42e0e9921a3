"""Where the logs of services go that a check starts, beside being read: into files, if the environment names a folder."""

import itertools
import os
from pathlib import Path
from typing import BinaryIO

VARIABLE = "KVKEEPER_SERVICE_LOGS"
_numbers = itertools.count(1)


def open_log(name: str) -> BinaryIO:
    """A file for one process's log, numbered in the order of their starts; where no folder is named, one that keeps nothing."""
    folder = os.environ.get(VARIABLE)
    path = Path(os.devnull) if folder is None else Path(folder) / f"{next(_numbers):02}-{name}.log"
    return path.open("wb", buffering=0)
