"""Arena: what a pool does with its memory, wherever that is.

The core decides about blocks by number; only here are they bytes. Of a pool's two arenas the first is on the device, the host
tier's is always shared memory.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..core.values.copies import Copies

ByteArray = npt.NDArray[np.uint8]


class Arena(Protocol):
    """num_bytes bytes, all zero at first."""

    @property
    def num_bytes(self) -> int: ...

    def fields(self) -> dict[str, object]:
        """How the attach socket describes it to a process that may map it; values of JSON."""

    def descriptors(self) -> list[int]:
        """What goes along with that."""

    def read(self, first: int, num_bytes: int) -> bytes:
        """Bytes [first, first + num_bytes)."""

    def write(self, first: int, data: bytes) -> None:
        """Bytes from first on."""

    def copy(self, copies: Copies, block_bytes: int, hosts: ByteArray | None) -> None:
        """Run copies of blocks: first those between here and hosts [num_host_blocks, block_bytes], then those within.

        In list order: a later copy reads what an earlier one wrote. Done when it returns.
        """

    def close(self, *, is_mapped: bool = False) -> None:
        """Give the memory back. is_mapped: other processes have it mapped still."""
