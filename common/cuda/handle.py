"""How an arena in CUDA memory is named to another process, as the attach socket hands it over.

Two kinds: an IPC handle in the line, or a description in the line and a descriptor beside it. The first is the rule, because it
needs least of a host; the second is of memory that outlives its service, which IPC handles do not: they end with their maker.
"""

import re
from dataclasses import asdict, dataclass

from kvkeeper.common.cuda.runtime import HANDLE_BYTES

KIND = "cuda_ipc"
DESCRIPTOR_KIND = "cuda_vmm"


@dataclass(frozen=True, slots=True, repr=False)
class ArenaHandle:
    """A secret: its holder can read and write the arena. So it has no repr, and is sent over that socket alone.

    Attributes:
        device_uuid: 32 hexadecimal digits; devices have other indices in other processes.
        ipc_handle: [HANDLE_BYTES]
        offset: of the arena in the allocation that the handle opens.
        num_bytes: of the arena.
        generation: of the arena in its service: tells apart two allocations at the same address, one after the other.
    """

    device_uuid: str
    ipc_handle: bytes
    offset: int
    num_bytes: int
    generation: int

    def as_fields(self) -> dict[str, object]:
        """The attach socket's line, as values of JSON."""
        return {
            "kind": KIND,
            "device_uuid": self.device_uuid,
            "ipc_handle": self.ipc_handle.hex(),
            "offset": self.offset,
            "num_bytes": self.num_bytes,
            "generation": self.generation,
        }


def handle_of(fields: dict[str, object]) -> ArenaHandle:
    """Raises ValueError for fields that as_fields does not make."""
    uuid, handle = _uuid(fields), fields.get("ipc_handle")
    if not isinstance(handle, str) or re.fullmatch(rf"[0-9a-f]{{{2 * HANDLE_BYTES}}}", handle) is None:
        raise ValueError("ipc_handle")
    return ArenaHandle(uuid, bytes.fromhex(handle), *_counts(fields, "offset", "num_bytes", "generation"))


@dataclass(frozen=True, slots=True)
class DescribedArena:
    """An arena whose descriptor is sent beside the line. It is at the beginning of the memory.

    Attributes:
        device_uuid: as in ArenaHandle.
        num_bytes: of the arena.
        mapped_bytes: of the memory, what is mapped of it.
    """

    device_uuid: str
    num_bytes: int
    mapped_bytes: int

    def as_fields(self) -> dict[str, object]:
        """The attach socket's line, as values of JSON."""
        return {"kind": DESCRIPTOR_KIND, **asdict(self)}


def described_arena(fields: dict[str, object]) -> DescribedArena:
    """Raises ValueError for fields that as_fields does not make."""
    arena = DescribedArena(_uuid(fields), *_counts(fields, "num_bytes", "mapped_bytes"))
    if arena.num_bytes > arena.mapped_bytes:
        raise ValueError("mapped_bytes")
    return arena


def _uuid(fields: dict[str, object]) -> str:
    uuid = fields.get("device_uuid")
    if not isinstance(uuid, str) or re.fullmatch(r"[0-9a-f]{32}", uuid) is None:
        raise ValueError("device_uuid")
    return uuid


def _counts(fields: dict[str, object], *names: str) -> list[int]:
    counts = []
    for name in names:
        count = fields.get(name)
        if type(count) is not int or not 0 <= count < 1 << 62:
            raise ValueError(name)
        counts.append(count)
    return counts
