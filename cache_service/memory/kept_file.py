"""The files of one tier of a kept pool: its arena, and beside it the index that is written down of it.

Owns their form. A pool has such files, and its host tier has others like them, without tenants. The arena's file has one page
more than the arena, with a stamp; the index file has a header, a check and a row for each block, and at its end the tenants'
names, one record each. Rules: every size follows from the header, and a file of another size is refused before it is mapped;
arena and index carry the same key and the same number of runs, so a file from elsewhere, or of an earlier time, is refused; an
arena that is not in its file carries them in its memory; those of a host tier name the key of their pool, and have its number
of runs; a tenant's name is stored before the tenant gets a block, and a log that lacks one makes the whole index worthless,
because blocks of an unknown tenant could not be cleared (R8). Nothing is unpickled.
"""

import contextlib
import json
import mmap
import os
import re
import secrets
import stat
import struct
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from kvkeeper.service.memory_limit import OutOfMemory

from ..core.values.kept_index import KeptIndex, KeptTable, row_words
from ..core.values.kv_spec import HOST_BITS, KvSpec, LayerGroup
from ..core.values.types import Int32Array
from . import file_locks
from .arena import KeptArena, Place
from .shared_memory import reserve_pages, whole_pages

_FORMAT = 2
_MAGIC = b"kvkeeper"
_PAGE = mmap.PAGESIZE
_HEADER_BYTES = 4 * _PAGE
_HEAD = struct.Struct("<8sIII")  # magic, format, length and crc32 of the description
_COUNTS = struct.Struct("<QQ")  # runs, tenants that got a block, at the end of the header
_STAMP = struct.Struct("<QQ")  # key, runs, in the arena's last page
_RECORD = struct.Struct("<HI")  # length and crc32 of a tenant's name
_MOST_TENANTS = 65_536
_MOST_BLOCKS = 1 << 24
_COUNT_FIELDS = ("key", "arena", "num_blocks", "num_bytes")
_PLACE = re.compile(r"[0-9a-f]{32} [0-9a-f]{16}")
_ELEMENT_COUNTS = ("num_layers", "num_kv_heads", "head_dim", "item_bytes")  # all 0 of opaque pages


class FileRefused(Exception):
    """A file is not what a run of this service has left. The text says why, in a few words."""


def arena_file_bytes(num_bytes: int) -> int:
    """Bytes of the file of an arena of so many bytes."""
    return whole_pages(num_bytes) + _PAGE


def open_file(path: Path) -> int:
    """A descriptor of a regular file that is this user's alone. Raises FileRefused."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise FileRefused(f"it cannot be opened: {error.strerror}") from None
    status = os.fstat(descriptor)
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077 and status.st_nlink == 1
    if not stat.S_ISREG(status.st_mode) or not is_ours:
        os.close(descriptor)
        raise FileRefused("it is not a file of this user alone")
    return descriptor


def make_file(path: Path, num_bytes: int, *, has_pages: bool = True) -> int:
    """A descriptor of a new file of so many bytes, all zero and with their pages. Raises OutOfMemory.

    has_pages: else the file has its size alone, and stands for memory that is elsewhere.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise OutOfMemory(f"no file can be made: {error.strerror}") from None
    if not has_pages:
        os.ftruncate(descriptor, num_bytes)
        return descriptor
    try:
        reserve_pages(descriptor, num_bytes)
    except OutOfMemory:
        path.unlink()
        raise
    return descriptor


