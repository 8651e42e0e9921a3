"""HeldArena: the memory of one pool on a CUDA device, which outlives the service because a holder has its descriptor, too.

Owns the mapping and both descriptors. A file in the memory directory stands for the arena: it has no bytes, and its lock says
which processes map the memory, because mappings of device memory hold no lock of their own. So each process that maps the arena
gets that file's descriptor as well, and keeps it for as long as it maps. Behind the arena there is a page with the stamp.

Not yet run on a device.
"""

import os

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.handle import DescribedArena
from kvkeeper.common.cuda.runtime import CudaRuntime
from kvkeeper.common.cuda.vmm import VmmDriver

from ...core.values.copies import Copies
from ..arena import ByteArray, Place
from ..host_packing import HostPacking
from .device_bytes import DeviceBytes
from .holder_link import HolderLink


class HeldArena:
    """A KeptArena of [num_bytes] bytes on a device. Takes both descriptors over, and the mapping at pointer."""

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
        self.num_bytes = shape.num_bytes
        self.descriptor = file
        self.place = Place(shape.device_uuid, name)
        self._runtime, self._driver, self._link, self._device, self._shape = runtime, driver, link, device, shape
        self._memory = memory
        self._bytes = DeviceBytes(runtime, device, pointer)

    def fields(self) -> dict[str, object]:
        return self._shape.as_fields()

    def descriptors(self) -> list[int]:
        """That of the memory, and that of the file, see above."""
        return [self._memory, self.descriptor]

    def read(self, first: int, num_bytes: int) -> bytes:
        return self._bytes.read(first, num_bytes)

    def write(self, first: int, data: bytes) -> None:
        self._bytes.write(first, data)

    def copy(self, copies: Copies, block_bytes: int, hosts: ByteArray | None, packing: HostPacking | None = None) -> None:
        self._bytes.copy(copies, block_bytes, hosts, packing)

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
        self._driver.unmap(self._bytes.pointer, self._shape.mapped_bytes)
        os.close(self._memory)
        os.close(self.descriptor)
