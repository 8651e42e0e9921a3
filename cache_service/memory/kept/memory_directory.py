"""MemoryDirectory: the folder in which pools outlive the service, of one service at a time.

Owns which files are in it: `pool-NAME.arena` with `pool-NAME.index` for each pool, `host-NAME.arena` with `host-NAME.index` for
its host tier, `spare-NAME.arena` for memory that no pool has used, `new-NAME` for what is being made, and `lock`. Rules: the
folder is the user's alone and lies in memory; a file that is not what a run has left is removed and never believed; files that
are named otherwise are let be. A spare arena gets its pool's name before the pool uses it, so a spare one is all zero. A file
that only stands for memory of a device is no spare: before a pool has it, that memory ends with the service.
"""

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import structlog

from kvkeeper.common.service import memory_limit
from kvkeeper.common.service.listen import AddressInUse
from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.mounts import IN_MEMORY, file_system

from ...core.values.kv_spec import KvSpec
from .. import file_locks
from ..arena import KeptArena
from ..file_locks import FolderInUse
from ..private_file import FileRefused, make_file, open_file, private_directory
from ..shared_memory import SharedMemoryArena
from .index_file import IndexFile, arena_file_bytes
from .kept_memory import FileMemory, KeptMemory
from .kept_pool import KeptPool, KeptTier

log = structlog.get_logger()

A = TypeVar("A", bound=KeptArena)

_SECTOR = 512  # bytes that st_blocks counts
_OURS = re.compile(r"(pool|host|spare|new)-[0-9a-f]{16}\.(arena|index)")


class MemoryRefused(Exception):
    """The folder cannot hold the memory of pools. The text is one line."""


def kept_bytes(path: Path) -> int:
    """Bytes that the arenas of earlier runs take in the folder; a start needs no others for as much."""
    return sum(file.lstat().st_blocks * _SECTOR for file in path.glob("*.arena") if _OURS.fullmatch(file.name))


