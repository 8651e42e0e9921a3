"""Opening the remote tier's server: everything that can be wrong with flags, files and packages is found here, at start.

The server itself is not asked: one that is away at start costs hits, and is used once it is there.
"""

from collections.abc import Callable
from pathlib import Path

from kvkeeper.common.service.extras import install_command, missing
from kvkeeper.common.trust.private_file import FileRefused

from ...core.values.kv_spec import KvSpec
from .mooncake_server import MooncakeServer
from .remote_address import RemoteAddress, parse_address
from .remote_server import RemoteServer
from .remote_store import RemoteStore
from .secret import RemoteSecret, read_secret
from .value_form import HEADER_BYTES

RemoteMaker = Callable[[KvSpec], RemoteStore]


class RemoteRefused(Exception):
    """The remote tier cannot be had. The text is one line, and names no secret."""


def open_remote(remote: str, *, secret: Path, ca: Path | None, ttl: float, timeout: float, memory: int) -> RemoteMaker:
    """Makes the store of each pool. memory: bytes that each gives to a Mooncake store. Raises RemoteRefused."""
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
    server = _mooncake(address, memory, timeout) if address.is_mooncake else _redis(address, known, ttl, timeout)
    return lambda spec: RemoteStore(server(spec), known, spec)


def _redis(address: RemoteAddress, secret: RemoteSecret, ttl: float, timeout: float) -> Callable[[KvSpec], RemoteServer]:
    try:
        from .cluster_link import ClusterLink
        from .redis_link import OneServer
        from .redis_server import RedisServer
    except ImportError:
        raise RemoteRefused(f"--remote needs the package redis: {install_command('remote')}") from None
    way = ClusterLink if address.is_cluster else OneServer
    return lambda spec: RedisServer(address, way(address, secret, timeout), ttl=ttl)


def _mooncake(address: RemoteAddress, memory: int, timeout: float) -> Callable[[KvSpec], RemoteServer]:
    if missing("mooncake"):
        text = "--remote mooncake:// needs the system's libibverbs and the package mooncake-transfer-engine-non-cuda"
        raise RemoteRefused(f"{text}: {install_command('mooncake')}")
    return lambda spec: MooncakeServer(address, HEADER_BYTES + spec.stored_bytes, memory=memory, timeout=timeout)
