"""The form of a slab: two files, with everything at its fixed place.

    slab-NAME.rows   a header of one page | one row for each slot, in order
    slab-NAME.kv     the slots, each in whole pages

Two files, because a file system lets nothing else happen to a file while it takes a row into its cache. A row says what its
slot holds: era, number of the store, length, name, name of the parent, digest of the bytes, the parent's name as clients see
it, tokens. A check under the slab's key covers the row and the number of its slot. So a row that was torn, moved or forged says
nothing, and a slot whose bytes are not those of its row is found by the digest. All zero is an empty row. Numbers are
little-endian.
"""

import hashlib
import struct
from collections.abc import Callable
from typing import NamedTuple

from kvkeeper.common.service.memory_limit import OutOfMemory

from ...core.values.copies import NAME_BYTES, StoredBlock, TierOrder
from ...core.values.kv_spec import BLOCK_NAME_BYTES, KvSpec, block_name

PAGE = 4096  # what O_DIRECT wants of offsets, lengths and memory on every disk that is sold
KEY_BYTES = 32
DIGEST_BYTES = 16
_MAGIC = b"kvkeeper disk 2\n"
_HEADER = struct.Struct(f"<{len(_MAGIC)}s{KEY_BYTES}s32sQQQQ")  # magic, key, digest of the KV spec, sizes as in Form, era
# era, number, length, 0, names, digest, and the parent's name as clients see it: 0 for a block of another group than the first
_ROW = struct.Struct(f"<QQII{NAME_BYTES}s{NAME_BYTES}s{DIGEST_BYTES}s{BLOCK_NAME_BYTES}s")
_CHECK_BYTES = 16


def whole_pages(num_bytes: int) -> int:
    """So many bytes, rounded up."""
    return -(-num_bytes // PAGE) * PAGE


class Form(NamedTuple):
    """The places in a slab; slots are numbered from 1."""

    num_slots: int
    block_bytes: int
    block_size: int

    @property
    def row_bytes(self) -> int:
        return _CHECK_BYTES + _ROW.size + 4 * self.block_size

    @property
    def slot_bytes(self) -> int:
        return whole_pages(self.block_bytes)

    @property
    def rows_bytes(self) -> int:
        """The size of the file of rows."""
        return whole_pages(self.row_at(self.num_slots + 1))

    def row_at(self, slot: int) -> int:
        return PAGE + (slot - 1) * self.row_bytes

    def slot_at(self, slot: int) -> int:
        return (slot - 1) * self.slot_bytes


def fit_form(num_bytes: int, spec: KvSpec) -> Form:
    """The largest slab of this spec in so many bytes, both files together; perhaps of no slot."""
    one = Form(1, spec.stored_bytes, spec.block_size)
    num_slots = max((num_bytes - 2 * PAGE) // (one.row_bytes + one.slot_bytes), 0)
    return Form(num_slots, spec.stored_bytes, spec.block_size)


class Header(NamedTuple):
    """What the first page says. key: secret, drawn for each slab."""

    key: bytes
    form: Form
    era: int

    def encode(self, spec: KvSpec) -> bytes:
        """One page."""
        form = self.form
        sizes = form.num_slots, form.block_bytes, form.block_size, self.era
        text = _HEADER.pack(_MAGIC, self.key, hashlib.sha256(spec.stored_key).digest(), *sizes)
        return (text + _keyed(self.key, b"header", text)).ljust(PAGE, b"\0")


def decode_header(page: bytes, form: Form, spec: KvSpec) -> Header | None:
    """The header of a slab of this form and KV spec; None where the page is none."""
    text, check = page[: _HEADER.size], page[_HEADER.size :][:_CHECK_BYTES]
    if len(page) < PAGE:
        return None
    magic, key, digest, num_slots, block_bytes, block_size, era = _HEADER.unpack(text)
    is_right = magic == _MAGIC and Form(num_slots, block_bytes, block_size) == form
    is_right &= digest == hashlib.sha256(spec.stored_key).digest() and check == _keyed(key, b"header", text)
    return Header(key, form, era) if is_right else None


class Rows:
    """Rows of one slab, as bytes."""

    def __init__(self, key: bytes, form: Form) -> None:
        self._key, self._form = key, form
        self.empty = bytes(form.row_bytes)

    def encode(self, order: TierOrder, digest: bytes) -> bytes:
        """The row of a block that was stored."""
        head = order.era, order.number, self._form.block_bytes, 0, order.name, order.parent, digest, order.parent_block_name
        text = _ROW.pack(*head) + order.tokens
        return self._check(order.slot, text) + text

    def find_digest(self, row: bytes, order: TierOrder) -> bytes | None:
        """The digest of what the slot of an order should hold; None where that is not what the order names."""
        found = self._decode(row, order.slot)
        if found is None:
            return None
        era, _, length, _, name, parent, digest, _ = found
        is_it = (era, length, name, parent) == (order.era, self._form.block_bytes, order.name, order.parent)
        return digest if is_it and row[_CHECK_BYTES + _ROW.size :] == order.tokens else None

    def stored(self, row: bytes, slot: int, era: int) -> StoredBlock | None:
        """What the slot holds, if it does in this era."""
        found = self._decode(row, slot)
        if found is None or found[0] != era:
            return None
        _, number, _, _, name, _, _, parent = found
        if not any(parent):
            return StoredBlock(slot, name, number)
        tokens = row[_CHECK_BYTES + _ROW.size :]
        return StoredBlock(slot, name, number, block_name(parent, tokens), parent, tokens)

    def _decode(self, row: bytes, slot: int) -> tuple[int, int, int, int, bytes, bytes, bytes, bytes] | None:
        text = row[_CHECK_BYTES:]
        if len(row) != self._form.row_bytes or row[:_CHECK_BYTES] != self._check(slot, text):
            return None
        era, number, length, zero, name, parent, digest, parent_block_name = _ROW.unpack_from(text)
        return era, number, length, zero, name, parent, digest, parent_block_name

    def _check(self, slot: int, text: bytes) -> bytes:
        return _keyed(self._key, b"row", struct.pack("<Q", slot) + text)


def name_key(key: bytes, spec: KvSpec) -> bytes:
    """Under which the core names content: of this slab and the whole KV spec."""
    return _keyed(key, b"names", spec.stored_key, 32)


def _keyed(key: bytes, purpose: bytes, text: bytes, num_bytes: int = _CHECK_BYTES) -> bytes:
    return hashlib.blake2b(text, digest_size=num_bytes, key=key, person=purpose).digest()


def digest_under(seed: int) -> Callable[[memoryview], bytes]:
    """XXH3 of 128 bits: as fast as memory, and it finds every accident. That a slot holds what it should is the rows' check."""
    try:
        import xxhash
    except ImportError:
        raise OutOfMemory("this tier needs the package xxhash: pip install xxhash") from None

    def digest(block: memoryview) -> bytes:
        made: bytes = xxhash.xxh3_128_digest(block, seed)
        assert len(made) == DIGEST_BYTES
        return made

    return digest
