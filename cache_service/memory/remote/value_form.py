"""The form of a value: a header of one check, one length and one digest, and then the bytes of a block.

The check is keyed, and covers the key that the value lies under, its length and its digest: so a value that was moved, cut, or
put there without the secret says nothing. The digest (XXH3, 128 bits) finds bytes that changed. Numbers are little-endian.
"""

import hashlib
import struct
from collections.abc import Callable

_MAGIC = b"kvkeeper remote1"
_CHECK_BYTES, _DIGEST_BYTES = 16, 16
_LENGTH = struct.Struct("<Q")
HEADER_BYTES = len(_MAGIC) + _CHECK_BYTES + _LENGTH.size + _DIGEST_BYTES


class ValueForm:
    """Values of one pool."""

    def __init__(self, key: bytes, block_bytes: int, digest: Callable[[memoryview], bytes]) -> None:
        """key: 1 to 64 bytes, secret."""
        self._key, self._block_bytes, self._digest = key, block_bytes, digest

    def encode(self, at: bytes, block: memoryview) -> bytes:
        """The value of a block that is to lie under the key `at`."""
        fields = _LENGTH.pack(len(block)) + self._digest(block)
        return b"".join((_MAGIC, self._check(at, fields), fields, block))

    def decode_into(self, at: bytes, value: bytes, block: memoryview) -> bool:
        """Whether the value under the key `at` is one, and whole; only then the block holds its bytes."""
        if len(value) != HEADER_BYTES + self._block_bytes or not value.startswith(_MAGIC):
            return False
        header, body = value[len(_MAGIC) : HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
        check, fields = header[:_CHECK_BYTES], header[_CHECK_BYTES:]
        if check != self._check(at, fields) or _LENGTH.unpack_from(fields)[0] != self._block_bytes:
            return False
        block[:] = body
        return self._digest(block) == fields[_LENGTH.size :]  # in the memory that it is used from

    def _check(self, at: bytes, fields: bytes) -> bytes:
        return hashlib.blake2b(at + fields, digest_size=_CHECK_BYTES, key=self._key, person=b"value").digest()
