"""Opening the remote tier's server: everything that can be wrong with flags, files and packages is found here, at start.

The server itself is not asked: one that is away at start costs hits, and is used once it is there.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeeper.service.extras import install_command
from kvkeeper.trust.private_file import FileRefused

from ...core.values.kv_spec import KvSpec
from .remote_address import parse_address
from .secret import read_secret

if TYPE_CHECKING:
    from .remote_store import RemoteStore


RemoteMaker = Callable[[KvSpec], "RemoteStore"]


class RemoteRefused(Exception):
    """The remote tier cannot be had. The text is one line, and names no secret."""


def open_remote(remote: str, *, secret: Path, ca: Path | None, ttl: float, timeout: float) -> RemoteMaker:
    """Makes the store of each pool. Raises RemoteRefused."""
    try:
        from .remote_store import RemoteStore
    except ImportError:
        raise RemoteRefused(f"--remote needs the package redis: {install_command('remote')}") from None
    try:
        address = parse_address(remote, ca)
    except ValueError as error:
        raise RemoteRefused(f"--remote: {error}") from None
    if ca is not None and not ca.is_file():
        raise RemoteRefused(f"--remote-ca {ca}: there is no such file")
    try:
        known = read_secret(secret)
    except FileRefused as error:
        raise RemoteRefused(f"--remote-secret: {error}") from None
    return partial(RemoteStore, address, known, ttl=ttl, timeout=timeout)
