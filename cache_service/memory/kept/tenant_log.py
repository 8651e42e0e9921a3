"""TenantLog: the names of tenants at the end of an index file, one record each.

A record counts only whole and in its place: its check is keyed by the file and by its number. What lies behind the first that
is not whole was being written when a run ended, and is cut off. Names that the file has no room for wait, in their order,
because a record's number is that of its tenant's root.
"""

import os
import struct
import zlib

from ..private_file import FileRefused

_RECORD = struct.Struct("<HI")  # length and crc32 of a tenant's name
_MOST_TENANTS = 65_536
_MOST_NAME_BYTES = 1 << 10


class TenantLog:
    """The records of an open file from byte `start` on. names: those that were there when it was opened."""

    def __init__(self, descriptor: int, key: int, start: int, names: tuple[str, ...] = (), end: int | None = None) -> None:
        """key: the file's. end: of the records of these names; by default there are none."""
        self.names = names
        self._descriptor = descriptor
        self._key = key
        self._num_stored = len(names)
        self._unstored: list[str] = []
        self._end = start if end is None else end

    @classmethod
    def open(cls, descriptor: int, key: int, start: int) -> "TenantLog":
        """What earlier runs have left. Raises FileRefused for a repeated name."""
        names, end = _read(descriptor, key, start)
        if len(set(names)) < len(names):
            raise FileRefused("it names a tenant twice")
        return cls(descriptor, key, start, tuple(names), end)

    @property
    def num_unstored(self) -> int:
        """Tenants whose names could not be stored yet."""
        return len(self._unstored)

    def cut(self) -> None:
        """Removes a record that was being written."""
        os.ftruncate(self._descriptor, self._end)

    def add(self, name: str) -> None:
        """A tenant more. Its name is stored with the others that wait, where there is room."""
        self._unstored.append(name)
        self.store()

    def store(self) -> None:
        """Stores the names that wait, until one finds no room."""
        while self._unstored:
            record = _record(self._key, self._num_stored, self._unstored[0].encode())
            try:
                if os.pwrite(self._descriptor, record, self._end) < len(record):
                    return
            except OSError:
                return
            self._end += len(record)
            self._num_stored += 1
            del self._unstored[0]


def _read(descriptor: int, key: int, start: int) -> tuple[list[str], int]:
    """The names up to the first record that is not whole, and where that begins."""
    names: list[str] = []
    place = 0
    num_bytes = min(os.fstat(descriptor).st_size - start, _MOST_TENANTS * (_RECORD.size + _MOST_NAME_BYTES))
    data = os.pread(descriptor, num_bytes, start)
    while place + _RECORD.size <= len(data) and len(names) < _MOST_TENANTS:
        length, _ = _RECORD.unpack_from(data, place)
        name = data[place + _RECORD.size : place + _RECORD.size + length]
        if data[place : place + _RECORD.size + length] != _record(key, len(names), name):
            break
        try:
            names.append(name.decode())
        except UnicodeDecodeError:
            break
        place += _RECORD.size + length
    return names, start + place


def _record(key: int, number: int, name: bytes) -> bytes:
    """The record of the tenant of this number."""
    return _RECORD.pack(len(name), zlib.crc32(struct.pack("<QQ", key, number) + name)) + name