@dataclass(frozen=True, slots=True)
class Description:
    """What an index file says of its pool, or of its host tier.

    arena: the inode of the arena's file. pool: of a host tier, the key of its pool's index; else 0. device, held: the place of
    an arena that is not in its file.
    """

    key: int
    arena: int
    num_blocks: int
    num_bytes: int
    spec: KvSpec
    pool: int = 0
    device: str = ""
    held: str = ""

    @property
    def block_bytes(self) -> int:
        """Of one block in the tier that the index is of."""
        return self.spec.stored_bytes if self.pool else self.spec.block_bytes

    @property
    def place(self) -> Place:
        return Place(self.device, self.held)

    def encode(self) -> bytes:
        fields = {**asdict(self), "spec": {**asdict(self.spec), "key": self.spec.key.hex()}}
        for name in ("scaled_bits", "host_kv_dtype"):
            if not fields["spec"][name]:
                del fields["spec"][name]
        for group in fields["spec"]["groups"]:
            for name in ("state_bytes", "checkpoint_blocks"):
                if not group[name]:
                    del group[name]
        if not self.spec.groups:  # as before there were groups
            del fields["spec"]["groups"]
        if self.place == Place():  # as before there were other places
            del fields["device"], fields["held"]
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, text: bytes) -> "Description":
        """Raises FileRefused."""
        try:
            fields = json.loads(text)
            spec = fields.pop("spec")
            groups = tuple(LayerGroup(tuple(each.pop("layers")), **each) for each in spec.pop("groups", ()))
            decoded = cls(**fields, spec=KvSpec(**{**spec, "key": bytes.fromhex(spec["key"]), "groups": groups}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise FileRefused("its description cannot be read") from None
        counts = [getattr(decoded, name) for name in _COUNT_FIELDS]
        if decoded.spec.host_kv_dtype and not (decoded.pool and _is_packed(decoded.spec)):
            raise FileRefused("its description names a format that its blocks cannot be kept in")
        counts += _told_counts(decoded.spec) + ([decoded.pool] if decoded.pool != 0 else [])
        texts = decoded.spec.model_id, decoded.spec.element_type, decoded.spec.host_kv_dtype, decoded.device, decoded.held
        if not all(type(count) is int and 0 < count < 1 << 63 for count in counts) or any(
            type(text) is not str for text in texts
        ):
            raise FileRefused("its description has a value out of range")
        if decoded.spec.groups and not _are_groups(decoded.spec):
            raise FileRefused("its description has groups that are none of its layers")
        if decoded.place != Place() and _PLACE.fullmatch(f"{decoded.device} {decoded.held}") is None:
            raise FileRefused("its description names no place")
        if decoded.num_blocks > _MOST_BLOCKS or decoded.num_blocks * decoded.block_bytes > decoded.num_bytes:
            raise FileRefused("its description has sizes that do not fit each other")
        return decoded


def _is_packed(spec: KvSpec) -> bool:
    return spec.host_kv_dtype in HOST_BITS and spec.stored_as(spec.host_kv_dtype) == spec


def _are_groups(spec: KvSpec) -> bool:
    """Whether each layer is in one group, and the first group reads all tokens."""
    layers = [layer for group in spec.groups for layer in group.layers]
    numbers = [*layers, *(number for group in spec.groups for number in (group.window, group.tail_item_bytes))]
    numbers += [group.checkpoint_blocks for group in spec.groups]
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
        return False
    if not all(_has_lawful_states(spec, group) for group in spec.groups):
        return False
    if not all(group.layers and type(group.is_chunked) is bool for group in spec.groups):
        return False
    first, *further = spec.groups
    every = list(range(spec.num_layers))
    if any(group.is_tail for group in spec.groups):  # which have each layer once more
        are_tails = not first.is_tail and all(group.is_tail is True and group.tail_item_bytes for group in further)
        if not are_tails or list(first.layers) != every:
            return False
        layers = layers[len(every) :]
    return sorted(layers) == every and not first.window and not first.state_bytes


def _has_lawful_states(spec: KvSpec, group: LayerGroup) -> bool:
    """Whether it has none, or such that fit a block and have checkpoints."""
    if type(group.state_bytes) is not int or bool(group.state_bytes) != bool(group.checkpoint_blocks):
        return False
    return not group.state_bytes or (0 < group.state_bytes <= spec.block_bytes and not (group.window or group.is_tail))


def _told_counts(spec: KvSpec) -> list[int]:
    """The counts that a block's bytes follow from, which must all be above 0. Raises FileRefused where others are told, too."""
    elements = [getattr(spec, name) for name in _ELEMENT_COUNTS]
    told, untold = ([spec.page_bytes], elements) if spec.page_bytes != 0 else (elements, [])
    if any(type(count) is not int or count != 0 for count in untold):
        raise FileRefused("its description has both elements and opaque pages")
    return [spec.block_size, *told]


class IndexFile:
    """An open index file. The core reads and writes the table; tenants are those that it names when it is opened."""

    def __init__(self, descriptor: int, description: Description, tenants: tuple[str, ...], tenants_end: int) -> None:
        """Takes the descriptor over."""
        self.description = description
        self.descriptor = descriptor
        num_blocks, words = description.num_blocks, row_words(description.spec.block_size)
        self._map = mmap.mmap(descriptor, _fixed_bytes(description))
        checks = np.frombuffer(self._map, np.uint64, num_blocks, _HEADER_BYTES)
        first_row = _HEADER_BYTES + whole_pages(8 * num_blocks)
        rows: Int32Array = np.frombuffer(self._map, np.int32, num_blocks * words, first_row).reshape(num_blocks, words)
        self._num_tenants = len(tenants)
        self._tenants_end = tenants_end
        self.table = KeptTable(description.key, checks, rows)
        self.tenants = tenants

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
        return cls(descriptor, description, (), _fixed_bytes(description))

    @classmethod
    def open(cls, path: Path) -> "IndexFile":
        """Raises FileRefused."""
        descriptor = open_file(path)
        try:
            description = _read_description(descriptor)
            num_seen = _COUNTS.unpack(os.pread(descriptor, _COUNTS.size, _HEADER_BYTES - _COUNTS.size))[1]
            tenants, end = _read_tenants(descriptor, description)
            if len(tenants) < num_seen:
                raise FileRefused("it lacks the name of a tenant")
            os.ftruncate(descriptor, end)  # a record that was being written
            return cls(descriptor, description, tenants, end)
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
        num_runs, num_tenants = _COUNTS.unpack_from(self._map, _HEADER_BYTES - _COUNTS.size)
        return num_runs % (1 << 63), num_tenants

    def _stamp(self) -> bytes:
        return _STAMP.pack(self.description.key, self._counts()[0])

    def add_tenant(self, name: str) -> None:
        """The tenant counts at once. If its name cannot be stored, no later run believes the file."""
        num_runs, _ = self._counts()
        record = _record(self.description.key, self._num_tenants, name.encode())
        with contextlib.suppress(OSError):
            self._tenants_end += os.pwrite(self.descriptor, record, self._tenants_end)
        self._num_tenants += 1
        _COUNTS.pack_into(self._map, _HEADER_BYTES - _COUNTS.size, num_runs, self._num_tenants)


def _fixed_bytes(description: Description) -> int:
    """Bytes before the tenants' names."""
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


def _read_tenants(descriptor: int, description: Description) -> tuple[tuple[str, ...], int]:
    """The names up to the first record that is not whole, and where that begins. Raises FileRefused for a repeated name."""
    names: list[str] = []
    place, start = 0, _fixed_bytes(description)
    num_bytes = min(os.fstat(descriptor).st_size - start, _MOST_TENANTS * (_RECORD.size + (1 << 10)))
    data = os.pread(descriptor, num_bytes, start)
    while place + _RECORD.size <= len(data) and len(names) < _MOST_TENANTS:
        length, _ = _RECORD.unpack_from(data, place)
        name = data[place + _RECORD.size : place + _RECORD.size + length]
        if data[place : place + _RECORD.size + length] != _record(description.key, len(names), name):
            break
        try:
            names.append(name.decode())
        except UnicodeDecodeError:
            break
        place += _RECORD.size + length
    if len(set(names)) < len(names):
        raise FileRefused("it names a tenant twice")
    return tuple(names), start + place


def _record(key: int, number: int, name: bytes) -> bytes:
    """The record of the tenant of this number."""
    return _RECORD.pack(len(name), zlib.crc32(struct.pack("<QQ", key, number) + name)) + name


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
        return KeptIndex(index.table, None if hosts is None else hosts.index.table, index.tenants, index.add_tenant)

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
