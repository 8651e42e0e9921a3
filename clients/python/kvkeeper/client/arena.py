"""A pool's memory in this process: the attach socket hands over a memfd, a CUDA IPC handle or a descriptor of CUDA memory, and
a memfd of the host tier.

The connection stays open for as long as the memory is mapped: the service takes its end as the end of the mapping, and may then
give the blocks to another session. A token is good for one attach of each rank. No error names a path or a handle.
"""

import contextlib
import gc
import mmap
import os
import socket
import weakref

import grpc
import numpy as np
import numpy.typing as npt

from kvkeeper.client.attaching import Handover, attaching
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.handle import KIND as CUDA_KIND
from kvkeeper.common.cuda.handle import parse_handle
from kvkeeper.common.cuda.imported import ImportedArena
from kvkeeper.common.cuda.runtime import cuda_runtime
from kvkeeper.common.cuda.vmm import DESCRIPTOR_KIND, MappedArena, described_arena, vmm_driver

OnDevice = ImportedArena | MappedArena
_NUM_DESCRIPTORS = {"memfd": 1, CUDA_KIND: 0, DESCRIPTOR_KIND: 2}  # of the arena, by the kind in the line


class DeviceBytes:
    """An arena in CUDA memory, with __cuda_array_interface__ for torch.as_tensor; the tensor keeps this object alive."""

    def __init__(self, imported: OnDevice) -> None:
        self.pointer, self.num_bytes, self.device = imported.pointer, imported.num_bytes, imported.device

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """All bytes [num_bytes], writable."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


class Arena:
    """Memory of a pool, shared with the cache service and with every engine attached to it."""

    def __init__(
        self,
        connection: socket.socket,
        memory: mmap.mmap | None,
        host_memory: mmap.mmap | None,
        imported: OnDevice | None = None,
    ) -> None:
        """Exactly one of memory and imported is given."""
        self._connection = connection
        self._memories = {name: part for name, part in (("array", memory), ("host_array", host_memory)) if part is not None}
        self._arrays = _views(self._memories)
        self._imported = imported
        self._pinned: int | None = None
        self._lent: weakref.WeakSet[DeviceBytes] = weakref.WeakSet()

    @property
    def is_on_device(self) -> bool:
        """Whether the arena has device_bytes() instead of array."""
        return self._imported is not None

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes [arena_bytes] of a pool in the host's memory, writable unless the session has read-only memory."""
        self._require_open()
        if self._imported is not None:
            raise ValueError("the arena is in CUDA memory, see device_bytes")
        return self._arrays["array"]

    def device_bytes(self) -> DeviceBytes:
        """All bytes [arena_bytes] of a pool in CUDA memory, writable. The arena cannot be closed while the result is in use."""
        self._require_open()
        if self._imported is None:
            raise ValueError("the arena is in the host's memory, see array")
        lent = DeviceBytes(self._imported)
        self._lent.add(lent)
        return lent

    @property
    def host_array(self) -> npt.NDArray[np.uint8]:
        """All bytes of the host tier [host_arena_bytes], writable as array is; empty without a host tier."""
        self._require_open()
        return self._arrays.get("host_array", np.empty(0, np.uint8))

    def pin_hosts(self) -> None:
        """Pin the host tier in this process, so that copies between it and the device need no staging.

        Where the system refuses, copies are only slower. Does nothing for a pool in the host's memory. It takes seconds for
        each 10 GB, and may run in any thread.
        """
        if self._imported is not None and self._pinned is None and (hosts := self.host_array).size:
            with contextlib.suppress(CudaError):
                cuda_runtime().register_host(self._imported.device, hosts.ctypes.data, hosts.nbytes)
                self._pinned = hosts.ctypes.data

    def _require_open(self) -> None:
        if self._connection.fileno() == -1:
            raise ValueError("the arena is closed")

    def close(self) -> None:
        """Unmap, then let the service know. Idempotent.

        Raises BufferError, and stays attached, while a view of the memory lives: it could still be written.
        """
        if self._connection.fileno() == -1:
            return
        if self._lent:
            gc.collect()  # a reference cycle may keep one alive
        if self._lent:
            raise BufferError("what device_bytes gave is still in use")
        if self._imported is not None:
            with contextlib.suppress(CudaError):  # copies that were launched may still read the host tier, or write it
                cuda_runtime().synchronize(self._imported.device)
        if self._pinned is not None and self._imported is not None:
            with contextlib.suppress(CudaError):
                cuda_runtime().unregister_host(self._imported.device, self._pinned)
            self._pinned = None
        self._arrays = {}
        try:
            for name in reversed(list(self._memories)):
                self._memories[name].close()
                del self._memories[name]
        except BufferError:
            self._arrays = _views(self._memories)
            raise
        if self._imported is not None:
            with contextlib.suppress(CudaError):  # a device that is lost has unmapped it
                self._imported.close()
        self._connection.close()


