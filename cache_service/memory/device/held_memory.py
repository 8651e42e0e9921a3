"""HeldMemory: the arenas of a memory directory whose pools are on a CUDA device.

Owns which memory belongs to which file, and what of a file's word is checked before it is believed: the device, the holder's
word on the size, the driver's on the descriptor, and the stamp in the memory itself (kept/index_file.py).
"""

import hashlib
import os
import secrets
from pathlib import Path

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.handle import DescribedArena
from kvkeeper.common.cuda.runtime import CudaRuntime
from kvkeeper.common.cuda.vmm import VmmDriver
from kvkeeper.common.hold.client import HolderAway
from kvkeeper.common.hold.messages import HoldRefused
from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.sizes import size

from ..arena import KeptArena, Place
from ..private_file import FileRefused
from ..shared_memory import SharedMemoryArena
from .cuda import CudaMemory, PinnedArena
from .held_arena import HeldArena
from .holder_link import HolderLink

_STAMP_BYTES = 4096  # behind the arena
_CLOSE_SECONDS = 3.0


class HeldMemory:
    """See KeptMemory. Raises CudaError where there is no such device."""

    def __init__(self, runtime: CudaRuntime, driver: VmmDriver, device: int, address: str, folder: Path) -> None:
        """address: of the holder. folder: the memory directory, by which the holder tells its services apart."""
        self._device_memory = CudaMemory(runtime, device)
        self._runtime, self._driver, self._device = runtime, driver, device
        self._uuid = runtime.device_uuids()[device]
        owner = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        self._link = HolderLink(address, f"kvkeeper-{owner}-")

    is_in_files = False

    def can_open(self) -> bool:
        """Whether the holder answers; it is told where it does not."""
        return self._link.probe()

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Raises OutOfMemory where arenas of num_bytes and host tiers of num_host_bytes do not fit now."""
        self._device_memory.require(num_bytes, num_host_bytes)

    def make(self, file: int, num_bytes: int) -> KeptArena:
        """New memory, all zero. Takes over the descriptor of the file that stands for it. Raises OutOfMemory, CudaError."""
        try:
            shape = self._shape(num_bytes)
            pointer, memory = self._driver.make(self._device, shape.mapped_bytes)
        except CudaError as error:
            os.close(file)
            if error.is_out_of_memory:
                raise OutOfMemory(f"{size(num_bytes)} could not be had on the device") from None
            raise
        arena = self._arena(shape, secrets.token_hex(8), pointer, memory, file)
        try:
            self._runtime.clear(self._device, pointer, shape.mapped_bytes)
        except BaseException:
            arena.close()
            raise
        return arena

    def open(self, file: int, num_bytes: int, place: Place) -> KeptArena:
        """The memory of an earlier run. Takes over the file's descriptor. Raises FileRefused."""
        try:
            return self._open(file, num_bytes, place)
        except BaseException:
            os.close(file)
            raise

    def _open(self, file: int, num_bytes: int, place: Place) -> KeptArena:
        if place == Place():
            raise FileRefused("its memory is not on a device")
        if place.device != self._uuid:
            raise FileRefused("its memory is on another device")
        try:
            shape = self._shape(num_bytes)
            held = self._link.fetch(place.name)
        except HoldRefused:
            raise FileRefused("the holder does not have its memory") from None
        except (HolderAway, CudaError) as error:
            raise FileRefused(str(error)) from None
        try:
            if held.num_bytes != shape.mapped_bytes:
                raise FileRefused("its memory has another size")
            pointer = self._driver.map(self._device, held.descriptor, shape.mapped_bytes)
        except CudaError as error:
            os.close(held.descriptor)
            raise FileRefused(f"its memory cannot be mapped: {error}") from None
        except FileRefused:
            os.close(held.descriptor)
            raise
        return self._arena(shape, place.name, pointer, held.descriptor, file)

    def make_host(self, file: int, num_bytes: int) -> SharedMemoryArena:
        """The arena of a host tier in a file, new or not, with pinned pages. Takes its descriptor over. Raises CudaError."""
        return PinnedArena(self._runtime, self._device, num_bytes, file)

    def settle(self) -> None:
        """All that earlier runs have left has been looked at."""
        self._link.settle()

    def close(self) -> None:
        self._link.close(_CLOSE_SECONDS)

    def _shape(self, num_bytes: int) -> DescribedArena:
        return DescribedArena(self._uuid, num_bytes, self._driver.whole(self._device, num_bytes + _STAMP_BYTES))

    def _arena(self, shape: DescribedArena, name: str, pointer: int, memory: int, file: int) -> HeldArena:
        return HeldArena(self._runtime, self._driver, self._link, self._device, shape, name, pointer, memory, file)
