"""weights_digest: the identity of a model's weights, so that a retrained model under an old name never meets old KV.

SHA-256 over config.json and every weight file. Hashing takes seconds per gigabyte, so a file's hash is remembered in
the user's cache folder by what changes when a file does: device, inode, size and time of modification.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Final

from .errors import ModelFileMissingError, WeightsError
from .json_file import CONFIG_FILE
from .safetensors_files import list_weight_files

_MEMORY_FILE: Final = "weights_digests.json"
_MOST_REMEMBERED: Final = 4096


def weights_digest(folder: Path) -> str:
    """SHA-256, 64 hexadecimal digits, over the names and hashes of config.json and all weight files.

    Raises:
        ModelFileMissingError, ModelConfigError, UnsupportedModelError: as list_weight_files.
        WeightsError: a file cannot be read.
    """
    weight_files = list_weight_files(Path(folder))
    remembered = _recall()
    known = dict(remembered)
    whole = hashlib.sha256()
    for path in (Path(folder) / CONFIG_FILE, *weight_files):
        try:
            digest = _file_digest(path, known)
        except FileNotFoundError:
            raise ModelFileMissingError(str(path)) from None
        except OSError as error:
            raise WeightsError(path.name, f"cannot be read: {error.strerror}") from error
        whole.update(f"{path.name}\0{digest}\0".encode())
    if known != remembered:
        _remember(known)
    return whole.hexdigest()


def _file_digest(path: Path, known: dict[str, str]) -> str:
    """The file's hash, from `known` or computed and put there."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        if key not in known:
            known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return known[key]


def _memory_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvkeeper" / _MEMORY_FILE


def _recall() -> dict[str, str]:
    """What earlier runs hashed. Anything odd about the file means that nothing is remembered."""
    try:
        known = json.loads(_memory_path().read_bytes())
    except (OSError, ValueError, RuntimeError, RecursionError):  # RuntimeError: the user has no home
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: digest for key, digest in known.items() if isinstance(digest, str) and len(digest) == 64}


def _remember(known: dict[str, str]) -> None:
    """Replace the file in one step; not being able to is harmless, the next run hashes again."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _memory_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        newest = dict(list(known.items())[-_MOST_REMEMBERED:])
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(newest, file)
        os.replace(file.name, path)
