"""RemoteAddress: what --remote says: where the server is, or the nodes of a cluster, and whether it is spoken to under TLS.

An address has no user and no password, which would be seen in a list of processes: they are in --remote-secret.

RemoteSecret is what that file says, and the keys that are made of it. It has a line for each: `key = ...`, which all services
that are to share blocks have in common, and `user = ...` and `password = ...` of the server where it wants them. Nothing of it
is ever shown: the text of an error names lines, not values.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvkeeper.common.trust.private_file import FileRefused, read_private

_NODE = r"(?:\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):\d{1,5}"
_MOST_NODES = 64
_FORM = re.compile(
    rf"(redis|rediss|valkey|valkeys|mooncake)://({_NODE}(?:,{_NODE}){{0,{_MOST_NODES - 1}}})(?:/(\d{{1,4}}))?(\?cluster=true)?"
)
FORM_WORDS = (
    "redis://HOST:PORT/DB, rediss://, valkey:// or valkeys://, redis://HOST:PORT,HOST:PORT?cluster=true of a cluster, "
    "or mooncake://MASTER:PORT"
)


class Node(NamedTuple):
    """Where one process listens. host: without brackets."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """ca: of the certificates that the server may have, None for those that the machine knows.

    nodes: the one server, or those of a cluster that are asked for the others. is_mooncake: the master of a Mooncake store, not
    a Valkey or Redis server.
    """

    nodes: tuple[Node, ...]
    db: int
    is_tls: bool
    ca: Path | None = None
    is_cluster: bool = False
    is_mooncake: bool = False

    @property
    def host(self) -> str:
        return self.nodes[0].host

    @property
    def port(self) -> int:
        return self.nodes[0].port


def parse_address(text: str, ca: Path | None = None) -> RemoteAddress:
    """Raises ValueError, which does not repeat the text: it may hold a password."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{FORM_WORDS}, without a user or a password")
    scheme, listed, db, cluster = found.groups()
    nodes = tuple(Node(host.strip("[]"), int(port)) for host, _, port in (each.rpartition(":") for each in listed.split(",")))
    if not all(1 <= node.port <= 65535 for node in nodes):
        raise ValueError(f"{FORM_WORDS}, without a user or a password")
    is_mooncake = scheme == "mooncake"
    if is_mooncake and (db is not None or cluster is not None or len(nodes) > 1):
        raise ValueError("mooncake://MASTER:PORT has one master and no database")
    if len(nodes) > 1 and not cluster:
        raise ValueError("several nodes are those of a cluster: redis://HOST:PORT,HOST:PORT?cluster=true")
    if cluster and int(db or 0):
        raise ValueError("a cluster has only the database 0")
    return RemoteAddress(nodes, int(db or 0), scheme in ("rediss", "valkeys"), ca, bool(cluster), is_mooncake)


_LEAST_KEY, _MOST_KEY = 16, 1024  # characters
_NAMES = ("key", "user", "password")


@dataclass(frozen=True, slots=True)
class RemoteSecret:
    """key: shared. user and password: None where the server is to be asked without."""

    key: str = field(repr=False)
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def derive(self, purpose: bytes, text: bytes = b"") -> bytes:
        """32 bytes for one purpose, of up to 16 bytes, that reveal nothing of the key."""
        key = hashlib.blake2b(self.key.encode(), digest_size=64).digest()
        return hashlib.blake2b(text, digest_size=32, key=key, person=purpose).digest()


def read_secret(path: Path) -> RemoteSecret:
    """Raises FileRefused."""
    values: dict[str, str] = {}
    try:
        lines = read_private(path).decode().splitlines()
    except UnicodeDecodeError:
        raise FileRefused("it is not text") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or name not in _NAMES or name in values or not value:
            raise FileRefused(f"line {number} is not one of key, user and password, each once: NAME = VALUE")
        values[name] = value
    if not _LEAST_KEY <= len(values.get("key", "")) <= _MOST_KEY:
        raise FileRefused(f"it needs a key of {_LEAST_KEY} to {_MOST_KEY} characters: key = ...")
    if "user" in values and "password" not in values:
        raise FileRefused("a user needs a password")
    return RemoteSecret(values["key"], values.get("user"), values.get("password"))
