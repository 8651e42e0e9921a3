"""IndexFile: the index of one tier of a kept pool, written down beside its arena.

Owns the form of both files. A pool has such files, and its host tier has others like them, without roots. The arena's file
has one page more than the arena, with a stamp; the index file has a header, a check and a row for each block, and at its end
the scopes of the roots. Rules: every size follows from the header, and a file of another size is refused before it is mapped;
arena and index carry the same key and the same number of runs, so a file from elsewhere, or of an earlier time, is refused; an
arena that is not in its file carries them in its memory; those of a host tier name the key of their pool, and have its number
of runs; a root is counted for good before it gets a block, and its scope is stored then, too, where the file has room. So a
later run knows whether blocks may hold tokens of a tenant without a name, and clears them (R8).

RootLog has the scopes, one record each. A record counts only whole and in its place: its check is keyed by the file and by its
number, which is that of its root. What lies behind the last that is whole was being written when a run ended, and is cut off.
Scopes that the file has no room for wait, in their order. A root gets another scope only where that was stored, so no row is
below a root of which its record says something else.
"""

import mmap
import os
import secrets
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvkeeper.common.service.memory_limit import OutOfMemory

from ...core.values.kept_index import KeptTable, row_words
from ...core.values.kv_spec import KvSpec
from ...core.values.types import Int32Array
from ..arena import KeptArena
from ..private_file import FileRefused, make_file, open_file
from ..shared_memory import whole_pages
from .description import Description

_RECORD = struct.Struct("<HI")  # length and crc32 of a scope
_SLOT_BYTES = 512  # more than a record has


class RootLog:
    """The records of an open file from byte `start` on. scopes: those that were there when it was opened; None: damaged."""

    def __init__(self, descriptor: int, key: int, start: int, scopes: tuple[str | None, ...] = ()) -> None:
        """key: the file's."""
        self.scopes = scopes
        self._descriptor, self._key, self._start = descriptor, key, start
        self._num_stored = len(scopes)
        self._unstored: list[str] = []

    @classmethod
    def open(cls, descriptor: int, key: int, start: int) -> "RootLog":
        """What earlier runs have left, up to the last whole record. Raises FileRefused for a repeated scope."""
        data = os.pread(descriptor, max(os.fstat(descriptor).st_size - start, 0), start)
        places = range(0, len(data), _SLOT_BYTES)
        scopes = [_read(key, number, data[place : place + _SLOT_BYTES]) for number, place in enumerate(places)]
        while scopes and scopes[-1] is None:
            scopes.pop()
        known = [scope for scope in scopes if scope is not None]
        if len(set(known)) < len(known):
            raise FileRefused("it names a root twice")
        return cls(descriptor, key, start, tuple(scopes))

    @property
    def num_unstored(self) -> int:
        """Roots whose scopes could not be stored yet."""
        return len(self._unstored)

    def cut(self) -> None:
        """Removes a record that was being written."""
        last = self.scopes[-1] if self.scopes else None
        num_bytes = 0 if last is None else (len(self.scopes) - 1) * _SLOT_BYTES + len(_record(self._key, 0, last.encode()))
        os.ftruncate(self._descriptor, self._start + num_bytes)

    def note(self, root: int, scope: str) -> bool:
        """The next root, whose scope is stored with the others that wait, where there is room; or one with another scope now.

        Returns whether that counts.
        """
        number = -root - 1
        if number < self._num_stored:
            return self._write(number, scope)
        self._unstored[number - self._num_stored : number - self._num_stored + 1] = [scope]
        self.store()
        return True

    def is_new(self, root: int) -> bool:
        return -root > self._num_stored + len(self._unstored)

    def store(self) -> None:
        """Stores the scopes that wait, until one finds no room."""
        while self._unstored and self._write(self._num_stored, self._unstored[0]):
            self._num_stored += 1
            del self._unstored[0]

    def _write(self, number: int, scope: str) -> bool:
        record = _record(self._key, number, scope.encode())
        try:
            return os.pwrite(self._descriptor, record, self._start + number * _SLOT_BYTES) == len(record)
        except OSError:
            return False


def _read(key: int, number: int, data: bytes) -> str | None:
    """The scope of the record of this number; None where it is not whole."""
    if len(data) < _RECORD.size:
        return None
    scope = data[_RECORD.size : _RECORD.size + _RECORD.unpack_from(data)[0]]
    try:
        return scope.decode() if data.startswith(_record(key, number, scope)) else None
    except UnicodeDecodeError:
        return None


def _record(key: int, number: int, scope: bytes) -> bytes:
    """The record of the root of this number, from 0 on."""
    return _RECORD.pack(len(scope), zlib.crc32(struct.pack("<QQ", key, number) + scope)) + scope


_FORMAT = 4
_MAGIC = b"kvkeeper"
_PAGE = mmap.PAGESIZE
_HEADER_BYTES = 4 * _PAGE
_HEAD = struct.Struct("<8sIII")  # magic, format, length and crc32 of the description
_COUNTS = struct.Struct("<QQ")  # runs, roots that got a block, at the end of the header
_STAMP = struct.Struct("<QQ")  # key, runs, in the arena's last page


def arena_file_bytes(num_bytes: int) -> int:
    """Bytes of the file of an arena of so many bytes."""
    return whole_pages(num_bytes) + _PAGE


