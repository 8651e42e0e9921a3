"""Slab: the preallocated files with the blocks that a pool has on disk.

Owns reading and writing them, straight between the file and the host tier's memory where the file system takes O_DIRECT and
blocks are whole pages; else through a buffer. Rules: the row of a slot is emptied before its bytes change and written after
them, and nothing waits for the disk to be safe: a kill or a loss of power leaves rows that fit their slots, and others, which
the check or the digest finds when they are read. A block counts only after its digest was compared, in the memory that it is
used from. Every method may be called in any thread, for different slots.
"""

import contextlib
import errno
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...core.values.copies import StoredBlock, TierOrder, TierResult
from ...core.values.kv_spec import KvSpec
from ..arena import ByteArray
from ..private_file import FileRefused, make_file, open_file
from .slab_form import KEY_BYTES, PAGE, Header, Rows, decode_header, digest_under, fit_form, name_key

_MOST_TOGETHER = 8 << 20  # bytes in one call of the system
_MOST_BUFFERS = 256
_SCANNED = 4096  # rows read in one go

Buffers = list[memoryview]


class Slab:
    """An open slab. Raises FileRefused where the file is not one of this spec and size."""

    def __init__(self, path: Path, spec: KvSpec, num_bytes: int) -> None:
        self.path = path
        self._spec = spec
        self.form = form = fit_form(num_bytes, spec)
        self._file, self._data = open_file(rows_path(path)), -1
        try:
            header = decode_header(os.pread(self._file, PAGE, 0), form, spec)
            if header is None or os.fstat(self._file).st_size != form.rows_bytes:
                raise FileRefused("it is of another version, KV spec or size")
            self._header = header
            self._data, self.is_direct = _open_data(path)
            if os.fstat(self._data).st_size != num_bytes - form.rows_bytes:
                raise FileRefused("it is of another size")
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise FileRefused(f"it cannot be read: {error.strerror}") from None
            raise
        self._rows = Rows(header.key, self.form)
        self._digest = digest_under(int.from_bytes(header.key[:8], "little"))
        self._buffers = threading.local()

    @property
    def era(self) -> int:
        """How often the pool was cleared."""
        return self._header.era

    @property
    def name_key(self) -> bytes:
        return name_key(self._header.key, self._spec)

    @property
    def block_bytes(self) -> int:
        return self.form.block_bytes

    @property
    def slot_bytes(self) -> int:
        return self.form.slot_bytes

    @property
    def facts(self) -> dict[str, object]:
        """For the log."""
        return {"num_slots": self.form.num_slots, "direct": self.is_direct}

    def begin_clearing(self) -> None:
        """The orders name the era, so none finds what was stored before."""

    def write_era(self, era: int) -> bool:
        """What was stored before this era is not there any more. Whether that is written."""
        header = self._header._replace(era=era)
        try:
            _put(self._file, header.encode(self._spec), 0)
        except OSError:
            return False
        self._header = header
        return True

    def ask(self, names: Sequence[bytes]) -> int | None:
        """A slab is never asked: its table is known."""
        return None

    def scan(self) -> list[StoredBlock]:
        """What the rows of the present era say. Bytes are compared when they are read. Raises OSError."""
        rows, size, found = self._rows, self.form.row_bytes, list[StoredBlock]()
        for first in range(1, self.form.num_slots + 1, _SCANNED):
            last = min(first + _SCANNED, self.form.num_slots + 1)
            raw = os.pread(self._file, (last - first) * size, self.form.row_at(first))
            if not raw.strip(b"\0"):
                continue
            for slot in range(first, last):
                row = raw[(slot - first) * size : (slot - first + 1) * size]
                block = rows.stored(row, slot, self.era) if row != rows.empty else None
                if block is not None:
                    found.append(block)
        return found

    def write(self, orders: Sequence[TierOrder], hosts: ByteArray) -> list[TierResult]:
        """Stores hosts [num_host_blocks, block_bytes] as the orders say. Returns a result for each."""
        results: list[TierResult] = []
        for run in self._runs(orders):
            try:
                self._write_run(run, hosts)
                results += [TierResult.DONE] * len(run)
            except OSError:
                results += [TierResult.FAILED] * len(run)
        return results

    def read(self, orders: Sequence[TierOrder], hosts: ByteArray) -> list[TierResult]:
        """Fills hosts [num_host_blocks, block_bytes] as the orders say. A block without the result DONE holds anything."""
        results: list[TierResult] = []
        for run in self._runs(orders):
            try:
                results += self._read_run(run, hosts)
            except OSError:
                results += [TierResult.FAILED] * len(run)
        return results

    def close(self) -> None:
        """No thread may be running."""
        for descriptor in (self._file, self._data):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._data = -1

    def _runs(self, orders: Sequence[TierOrder]) -> Iterator[list[TierOrder]]:
        """Orders of consecutive slots together, as they come."""
        most = max(min(_MOST_TOGETHER // self.form.slot_bytes, _MOST_BUFFERS), 1)
        run: list[TierOrder] = []
        for order in orders:
            if run and (order.slot != run[-1].slot + 1 or len(run) == most):
                yield run
                run = []
            run.append(order)
        if run:
            yield run

    def _write_run(self, run: list[TierOrder], hosts: ByteArray) -> None:
        first, form = run[0].slot, self.form
        _put(self._file, self._rows.empty * len(run), form.row_at(first))
        digests = [self._digest(memoryview(hosts[order.host])) for order in run]
        if self._is_straight(hosts):
            buffers = [memoryview(hosts[order.host]) for order in run]
        else:
            buffers = self._whole_slots(len(run))
            for buffer, order in zip(buffers, run, strict=True):
                buffer[: form.block_bytes] = memoryview(hosts[order.host])
        _transfer(os.pwritev, self._data, buffers, form.slot_at(first))
        rows = b"".join(self._rows.encode(order, digest) for order, digest in zip(run, digests, strict=True))
        _put(self._file, rows, form.row_at(first))

    def _read_run(self, run: list[TierOrder], hosts: ByteArray) -> list[TierResult]:
        first, form, size = run[0].slot, self.form, self.form.row_bytes
        rows = os.pread(self._file, len(run) * size, form.row_at(first))
        wanted = [self._rows.find_digest(rows[at * size : (at + 1) * size], order) for at, order in enumerate(run)]
        is_straight = self._is_straight(hosts)
        buffers = [memoryview(hosts[order.host]) for order in run] if is_straight else self._whole_slots(len(run))
        _transfer(os.preadv, self._data, buffers, form.slot_at(first))
        results = []
        for order, buffer, digest in zip(run, buffers, wanted, strict=True):
            if not is_straight:
                memoryview(hosts[order.host])[:] = buffer[: form.block_bytes]
            is_it = digest is not None and self._digest(memoryview(hosts[order.host])) == digest
            results.append(TierResult.DONE if is_it else TierResult.DAMAGED)
            if not is_it:
                _put(self._file, self._rows.empty, form.row_at(order.slot))  # so that no later run believes it either
        return results

    def _is_straight(self, hosts: ByteArray) -> bool:
        """Whether the system may move bytes between the file and this memory without a buffer."""
        return self.form.block_bytes == self.form.slot_bytes and not hosts.ctypes.data % PAGE

    def _whole_slots(self, count: int) -> Buffers:
        """This thread's buffers, of a slot each. What is behind the block in them is of an earlier block of this pool, or 0."""
        size = self.form.slot_bytes
        own: mmap.mmap | None = getattr(self._buffers, "mapping", None)
        if own is None or len(own) < count * size:
            own = self._buffers.mapping = mmap.mmap(-1, count * size)
        view = memoryview(own)
        return [view[at * size : (at + 1) * size] for at in range(count)]


def rows_path(path: Path) -> Path:
    """The file of rows beside the file of slots."""
    return path.with_suffix(".rows")


def make_slab(spare: Path, path: Path, spec: KvSpec, num_bytes: int) -> None:
    """Turns a preallocated file of num_bytes into an empty slab at path, of the same size in all.

    Raises OutOfMemory, FileRefused, OSError.
    """
    form = fit_form(num_bytes, spec)
    descriptor = open_file(spare)
    try:
        os.ftruncate(descriptor, num_bytes - form.rows_bytes)
    finally:
        os.close(descriptor)
    with contextlib.suppress(FileNotFoundError):
        rows_path(path).unlink()
    descriptor = make_file(rows_path(path), form.rows_bytes)
    try:
        _put(descriptor, Header(secrets.token_bytes(KEY_BYTES), form, era=1).encode(spec), 0)
    finally:
        os.close(descriptor)
    spare.rename(path)


def _open_data(path: Path) -> tuple[int, bool]:
    """A descriptor for the slots, and whether it goes past the system's cache. Raises FileRefused."""
    plain = open_file(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError:  # the file system has no such thing, or a container denies it
        return plain, False
    try:  # some file systems refuse it only when it is used
        os.preadv(descriptor, [mmap.mmap(-1, PAGE)], 0)
        if os.path.samestat(os.fstat(descriptor), os.fstat(plain)):
            os.close(plain)
            return descriptor, True
    except OSError:
        pass
    os.close(descriptor)
    return plain, False


def _transfer(call: Callable[[int, Buffers, int], int], descriptor: int, buffers: Buffers, at: int) -> None:
    """All of the buffers, in as many calls as it takes. Raises OSError, also where the file ends before."""
    while buffers:
        num_done = call(descriptor, buffers, at)
        if num_done <= 0:
            raise OSError(errno.EIO, "the disk moved nothing")
        at += num_done
        while buffers and num_done >= len(buffers[0]):
            num_done -= len(buffers[0])
            buffers = buffers[1:]
        if buffers and num_done:
            buffers = [buffers[0][num_done:], *buffers[1:]]


def _put(descriptor: int, data: bytes, at: int) -> None:
    """Writes all of it. Raises OSError."""
    if os.pwrite(descriptor, data, at) != len(data):
        raise OSError(errno.EIO, "the disk took less than it was given")
