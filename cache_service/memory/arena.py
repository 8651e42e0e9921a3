"""Arena: the memory of a pool, wherever it is.

The core decides about blocks by number; they are bytes only in this folder. A pool has two arenas: one on the device, and the
host tier's, which is always shared memory.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..core.values.copies import Copies
from .host_packing import HostPacking

ByteArray = npt.NDArray[np.uint8]


class Arena(Protocol):
    """num_bytes bytes, all zero at first."""

    @property
    def num_bytes(self) -> int: ...

    def fields(self) -> dict[str, object]:
        """The arena's description for a process that may map it, sent by the attach socket; values of JSON."""

    def descriptors(self) -> list[int]:
        """File descriptors that are sent with the description."""

    def read(self, first: int, num_bytes: int) -> bytes:
        """Bytes [first, first + num_bytes)."""

    def write(self, first: int, data: bytes) -> None:
        """Bytes from first on."""

    def copy(self, copies: Copies, block_bytes: int, hosts: ByteArray | None, packing: HostPacking | None = None) -> None:
        """Run copies of blocks: first those between this arena and hosts [num_host_blocks, bytes], then those within it.

        packing: of hosts that keep blocks in few bits. In list order: a later copy reads what an earlier one wrote. All copies
        are complete on return.
        """

    def close(self, *, is_mapped: bool = False) -> None:
        """Give the memory back. is_mapped: other processes still have it mapped."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a kept arena are, if not in its file: the uuid of the device, and a name with the holder."""

    device: str = ""
    name: str = ""


@runtime_checkable
class KeptArena(Arena, Protocol):
    """An arena of a memory directory: a file there is the arena, or stands for it."""

    descriptor: int  # of the file, locked by each process that maps the arena
    place: Place

    def read_stamp(self, num_bytes: int) -> bytes:
        """Bytes of the page behind the arena. Raises OSError."""

    def write_stamp(self, stamp: bytes) -> None: ...

    def keep(self) -> None:
        """A pool has it from now on, which is to outlive the service."""

    def forget(self) -> None:
        """No later run wants it. Idempotent."""