class IndexFile:
    """An open index file. The core reads and writes the table; scopes are those that it has when it is opened."""

    def __init__(self, descriptor: int, description: Description, log: RootLog) -> None:
        """Takes the descriptor over."""
        self.description = description
        self.descriptor = descriptor
        num_blocks, words = description.num_blocks, row_words(description.spec.block_size)
        self._map = mmap.mmap(descriptor, _fixed_bytes(description))
        checks = np.frombuffer(self._map, np.uint64, num_blocks, _HEADER_BYTES)
        first_row = _HEADER_BYTES + whole_pages(8 * num_blocks)
        rows: Int32Array = np.frombuffer(self._map, np.int32, num_blocks * words, first_row).reshape(num_blocks, words)
        self._log = log
        self.table = KeptTable(description.key, checks, rows)
        self.scopes = log.scopes
        num_known = sum(scope is not None for scope in log.scopes)
        self.num_nameless = max(self._counts()[1] - num_known, 0)  # roots of earlier runs

    @classmethod
    def make(cls, path: Path, arena: KeptArena, spec: KvSpec, num_blocks: int, pool: int = 0) -> "IndexFile":
        """A new file for a pool whose arena was not used yet, or for the host tier of a pool of this key.

        Raises OutOfMemory.
        """
        inode = os.fstat(arena.descriptor).st_ino
        place = arena.place
        description = Description(
            secrets.randbits(62) + 1, inode, num_blocks, arena.num_bytes, spec, pool, place.device, place.name
        )
        text = description.encode()
        if len(text) > _HEADER_BYTES - _HEAD.size - _COUNTS.size:
            raise OutOfMemory(f"its description has {len(text)} bytes, more than an index has room for")
        descriptor = make_file(path, _fixed_bytes(description))
        os.pwrite(descriptor, _HEAD.pack(_MAGIC, _FORMAT, len(text), zlib.crc32(text)) + text, 0)
        return cls(descriptor, description, RootLog(descriptor, description.key, _fixed_bytes(description)))

    @classmethod
    def open(cls, path: Path) -> "IndexFile":
        """Raises FileRefused."""
        descriptor = open_file(path)
        try:
            description = _read_description(descriptor)
            log = RootLog.open(descriptor, description.key, _fixed_bytes(description))
            log.cut()
            return cls(descriptor, description, log)
        except BaseException:
            os.close(descriptor)
            raise

    def check_file(self, arena_file: int) -> None:
        """Raises FileRefused where the file is not that of the arena that the index was written for."""
        status, num_bytes = os.fstat(arena_file), self.description.num_bytes
        if status.st_size != arena_file_bytes(num_bytes) or status.st_ino != self.description.arena:
            raise FileRefused("its arena is another file")

    def check_stamp(self, arena: KeptArena) -> None:
        """Raises FileRefused where the memory is not what the last run has left."""
        try:
            is_ours = arena.read_stamp(_STAMP.size) == self._stamp()
        except OSError:
            is_ours = False
        if not is_ours:
            raise FileRefused("its arena is of another time")

    def check_pool(self, pool: "IndexFile") -> None:
        """Raises FileRefused where this is not the index of the pool's host tier, of the same time."""
        spec = replace(self.description.spec, host_kv_dtype="")
        if self.description.pool != pool.description.key or spec != pool.description.spec:
            raise FileRefused("it is that of another pool")
        if self.num_runs != pool.num_runs:
            raise FileRefused("it is of another time than the pool's")

    @property
    def num_runs(self) -> int:
        """Runs that have used the files."""
        return self._counts()[0]

    def count_run(self, arena: KeptArena, num_runs: int) -> None:
        """Another run uses index and arena: the one of this number."""
        self._map[_HEADER_BYTES - _COUNTS.size : _HEADER_BYTES] = _COUNTS.pack(num_runs, self._counts()[1])
        arena.write_stamp(self._stamp())

    def close(self) -> None:
        """Unmapped with the last view of it."""
        os.close(self.descriptor)

    def _counts(self) -> tuple[int, int]:
        num_runs, num_roots = _COUNTS.unpack_from(self._map, _HEADER_BYTES - _COUNTS.size)
        return num_runs % (1 << 63), num_roots

    def _stamp(self) -> bytes:
        return _STAMP.pack(self.description.key, self._counts()[0])

    def note_root(self, root: int, scope: str) -> bool:
        """See KeptIndex. A new root counts at once: while its scope cannot be stored, a later run would not know its blocks."""
        if self._log.is_new(root):
            num_runs, num_roots = self._counts()
            _COUNTS.pack_into(self._map, _HEADER_BYTES - _COUNTS.size, num_runs, num_roots + 1)
        return self._log.note(root, scope)

    def store_scopes(self) -> None:
        """Stores the scopes that could not be stored before, as far as there is room."""
        self._log.store()

    @property
    def num_unstored(self) -> int:
        """Roots whose scopes could not be stored yet."""
        return self._log.num_unstored


def _fixed_bytes(description: Description) -> int:
    """Bytes before the scopes of the roots."""
    num_blocks, words = description.num_blocks, row_words(description.spec.block_size)
    return _HEADER_BYTES + whole_pages(8 * num_blocks) + whole_pages(4 * words * num_blocks)


def _read_description(descriptor: int) -> Description:
    """Raises FileRefused."""
    header = os.pread(descriptor, _HEADER_BYTES, 0)
    if len(header) < _HEADER_BYTES:
        raise FileRefused("it is too short")
    magic, version, length, crc = _HEAD.unpack_from(header)
    if magic != _MAGIC or version != _FORMAT:
        raise FileRefused("it has another format")
    text = header[_HEAD.size : _HEAD.size + length]
    if len(text) != length or zlib.crc32(text) != crc:
        raise FileRefused("its header is damaged")
    description = Description.decode(text)
    if os.fstat(descriptor).st_size < _fixed_bytes(description):
        raise FileRefused("it is too short")
    return description
