"""How an arena in CUDA memory is named to another process, as the attach socket hands it over.

An IPC handle in the line is the rule, because it needs least of a host. Memory that outlives its service is named otherwise
(vmm.py): IPC handles end with their maker.
"""

import re
from dataclasses import dataclass

from kvkeeper.common.cuda.runtime import HANDLE_BYTES

KIND = "cuda_ipc"


@dataclass(frozen=True, slots=True, repr=False)
class ArenaHandle:
    """A secret: its holder can read and write the arena. So it has no repr, and is sent over that socket alone.

    Attributes:
        device_uuid: 32 hexadecimal digits; devices have other indices in other processes.
        ipc_handle: [HANDLE_BYTES]
        offset: of the arena in the allocation that the handle opens.
        num_bytes: of the arena.
        generation: of the arena in its service: distinguishes two allocations at the same address, one after the other.
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


def parse_handle(fields: dict[str, object]) -> ArenaHandle:
    """Raises ValueError for fields that as_fields does not make."""
    uuid, handle = parse_uuid(fields), fields.get("ipc_handle")
    if not isinstance(handle, str) or re.fullmatch(rf"[0-9a-f]{{{2 * HANDLE_BYTES}}}", handle) is None:
        raise ValueError("ipc_handle")
    return ArenaHandle(uuid, bytes.fromhex(handle), *parse_counts(fields, "offset", "num_bytes", "generation"))


def parse_uuid(fields: dict[str, object]) -> str:
    """The UUID of the device. Raises ValueError."""
    uuid = fields.get("device_uuid")
    if not isinstance(uuid, str) or re.fullmatch(r"[0-9a-f]{32}", uuid) is None:
        raise ValueError("device_uuid")
    return uuid


def parse_counts(fields: dict[str, object], *names: str) -> list[int]:
    """Raises ValueError."""
    counts = []
    for name in names:
        count = fields.get(name)
        if type(count) is not int or not 0 <= count < 1 << 62:
            raise ValueError(name)
        counts.append(count)
    return counts
