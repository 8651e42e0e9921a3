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
_FIELD_BYTES = _LENGTH.size + _DIGEST_BYTES
HEADER_BYTES = len(_MAGIC) + _CHECK_BYTES + _FIELD_BYTES


class ValueForm:
    """Values of one pool."""

    def __init__(self, key: bytes, block_bytes: int, digest: Callable[[memoryview], bytes]) -> None:
        """key: 1 to 64 bytes, secret."""
        self._key, self._block_bytes, self._digest = key, block_bytes, digest

    def header(self, at: bytes, block: memoryview) -> bytes:
        """What the value of a block that is to lie under the key `at` begins with."""
        fields = _LENGTH.pack(len(block)) + self._digest(block)
        return b"".join((_MAGIC, self._check(at, fields), fields))

    def is_whole(self, at: bytes, header: bytes, block: memoryview) -> bool:
        """Whether these are the header and the block of a value that was put under the key `at`."""
        check, fields = header[len(_MAGIC) : -_FIELD_BYTES], header[-_FIELD_BYTES:]
        if not header.startswith(_MAGIC) or check != self._check(at, fields) or len(header) != HEADER_BYTES:
            return False
        if _LENGTH.unpack_from(fields)[0] != self._block_bytes or len(block) != self._block_bytes:
            return False
        return self._digest(block) == fields[_LENGTH.size :]  # in the memory that it is used from

    def _check(self, at: bytes, fields: bytes) -> bytes:
        return hashlib.blake2b(at + fields, digest_size=_CHECK_BYTES, key=self._key, person=b"value").digest()
