"""Names of a certificate, as far as they can be trusted to be whole.

gRPC gives a name to Python as a C string, which ends at the first zero byte. So a certificate whose name is "operator.example",
a zero byte and ".other.net", which an authority may sign for the owner of other.net, would come as "operator.example". A name
counts only where it stands in the certificate as it is, and nowhere continues with a zero byte.
"""

import base64
import binascii
from collections.abc import Sequence
from functools import lru_cache

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"


@lru_cache(maxsize=1024)
def decode_names(pem: bytes, names: Sequence[bytes]) -> tuple[str, ...]:
    """Those of the names, as gRPC lists them, that are whole; none where one of them is not. pem: the certificate."""
    der = _der(pem)
    if any(not name or name not in der or name + b"\0" in der for name in names):
        return ()
    try:
        return tuple(name.decode() for name in names)
    except UnicodeDecodeError:
        return ()


def _der(pem: bytes) -> bytes:
    body = pem.partition(_BEGIN)[2].partition(_END)[0]
    try:
        return base64.b64decode(body)
    except binascii.Error:
        return b""
