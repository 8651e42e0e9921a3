"""DiskDirectory: the folder of the slabs, of one service at a time, with its whole size taken from the first moment.

Owns which files are in it: `slab-NAME.kv` and `slab-NAME.rows` for each pool, where NAME is a digest of the KV spec and
of what blocks are stored in,
`spare-NAME.kv` for space that no pool has used, and `lock`. Rules: there are as many slabs and spares as pools, each of the
configured size, so that a disk that is too full refuses at start and not later; a file that is not what a run of this service
has left is never believed: it is removed, or set aside under `aside-NAME` where it is not this user's file at all; files that
are named otherwise are let be.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

import structlog

from kvkeeper.common.service.listen import AddressInUse
from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.sizes import size

from ...core.values.kv_spec import KvSpec
from .. import file_locks
from ..file_locks import FolderInUse
from ..private_file import FileRefused, make_file, private_directory
from .slab import Slab, make_slab, rows_path
from .slab_form import fit_form

log = structlog.get_logger()

_OURS = re.compile(r"(slab|spare)-[0-9a-f]{16}\.kv")
_LEAST_SLOTS = 2


class DiskRefused(Exception):
    """The folder cannot hold slabs. The text is one line."""


class DiskDirectory:
    """An open folder. Raises DiskRefused."""

    def __init__(self, path: Path, slab_bytes: int, num_pools: int) -> None:
        self._slab_bytes = slab_bytes // 4096 * 4096
        self._num_pools = num_pools
        self._in_use: set[Path] = set()
        try:
            self._path = private_directory(path)
            self._lock = file_locks.lock_folder(path, keep=False)
        except FolderInUse:
            raise DiskRefused("another cache service has its disk tier there") from None
        except AddressInUse as error:
            raise DiskRefused(str(error)) from None
        except OSError as error:
            raise DiskRefused(f"no file can be made there: {error.strerror}") from None

    def reserve(self) -> None:
        """Takes the space of all pools. Raises DiskRefused where the disk has less."""
        for path in self._files():
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
                self._set_aside(path, "it is not a file of this user alone")
            elif path.name.startswith("spare-") or status.st_size + _size(rows_path(path)) != self._slab_bytes:
                self._remove(path)
        for path in self._files()[self._num_pools :]:
            log.info("disk_slab_dropped", why="there are more than --num-pools")
            self._remove(path)
        for path in self._path.glob("slab-*.rows"):
            if _OURS.fullmatch(path.with_suffix(".kv").name) and not path.with_suffix(".kv").exists():
                self._set_aside(path.with_suffix(".kv"), "its data are gone")
        try:
            for _ in range(self._num_pools - len(self._files())):
                self._make_spare()
        except OutOfMemory as error:
            for path in self._files():
                if path.name.startswith("spare-"):
                    path.unlink()
            num_free = shutil.disk_usage(self._path).free
            text = (
                f"{self._num_pools} times --disk-memory {size(self._slab_bytes)} does not fit, {size(num_free)} are left there"
            )
            raise DiskRefused(f"{text}: {error}") from None

    def obtain(self, spec: KvSpec) -> Slab:
        """The slab of a pool, with what earlier runs have left in it. Raises OutOfMemory."""
        if fit_form(self._slab_bytes, spec).num_slots < _LEAST_SLOTS:
            raise OutOfMemory(f"--disk-memory holds fewer than {_LEAST_SLOTS} blocks of {size(spec.stored_bytes)}")
        path = self._path / f"slab-{hashlib.sha256(spec.stored_key).hexdigest()[:16]}.kv"
        if path.is_symlink() or path.exists():
            try:
                return self._opened(Slab(path, spec, self._slab_bytes))
            except FileRefused as refusal:
                self._set_aside(path, str(refusal))
        spare = self._spare()
        try:
            make_slab(spare, path, spec, self._slab_bytes)
            return self._opened(Slab(path, spec, self._slab_bytes))
        except (OSError, FileRefused) as error:
            raise OutOfMemory(f"no slab can be made: {error}") from None

    def give_back(self, slab: Slab) -> None:
        """Its pool has ended; what is in it stays."""
        self._in_use.discard(slab.path)

    def close(self) -> None:
        """The next service may have the folder."""
        os.close(self._lock)

    def _opened(self, slab: Slab) -> Slab:
        self._in_use.add(slab.path)
        with contextlib.suppress(OSError):
            os.utime(slab.path)  # the last used goes last
        return slab

    def _files(self) -> list[Path]:
        """Slabs and spares, the last used first."""
        found = [path for path in self._path.iterdir() if _OURS.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)

    def _spare(self) -> Path:
        """A preallocated file: one that was kept for that, or one in the place of the slab that was used longest ago."""
        files = self._files()
        spares = [path for path in files if path.name.startswith("spare-")]
        if spares:
            return spares[0]
        idle = [path for path in files if path not in self._in_use]
        if len(files) >= self._num_pools and idle:
            log.info("disk_slab_dropped", why="another KV spec needs its space")
            self._remove(idle[-1])
        return self._make_spare()

    def _make_spare(self) -> Path:
        """Raises OutOfMemory."""
        path = self._path / f"spare-{secrets.token_hex(8)}.kv"
        try:
            os.close(make_file(path, self._slab_bytes))
        except OutOfMemory:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            raise
        return path

    def _set_aside(self, path: Path, why: str) -> None:
        """A file that is not believed. What is this user's own goes; anything else is kept under another name."""
        log.warning("disk_slab_refused", why=why)
        for each in (path, rows_path(path)):
            try:
                status = each.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1:
                each.unlink()
            else:
                each.rename(each.with_name(f"aside-{secrets.token_hex(8)}"))

    def _remove(self, path: Path) -> None:
        """A slab or a spare."""
        for each in (path, rows_path(path)):
            with contextlib.suppress(FileNotFoundError):
                each.unlink()


def _size(path: Path) -> int:
    """The size of a file; 0 where there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
