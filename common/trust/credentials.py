"""The file of --auth-tokens: TOML with hashed tokens and names of certificates, each with the caller that it stands for.

    [[token]]
    name = "engine-1"
    sha256 = "3b6e..."
    tenant = "*"
    role = "engine"

    [[certificate]]
    name = "metrics.example.net"
    tenant = "*"
    role = "reader"

A token is 32 random bytes, so one round of SHA-256 is enough: there is nothing to guess that a slow hash would protect. The
name of a certificate's entry is one of its alternative names (DNS or URI), or its common name where it has none. An error
names the entry by its number, never by what stands in it.
"""

import hashlib
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from kvkeeper.common.trust.caller import ANY_TENANT, MAX_NAME_CHARS, Caller, Role
from kvkeeper.common.trust.private_file import FileRefused, read_private, stat_files

log = structlog.get_logger()

TOKEN_PREFIX = "kvk_"
_TOKEN = re.compile(r"kvk_[A-Za-z0-9_-]{43}")
_MAX_CERTIFICATE_NAME_CHARS = 256
_BLIND = secrets.token_bytes(32)
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a file says. tokens: by blinded digest; certificates: by name."""

    tokens: Mapping[bytes, Caller]
    certificates: Mapping[str, Caller]

    def by_token(self, token: str) -> Caller | None:
        """The caller that shows this token. The time that this takes reveals nothing of the tokens that are known."""
        return self.tokens.get(_blinded(hash_token(token))) if _TOKEN.fullmatch(token) is not None else None

    def by_certificate(self, names: Sequence[str]) -> Caller | None:
        """The caller of a certificate with these names; None also where they stand for several callers."""
        found = {self.certificates[name] for name in names if name in self.certificates}
        return found.pop() if len(found) == 1 else None


def make_token() -> str:
    """A new one, of 32 random bytes."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _blinded(digest: bytes) -> bytes:
    """Hashes a digest under a key of this process: how alike two results are says nothing of what they were made from."""
    return hashlib.blake2b(digest, key=_BLIND, digest_size=32).digest()


def make_entry(token: str, caller: Caller) -> str:
    """The lines of the file that let this token in."""
    texts = {"name": caller.name, "sha256": hash_token(token).hex(), "tenant": caller.tenant, "role": caller.role.value}
    return "\n".join(["[[token]]", *(f"{key} = {_quoted(text)}" for key, text in texts.items())]) + "\n"


def read_credentials(path: Path) -> Credentials:
    """Raises FileRefused, in whose text no token, digest or name stands.

    A file without an entry is refused, because a file that is being written begins empty.
    """
    try:
        tables = tomllib.loads(read_private(path).decode())
    except UnicodeDecodeError:
        raise FileRefused(f"{path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (line \d+, column \d+|end of document)\)", str(error))
        raise FileRefused(f"{path} is not TOML{f', at {place[1]}' if place else ''}") from None
    if others := tables.keys() - {"token", "certificate"}:
        raise FileRefused(f"{path} has {len(others)} keys beside the tables [[token]] and [[certificate]]")
    tokens: dict[bytes, Caller] = {}
    certificates: dict[str, Caller] = {}
    for where, entry in _entries(path, tables, "token", {"name", "sha256", "tenant", "role"}):
        if re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]) is None:
            raise FileRefused(f"{where}: sha256 is 64 digits of 0 to f, as kvkeeper token prints them")
        digest = _blinded(bytes.fromhex(entry["sha256"]))
        if digest in tokens:
            raise FileRefused(f"{where}: its sha256 stands above already")
        tokens[digest] = _caller(where, entry, MAX_NAME_CHARS)
    for where, entry in _entries(path, tables, "certificate", {"name", "tenant", "role"}):
        if entry["name"] in certificates:
            raise FileRefused(f"{where}: its name stands above already")
        certificates[entry["name"]] = _caller(where, entry, _MAX_CERTIFICATE_NAME_CHARS)
    if not tokens and not certificates:
        raise FileRefused(
            f"{path} has no [[token]] and no [[certificate]], as while it is written; it would lock all callers out"
        )
    return Credentials(tokens, certificates)


class KnownCallers:
    """The credentials of a file, read anew when it changes. Raises FileRefused where it cannot be used from the beginning.

    A token that is taken out of the file is refused from the next call on, a second later at most. A file that cannot be used
    any more changes nothing: the service keeps what it had, and says so in its log, once for each state of the file.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._path, self._clock = path, clock
        self._state = stat_files(path)
        self._credentials = read_credentials(path)
        self._look_at = clock() + _LOOK_EVERY_S

    def now(self) -> Credentials:
        """Those of the file as it is, or was a second ago."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_EVERY_S
            if (state := stat_files(self._path)) != self._state:
                self._state = state
                self._read_again()
        return self._credentials

    def _read_again(self) -> None:
        try:
            self._credentials = read_credentials(self._path)
        except FileRefused as error:
            log.warning("credentials_not_reloaded", reason=str(error))
        else:
            known = self._credentials
            log.info("credentials_reloaded", num_tokens=len(known.tokens), num_certificates=len(known.certificates))


def _entries(path: Path, tables: Mapping[str, Any], kind: str, keys: set[str]) -> list[tuple[str, dict[str, str]]]:
    """Each with the place that an error names."""
    entries = tables.get(kind, [])
    if not isinstance(entries, list):
        raise FileRefused(f"{path}: write [[{kind}]] in double brackets")
    found = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}: [[{kind}]] number {number}"
        if not isinstance(entry, dict) or entry.keys() != keys or not all(isinstance(text, str) for text in entry.values()):
            raise FileRefused(f"{where}: needs {', '.join(sorted(keys))}, each a text, and nothing else")
        found.append((where, entry))
    return found


def _caller(where: str, entry: Mapping[str, str], most_chars: int) -> Caller:
    name, tenant = entry["name"], entry["tenant"]
    if not 1 <= len(name) <= most_chars or not name.isprintable():
        raise FileRefused(f"{where}: name is 1 to {most_chars} printable characters")
    if len(tenant) > MAX_NAME_CHARS or not tenant.isprintable() or (ANY_TENANT in tenant and tenant != ANY_TENANT):
        raise FileRefused(f"{where}: tenant is at most {MAX_NAME_CHARS} printable characters, or * for all tenants")
    if entry["role"] not in tuple(Role):
        raise FileRefused(f"{where}: role is one of {', '.join(Role)}")
    return Caller(name, tenant, Role(entry["role"]))


def _quoted(text: str) -> str:
    """As TOML writes it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
