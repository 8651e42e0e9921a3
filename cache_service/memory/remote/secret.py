"""RemoteSecret: what --remote-secret says, and the keys that are made of it.

The file has a line for each: `key = ...`, which all services that are to share blocks have in common, and `user = ...` and
`password = ...` of the server where it wants them. Nothing here is ever shown: the text of an error names lines, not values.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from kvkeeper.common.trust.private_file import FileRefused, read_private

_LEAST_KEY, _MOST_KEY = 16, 1024  # characters
_NAMES = ("key", "user", "password")


@dataclass(frozen=True, slots=True)
class RemoteSecret:
    """key: shared. user and password: None where the server is to be asked without."""

    key: str = field(repr=False)
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def derive(self, purpose: bytes, text: bytes = b"") -> bytes:
        """32 bytes for one purpose, of up to 16 bytes, that tell nothing of the key."""
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
