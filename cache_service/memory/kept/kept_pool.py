"""The open files of one pool: a tier's arena with its index, and the pool with its host tier; digests of what blocks hold.

With the digests a later run notices memory that was overwritten. Rules: a digest is keyed by its file, and never 0. It is of 32
bits, which find damage and withstand no forger; CRC-32, because it reads three times as many bytes a second as a cryptographic
hash or more, and lets other threads run meanwhile.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.values.kept_index import KeptIndex, UInt64Array
from ...core.values.kv_spec import KvSpec
from ...core.values.types import Int32Array, Tier
from .. import file_locks
from ..arena import ByteArray, KeptArena
from ..shared_memory import SharedMemoryArena
from .index_file import IndexFile


@dataclass(frozen=True, slots=True, eq=False)
class KeptTier:
    """The open files of one tier of a pool."""

    arena: KeptArena
    index: IndexFile
    arena_path: Path
    index_path: Path

    @property
    def num_blocks(self) -> int:
        return self.index.description.num_blocks

    @property
    def paths(self) -> tuple[Path, Path]:
        return self.arena_path, self.index_path

    def remove(self) -> None:
        """Removes both files, and what the arena's stands for. Processes that map the arena keep what they mapped."""
        self.arena.forget()
        self.index_path.unlink(missing_ok=True)
        self.arena_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives up this process's descriptor and its mapping of the index; the arena is closed on its own."""
        self.index.close()


@dataclass(slots=True, eq=False)
class KeptPool:
    """The open files of one pool; hosts: those of its host tier, where it is kept."""

    device: KeptTier
    hosts: KeptTier | None = None

    @property
    def spec(self) -> KvSpec:
        return self.device.index.description.spec

    @property
    def tiers(self) -> list[KeptTier]:
        return [self.device] if self.hosts is None else [self.device, self.hosts]

    def kept(self) -> KeptIndex:
        """What the core reads and writes."""
        index, hosts = self.device.index, self.hosts
        table = None if hosts is None else hosts.index.table
        return KeptIndex(index.table, table, index.scopes, index.note_root, index.num_nameless)

    def drop_hosts(self) -> None:
        """Removes the files of the host tier, and closes its arena."""
        if self.hosts is not None:
            self.hosts.remove()
            self.hosts.close()
            self.hosts.arena.close()
            self.hosts = None

    def may_be_written(self) -> bool:
        """Whether a process of an earlier run still maps an arena."""
        return any(file_locks.is_held_by_others(tier.arena.descriptor) for tier in self.tiers)

    def remove(self) -> None:
        """Removes all files. Processes that map an arena keep what they mapped."""
        for tier in reversed(self.tiers):
            tier.remove()

    def close(self) -> None:
        """See KeptTier."""
        for tier in self.tiers:
            tier.close()


_MARK = 1 << 32  # no digest is 0


class BlockDigests:
    """The digests of blocks in both tiers of one pool. Blocks must not be written meanwhile, or the digest is of no use."""

    def __init__(self, pool: KeptPool) -> None:
        self.block_bytes = pool.spec.block_bytes
        tiers = zip((Tier.DEVICE, Tier.HOST), pool.tiers, strict=False)
        self._blocks = {tier: _blocks(kept) for tier, kept in tiers}
        self._keys = [tier.index.description.key & 0xFFFFFFFF for tier in pool.tiers]

    def of(self, tier: Tier, blocks: Int32Array) -> UInt64Array:
        """[n] digests of blocks [n]; in any thread."""
        rows, key = self._blocks[tier], self._keys[tier is Tier.HOST]
        return np.fromiter((zlib.crc32(rows[block], key) | _MARK for block in blocks.tolist()), np.uint64, len(blocks))


def _blocks(kept: KeptTier) -> ByteArray:
    assert isinstance(kept.arena, SharedMemoryArena), "digests are of memory of the machine"
    return kept.arena.blocks(kept.num_blocks, kept.index.description.block_bytes)
