"""RemoteAddress: what --remote says: where the server is, and whether it is spoken to under TLS.

An address has no user and no password, which would be seen in a list of processes: they are in --remote-secret.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_FORM = re.compile(
    r"(redis|rediss|valkey|valkeys|mooncake)://(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})(?:/(\d{1,4}))?"
)
FORM_WORDS = "redis://HOST:PORT/DB, rediss://, valkey:// or valkeys://, or mooncake://MASTER:PORT"


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """ca: of the certificates that the server may have, None for those that the machine knows.

    is_mooncake: the master of a Mooncake store, not a Valkey or Redis server.
    """

    host: str
    port: int
    db: int
    is_tls: bool
    ca: Path | None = None
    is_mooncake: bool = False


def parse_address(text: str, ca: Path | None = None) -> RemoteAddress:
    """Raises ValueError, which does not repeat the text: it may hold a password."""
    found = _FORM.fullmatch(text)
    if found is None or not 1 <= int(found[3]) <= 65535:
        raise ValueError(f"{FORM_WORDS}, without a user or a password")
    scheme, host, port, db = found.groups()
    is_mooncake = scheme == "mooncake"
    if is_mooncake and db is not None:
        raise ValueError("mooncake://MASTER:PORT has no database")
    return RemoteAddress(host.strip("[]"), int(port), int(db or 0), scheme in ("rediss", "valkeys"), ca, is_mooncake)