def _views(memories: dict[str, mmap.mmap]) -> dict[str, npt.NDArray[np.uint8]]:
    return {name: np.frombuffer(memory, np.uint8) for name, memory in memories.items()}


def attach_arena(path: str, token: str, num_bytes: int, timeout_s: float, num_host_bytes: int = 0, rank: int = 0) -> Arena:
    """Attach within the time given. The sizes are those of the pool's arenas, as it reported them. Raises KvkeeperError.

    rank: whose arena is wanted, where the pool's spec has several. Each attaches in a process of its own, with the same token.
    """
    with attaching(path, token, timeout_s, *(["memory", f"rank:{rank}"] if rank else [])) as handed_over:
        return _map(handed_over, num_bytes, num_host_bytes)


def attach_arena_and_lane(
    path: str, token: str, num_bytes: int, timeout_s: float, num_host_bytes: int = 0
) -> tuple[Arena, socket.socket | None]:
    """The same, with a socket for steps; None where the service had none to give. Raises KvkeeperError."""
    with attaching(path, token, timeout_s, "memory", "step-lane") as handed_over:
        lane = handed_over.take_lane()
        try:
            return _map(handed_over, num_bytes, num_host_bytes), lane
        except BaseException:
            if lane is not None:
                lane.close()
            raise


def _map(handed_over: Handover, num_bytes: int, num_host_bytes: int) -> Arena:
    reply, kind = handed_over.fields, str(handed_over.fields.get("kind"))
    num_of_arena = _NUM_DESCRIPTORS.get(kind)
    if num_of_arena is None or len(handed_over.descriptors) != num_of_arena + bool(num_host_bytes):
        raise KvkeeperError(grpc.StatusCode.UNIMPLEMENTED, message="this client maps memfd and CUDA arenas only")
    of_arena, of_hosts = handed_over.descriptors[:num_of_arena], handed_over.descriptors[num_of_arena:]
    pairs = [(descriptor, num_host_bytes) for descriptor in of_hosts]
    if kind == "memfd":
        pairs.insert(0, (of_arena[0], num_bytes))
    reported = (reply.get("num_bytes"), reply.get("num_host_bytes", 0))
    # The size of the file counts, not the line's numbers: a map past the end of a file is a SIGBUS later.
    if reported != (num_bytes, num_host_bytes) or any(os.fstat(descriptor).st_size < size for descriptor, size in pairs):
        raise KvkeeperError(grpc.StatusCode.INTERNAL, message="the arena has another size than the pool")
    access = mmap.ACCESS_READ if reply.get("read_only") else mmap.ACCESS_WRITE
    memories = [mmap.mmap(descriptor, size, access=access) for descriptor, size in pairs]
    memory = memories.pop(0) if kind == "memfd" else None
    imported = _import(reply, of_arena) if kind != "memfd" else None
    return Arena(handed_over.connection, memory, memories[0] if memories else None, imported)


def _import(reply: dict[str, object], descriptors: list[int]) -> OnDevice:
    """descriptors: of the memory, and one whose end says to the service that nothing is mapped; or none."""
    try:
        if not descriptors:
            return ImportedArena(cuda_runtime(), parse_handle(reply))
        memory, witness = descriptors
        return MappedArena(cuda_runtime(), vmm_driver(), described_arena(reply), memory, os.dup(witness))
    except ValueError as error:
        raise KvkeeperError(grpc.StatusCode.INTERNAL, message=f"the attach socket answered a wrong {error}") from None
    except CudaError as error:
        raise KvkeeperError(
            grpc.StatusCode.FAILED_PRECONDITION, message=f"the pool's CUDA memory cannot be mapped: {error}"
        ) from None
