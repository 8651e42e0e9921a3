"""The arenas of other processes that this process has opened, each once.

The driver maps an allocation once per process, however often its handle is opened, and one close may end the mapping for all
users (seen and recorded by LMCache). So opens are counted here, and the last close unmaps. A mapping keeps the device memory
alive, even after the process that allocated it has died. Memory that is handed over by a descriptor is mapped anew each time,
and needs no count.
"""

import os
import threading
from dataclasses import dataclass

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.handle import ArenaHandle, DescribedArena
from kvkeeper.common.cuda.runtime import CudaRuntime
from kvkeeper.common.cuda.vmm import VmmDriver


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
        self.device, self.num_bytes = device_of(runtime, handle.device_uuid), handle.num_bytes
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


class MappedArena:
    """The same by a descriptor: memory that may outlive the process that allocated it. pointer, device: as of ImportedArena."""

    def __init__(self, runtime: CudaRuntime, driver: VmmDriver, arena: DescribedArena, descriptor: int, witness: int) -> None:
        """descriptor: stays the caller's. witness: a descriptor that is closed here once the memory is unmapped.

        Raises CudaError, with the witness closed, also for a device that this process does not see.
        """
        self._runtime, self._driver, self._witness = runtime, driver, witness
        self.num_bytes, self._mapped_bytes = arena.num_bytes, arena.mapped_bytes
        try:
            self.device = device_of(runtime, arena.device_uuid)
            runtime.synchronize(self.device)  # makes the context that the driver's calls want
            self.pointer = driver.map(self.device, descriptor, arena.mapped_bytes)
        except BaseException:
            os.close(witness)
            raise

    def close(self) -> None:
        """Wait for this process's work on the device, then unmap. Idempotent. Raises CudaError."""
        if self._witness == -1:
            return
        witness, self._witness = self._witness, -1
        try:
            self._runtime.synchronize(self.device)
            self._driver.unmap(self.pointer, self._mapped_bytes)
        finally:
            os.close(witness)


def device_of(runtime: CudaRuntime, uuid: str) -> int:
    """The index of a device in this process. Raises CudaError where it is not visible."""
    uuids = runtime.device_uuids()
    if uuid not in uuids:
        raise CudaError("device_uuids", "the pool's device is not visible to this process")
    return uuids.index(uuid)
