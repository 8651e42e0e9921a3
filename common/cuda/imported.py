"""The arenas of other processes that this process has opened, each once.

The driver maps an allocation once per process, however often its handle is opened, and one close may end the mapping for all
users (seen and recorded by LMCache). So opens are counted here, and the last close unmaps. A mapping keeps the device memory
alive, even after the process that allocated it has died.
"""

import threading
from dataclasses import dataclass

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.handle import ArenaHandle
from kvkeeper.common.cuda.runtime import CudaRuntime


@dataclass(slots=True)
class _Mapping:
    device: int
    base: int
    num_users: int = 0


_mappings: dict[tuple[str, bytes, int], _Mapping] = {}  # by device, handle and generation
_lock = threading.Lock()


class ImportedArena:
    """An arena of another process. pointer: its beginning, as mapped here; device: the index of its device."""

    def __init__(self, runtime: CudaRuntime, handle: ArenaHandle) -> None:
        """Raises CudaError, also for a device that this process does not see."""
        self.device, self.num_bytes = find_device(runtime, handle.device_uuid), handle.num_bytes
        self._runtime, self._key = runtime, (handle.device_uuid, handle.ipc_handle, handle.generation)
        self._is_open = True
        with _lock:
            mapping = _mappings.get(self._key)
            if mapping is None:
                mapping = _Mapping(self.device, runtime.open(self.device, handle.ipc_handle))
                _mappings[self._key] = mapping
            mapping.num_users += 1
        self.pointer = mapping.base + handle.offset

    def close(self) -> None:
        """Wait for this process's work on the device, then unmap after the last user here. Idempotent. Raises CudaError."""
        if not self._is_open:
            return
        self._is_open = False
        with _lock:
            mapping = _mappings[self._key]
            mapping.num_users -= 1
            if mapping.num_users:
                return
            del _mappings[self._key]
            self._runtime.synchronize(mapping.device)
            self._runtime.close(mapping.device, mapping.base)


def find_device(runtime: CudaRuntime, uuid: str) -> int:
    """The index of a device in this process. Raises CudaError where it is not visible."""
    uuids = runtime.device_uuids()
    if uuid not in uuids:
        raise CudaError("device_uuids", "the pool's device is not visible to this process")
    return uuids.index(uuid)
