"""Which adapter a request of vLLM has, by the adapter's content: nothing of other weights may be found under a name of before.

Rules: what is digested are the files that vLLM reads, when the adapter is met first, which is before vLLM reads them. If they
change later, vLLM may have these weights or those, so such an adapter is not known any more; one that is loaded in place is
read again.
"""

import hashlib
from pathlib import Path
from typing import Protocol

_FILES = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")
_Stamp = tuple[tuple[str, int, int], ...]  # names, sizes and times of the files


class LoraRequest(Protocol):
    """vLLM's, as far as it counts here."""

    lora_int_id: int
    lora_path: str
    load_inplace: bool


class Adapters:
    """The adapters that one scheduler has met."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[_Stamp, str]] = {}

    def digest(self, request: LoraRequest) -> str | None:
        """64 hex digits; None where it is not known what the adapter's weights are."""
        key, folder = (request.lora_int_id, request.lora_path), Path(request.lora_path)
        try:
            files = sorted(path for pattern in _FILES for path in folder.glob(pattern))
            stats = [(path.name, path.stat()) for path in files]
            stamp = tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)
            known = self._known.get(key)
            if known is None or (request.load_inplace and known[0] != stamp):
                if len(files) < 2:  # a configuration and weights
                    return None
                known = self._known[key] = stamp, _digest(files)
        except OSError:
            return None
        return known[1] if known[0] == stamp else None


def _digest(files: list[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            found.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    return found.hexdigest()