class MemoryDirectory:
    """An open folder. Raises MemoryRefused."""

    def __init__(self, path: Path, *, keep: bool, memory: KeptMemory | None = None) -> None:
        """keep: the files of pools stay when the service stops. memory: closed with the folder; by default the files' own."""
        self.keep = keep
        self._memory: KeptMemory = memory or FileMemory()
        try:
            self._path = private_directory(path)
            self._lock = file_locks.lock_folder(path, keep=keep)
        except (AddressInUse, FolderInUse) as error:
            raise MemoryRefused(str(error)) from None
        except OSError as error:
            raise MemoryRefused(f"no file can be made there: {error.strerror}") from None
        try:
            file_locks.is_held_by_others(self._lock)
        except OSError as error:
            self.close()
            mend = "run a Linux kernel of 3.15 or later, or allow it in the container's seccomp"
            raise MemoryRefused(f"fcntl of F_OFD_GETLK: {error.strerror}; {mend}") from None
        if (kind := file_system(path)) not in IN_MEMORY:
            self.close()
            raise MemoryRefused(f"the folder lies on {kind}, and the memory of pools needs tmpfs, such as /dev/shm")

    def open_pools(self) -> list[KeptPool]:
        """The pools that earlier runs have left, the last used first. What is damaged, foreign or half made is removed."""
        pools: list[KeptPool] = []
        indexes = [path for path in self._files("index") if path.name.startswith("pool-")]
        if not self._memory.can_open():
            indexes = []
        for index_path in sorted(indexes, key=lambda path: path.lstat().st_mtime, reverse=True):
            try:
                pools.append(_open_pool(index_path, self._memory))
            except FileRefused as refusal:
                log.warning("kept_memory_refused", why=str(refusal))
        known = {path for pool in pools for tier in pool.tiers for path in tier.paths}
        arenas = [path for path in self._files("arena") if not path.name.startswith("spare-")]
        for path in [*self._files("index"), *arenas]:
            if path not in known:
                path.unlink()
        return pools

    def settle(self) -> None:
        """The pools of earlier runs that are wanted have been opened, and all others removed."""
        self._memory.settle()

    def open_spares(
        self, pools: tuple[int, int] = (0, 0), hosts: tuple[int, int] = (0, 0)
    ) -> tuple[list[KeptArena], list[SharedMemoryArena]]:
        """Arenas that earlier runs have reserved and not used, of pools and of host tiers; all others are removed.

        pools, hosts: the bytes of each, and the most that are wanted. Memory of a device that no pool uses is in no file.
        Raises OutOfMemory, and CudaError where a host tier cannot be pinned.
        """
        spares, spare_hosts = list[KeptArena](), list[SharedMemoryArena]()
        for path in self._files("arena"):
            if not path.name.startswith("spare-"):
                continue
            num_bytes = path.lstat().st_size
            if self._memory.is_in_files and num_bytes == arena_file_bytes(pools[0]) and len(spares) < pools[1]:
                is_taken = _take_spare(path, pools[0], self._memory.make, spares)
            elif num_bytes == arena_file_bytes(hosts[0]) and len(spare_hosts) < hosts[1]:
                is_taken = _take_spare(path, hosts[0], self._memory.make_host, spare_hosts)
            else:
                is_taken = False
            if not is_taken:
                path.unlink()
        return spares, spare_hosts

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Raises OutOfMemory where arenas of num_bytes and host tiers of num_host_bytes do not fit now."""
        self._memory.require(num_bytes, num_host_bytes)

    def allocate_host(self, num_bytes: int) -> SharedMemoryArena:
        """The arena of a host tier in a new file, all zero. Raises OutOfMemory."""
        return self._made(self._memory.make_host, num_bytes, is_in_file=True)

    def allocate(self, num_bytes: int, rank: int = 0) -> KeptArena:
        """An arena of a new file, all zero. Raises OutOfMemory."""
        assert not rank, "pools of several ranks are refused here"
        return self._made(self._memory.make, num_bytes, is_in_file=self._memory.is_in_files)

    def _made(self, make: Callable[[int, int], A], num_bytes: int, *, is_in_file: bool) -> A:
        """An arena of a new file, which is gone again where the arena cannot be had. Raises OutOfMemory, CudaError."""
        if is_in_file:
            memory_limit.require(num_bytes)
        path = self._path / f"{'spare' if is_in_file else 'new'}-{secrets.token_hex(8)}.arena"
        descriptor = make_file(path, arena_file_bytes(num_bytes), has_pages=is_in_file)
        file_locks.hold(descriptor)
        try:
            return make(descriptor, num_bytes)
        except BaseException:
            path.unlink()
            raise

    def make_pool(self, arena: KeptArena, spec: KvSpec, num_blocks: int) -> KeptPool:
        """The files of a new pool on an arena of this folder that no pool has used. Raises OutOfMemory."""
        facts = (spec.key, str(num_blocks).encode(), str(arena.num_bytes).encode())
        name = hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]
        on_device = replace(spec, host_kv_dtype="")  # how its host tier is kept is of that alone
        pool = KeptPool(self._make_tier(f"pool-{name}", arena, on_device, num_blocks))
        arena.keep()
        return pool

    def add_hosts(self, pool: KeptPool, arena: SharedMemoryArena, spec: KvSpec, num_blocks: int) -> None:
        """Makes the files of the host tier of a pool that has none, on an arena like a pool's. Raises OutOfMemory.

        spec: the pool's, with what the tier keeps its blocks in.
        """
        name = pool.device.index_path.stem.replace("pool", "host")
        pool.hosts = self._make_tier(name, arena, spec, num_blocks, pool.device.index)

    def _make_tier(self, name: str, arena: KeptArena, spec: KvSpec, num_blocks: int, pool: IndexFile | None = None) -> KeptTier:
        """pool: the index of the pool whose host tier it is."""
        arena_path, index_path = self._path / f"{name}.arena", self._path / f"{name}.index"
        new_path = self._path / f"new-{name[-16:]}.index"
        index = IndexFile.make(new_path, arena, spec, num_blocks, 0 if pool is None else pool.description.key)
        index.count_run(arena, 1 if pool is None else pool.num_runs)
        try:
            self._get_path(arena).rename(arena_path)
            new_path.rename(index_path)
        except OSError as error:
            raise OutOfMemory(f"no file can be made: {error.strerror}") from None
        return KeptTier(arena, index, arena_path, index_path)

    def remove_arena(self, arena: KeptArena) -> None:
        """Removes the files of an arena that no pool has used."""
        arena.forget()
        path = self._get_path(arena)
        path.unlink()
        path.with_suffix(".index").unlink(missing_ok=True)

    def close(self) -> None:
        """Lets another service have the folder. A folder in which nothing is kept goes."""
        self._memory.close()
        if not self.keep and not list(self._files("arena")):
            (self._path / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something else is in it
                self._path.rmdir()
        os.close(self._lock)

    def _get_path(self, arena: KeptArena) -> Path:
        inode = os.fstat(arena.descriptor).st_ino
        return next(path for path in self._files("arena") if path.lstat().st_ino == inode)

    def _files(self, suffix: str) -> Iterator[Path]:
        """Files of ours, by name."""
        for path in sorted(self._path.iterdir()):
            is_folder = path.is_dir() and not path.is_symlink()
            if _OURS.fullmatch(path.name) and path.suffix == f".{suffix}" and not is_folder:
                yield path


def _take_spare(path: Path, num_bytes: int, make: Callable[[int, int], A], into: list[A]) -> bool:
    """Whether the file is one of ours, and its arena is among the others now. Raises OutOfMemory, CudaError."""
    try:
        descriptor = open_file(path)
    except FileRefused:
        return False
    file_locks.hold(descriptor)
    into.append(make(descriptor, num_bytes))
    return True


def _open_pool(index_path: Path, memory: KeptMemory) -> KeptPool:
    """Without its host tier where the files of that are refused. Raises FileRefused."""
    pool = KeptPool(_open_tier(index_path, memory))
    host_path = index_path.with_name(index_path.name.replace("pool", "host"))
    try:
        if host_path.exists():
            pool.hosts = _open_tier(host_path, memory, pool.device.index)
    except FileRefused as refusal:
        log.warning("kept_memory_refused", why=f"of a host tier: {refusal}")
    num_runs = pool.device.index.num_runs + 1
    for tier in pool.tiers:
        tier.index.count_run(tier.arena, num_runs)
    pool.device.arena.keep()
    return pool


def _open_tier(index_path: Path, memory: KeptMemory, pool: IndexFile | None = None) -> KeptTier:
    """pool: the index of the pool whose host tier it is. Raises FileRefused."""
    index = IndexFile.open(index_path)
    arena_path = index_path.with_suffix(".arena")
    try:
        if pool is not None:
            index.check_pool(pool)
        elif index.description.pool:
            raise FileRefused("it is that of a host tier")
        descriptor = open_file(arena_path)
        try:
            index.check_file(descriptor)
            file_locks.hold(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        num_bytes, place = index.description.num_bytes, index.description.place
        arena: KeptArena = memory.make_host(descriptor, num_bytes) if pool else memory.open(descriptor, num_bytes, place)
        try:
            index.check_stamp(arena)
            arena.write(0, bytes(index.description.block_bytes))  # the null block, which others are cleared with
        except BaseException:
            arena.close()
            raise
    except BaseException:
        index.close()
        raise
    return KeptTier(arena, index, arena_path, index_path)
