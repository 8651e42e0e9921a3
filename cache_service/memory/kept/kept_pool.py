"""The open files of one pool: a tier's arena with its index, and the pool with its host tier."""

from dataclasses import dataclass
from pathlib import Path

from ...core.values.kept_index import KeptIndex
from ...core.values.kv_spec import KvSpec
from .. import file_locks
from ..arena import KeptArena
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
        return KeptIndex(index.table, table, index.tenants, index.add_tenant, index.num_nameless)

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
