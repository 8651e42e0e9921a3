"""HeldMemory: the arenas of a memory directory whose pools are on a CUDA device, and outlive the service.

Owns which memory belongs to which file, and what of a file's word is checked before it is believed: the device, the holder's
word on the size, the driver's on the descriptor, and the stamp in the memory itself (kept/index_file.py).

Not yet run on a device.
"""

import hashlib
import os
import secrets
from pathlib import Path

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.runtime import CudaRuntime
from kvkeeper.common.cuda.vmm import DescribedArena, VmmDriver
from kvkeeper.common.hold.client import HolderAway
from kvkeeper.common.hold.messages import HoldRefused
from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.sizes import size

from ..arena import KeptArena, Place
from ..private_file import FileRefused
from ..shared_memory import SharedMemoryArena
from .cuda import CudaMemory, DeviceArena, PinnedArena
from .holder_link import HolderLink

_STAMP_BYTES = 4096  # behind the arena
_CLOSE_SECONDS = 3.0


class HeldArena(DeviceArena):
    """The memory of one pool, a KeptArena of [num_bytes] bytes, which a holder has a descriptor of, too.

    Owns the mapping at pointer and both descriptors. The file in the memory directory that stands for the arena has no bytes.
    Its lock says which processes map the memory, because mappings of device memory hold no lock of their own. So each process
    that maps the arena gets that file's descriptor as well, and keeps it for as long as it maps. Behind the arena there is a
    page with the stamp.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        driver: VmmDriver,
        link: HolderLink,
        device: int,
        shape: DescribedArena,
        name: str,
        pointer: int,
        memory: int,
        file: int,
    ) -> None:
        """name: with the holder. memory, file: descriptors of the memory, and of the file that stands for it."""
        super().__init__(runtime, device, shape.num_bytes, pointer)
        self.descriptor = file
        self.place = Place(shape.device_uuid, name)
        self._driver, self._link, self._shape, self._memory = driver, link, shape, memory

    def fields(self) -> dict[str, object]:
        return self._shape.as_fields()

    def descriptors(self) -> list[int]:
        """That of the memory, and that of the file, see above."""
        return [self._memory, self.descriptor]

    def read_stamp(self, num_bytes: int) -> bytes:
        """From behind the arena. Raises OSError where the device fails."""
        try:
            return self.read(self.num_bytes, num_bytes)
        except CudaError as error:
            raise OSError(str(error)) from None

    def write_stamp(self, stamp: bytes) -> None:
        self.write(self.num_bytes, stamp)

    def keep(self) -> None:
        """The holder gets it, if it has not got it."""
        self._link.keep(self.place.name, self._memory, self._shape.mapped_bytes)

    def forget(self) -> None:
        """The holder drops it."""
        self._link.forget(self.place.name)

    def close(self, *, is_mapped: bool = False) -> None:
        """Gives up this process's mapping and descriptors; the memory goes with the last of all processes."""
        self._runtime.synchronize(self._device)
        self._driver.unmap(self.pointer, self._shape.mapped_bytes)
        os.close(self._memory)
        os.close(self.descriptor)


class HeldMemory:
    """See KeptMemory. Raises CudaError where there is no such device."""

    def __init__(self, runtime: CudaRuntime, driver: VmmDriver, device: int, address: str, folder: Path) -> None:
        """address: of the holder. folder: the memory directory, by which the holder distinguishes its services."""
        self._device_memory = CudaMemory(runtime, device)
        self._runtime, self._driver, self._device = runtime, driver, device
        self._uuid = runtime.device_uuids()[device]
        owner = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        self._link = HolderLink(address, f"kvkeeper-{owner}-")

    is_in_files = False

    def can_open(self) -> bool:
        """Whether the holder responds; logs why where it does not."""
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
