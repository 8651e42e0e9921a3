"""KeptMemory: how the arenas of a memory directory come out of its files; and FileMemory, whose files are the arenas.

The other way is device/held_memory.py, whose files stand for memory of a device.
"""

from typing import Protocol

from kvkeeper.common.service import memory_limit

from ..arena import KeptArena, Place
from ..private_file import FileRefused
from ..shared_memory import SharedMemoryArena


class KeptMemory(Protocol):
    """Takes over the descriptors of files, and closes them where it fails."""

    @property
    def is_in_files(self) -> bool:
        """Whether the files of arenas have the bytes, so that they need pages."""

    def can_open(self) -> bool:
        """Whether what earlier runs have left can be had now."""

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Raises OutOfMemory where arenas of num_bytes and host tiers of num_host_bytes do not fit now."""

    def make(self, file: int, num_bytes: int) -> KeptArena:
        """An arena of a new file, all zero. Raises OutOfMemory, CudaError."""

    def open(self, file: int, num_bytes: int, place: Place) -> KeptArena:
        """The arena that an earlier run has left. Raises FileRefused, OutOfMemory."""

    def make_host(self, file: int, num_bytes: int) -> SharedMemoryArena:
        """The arena of a host tier, of a new file or of an earlier run. Raises OutOfMemory, CudaError."""

    def settle(self) -> None:
        """All that earlier runs have left has been opened, or is not wanted."""

    def close(self) -> None: ...


class FileMemory:
    """Files on tmpfs that processes map."""

    is_in_files = True

    def can_open(self) -> bool:
        return True

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        memory_limit.require(num_bytes + num_host_bytes)

    def make(self, file: int, num_bytes: int) -> KeptArena:
        return SharedMemoryArena(num_bytes, file)

    def open(self, file: int, num_bytes: int, place: Place) -> KeptArena:
        if place != Place():
            raise FileRefused("its memory is on a device")
        return SharedMemoryArena(num_bytes, file)

    def make_host(self, file: int, num_bytes: int) -> SharedMemoryArena:
        return SharedMemoryArena(num_bytes, file)

    def settle(self) -> None:
        """Nothing is elsewhere."""

    def close(self) -> None:
        """Nothing is open."""
