"""Credentials: what a client shows a service, and how it knows the service: a token, a certificate, an authority.

A token goes over TLS, loopback or a Unix socket, and nowhere else. Files are read again when they change: a token before the
next call, the others with the next client. By default they are those that the environment names.
"""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvkeeper.client.errors import KvkeeperError

Metadata = tuple[tuple[str, str], ...]

_MAX_TOKEN_CHARS = 256


@dataclass(slots=True)
class _Read:
    """The token as a file had it in some state."""

    state: tuple[int, ...] = ()
    token: str = ""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Nothing by default: no token, no TLS. Paths name files; those of certificates and keys are in PEM.

    tls_ca: authority that signs the services' certificates; it switches TLS on for all but Unix sockets. tls_cert, tls_key:
    what is shown to services that ask for a certificate. token goes before token_file.
    """

    token: str = field(default="", repr=False)
    token_file: str | Path | None = None
    tls_ca: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    _read: _Read = field(default_factory=_Read, repr=False, compare=False)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> "Credentials":
        """Credentials from variables of the environment; an empty one counts as not given.

        The variables are KVKEEPER_TOKEN_FILE, KVKEEPER_TLS_CA, KVKEEPER_TLS_CERT and KVKEEPER_TLS_KEY.
        """
        names = ("token_file", "tls_ca", "tls_cert", "tls_key")
        return cls(**{name: environ.get(f"KVKEEPER_{name.upper()}") or None for name in names})  # type: ignore[arg-type]

    @property
    def has_token(self) -> bool:
        return bool(self.token or self.token_file)

    def metadata(self) -> Metadata:
        """What each call carries. Raises KvkeeperError where the token cannot be read."""
        return (("authorization", f"Bearer {self.token or self._token_of_file()}"),) if self.has_token else ()

    def tls_to(self, target: str) -> grpc.ChannelCredentials | None:
        """The TLS of a channel; None: without TLS.

        Raises KvkeeperError for unusable files, and where a token would go in the clear.
        """
        if target.startswith("unix:"):
            return None
        if self.tls_ca is None:
            if self.tls_cert is not None or self.tls_key is not None:
                raise _refused("a certificate is shown over TLS alone: give tls_ca (KVKEEPER_TLS_CA), too")
            if self.has_token and not _is_loopback(target):
                raise _refused(f"a token goes to {target} over TLS alone: give tls_ca (KVKEEPER_TLS_CA), too")
            return None
        if (self.tls_cert is None) != (self.tls_key is None):
            raise _refused("tls_cert and tls_key go together")
        cert = None if self.tls_cert is None else _read_bytes(self.tls_cert)
        key = None if self.tls_key is None else _read_bytes(self.tls_key)
        return grpc.ssl_channel_credentials(_read_bytes(self.tls_ca), key, cert)

    def _token_of_file(self) -> str:
        """A file that is being written, or is gone, changes nothing once it was read: the token of before is shown."""
        try:
            self._read_token()
        except KvkeeperError:
            if not self._read.token:
                raise
        return self._read.token

    def _read_token(self) -> None:
        """Raises KvkeeperError."""
        assert self.token_file is not None
        try:
            status = os.stat(self.token_file)
        except OSError as error:
            raise _refused(f"the token file {self.token_file}: {error.strerror}") from None
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if state != self._read.state:
            token = _read_bytes(self.token_file).decode(errors="replace").strip()
            if not token or len(token) > _MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
                raise _refused(f"the token file {self.token_file} holds one token and nothing else")
            self._read.state, self._read.token = state, token


class TokenChannel:
    """A channel whose calls carry the token. Made for stubs, of threads and of asyncio."""

    def __init__(self, channel: Any, credentials: Credentials) -> None:
        self._channel, self._credentials = channel, credentials

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, method: Any) -> Any:
        def call(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._credentials.metadata()), **kwargs)

        return call


def _read_bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _refused(f"{path}: {error.strerror}") from None


def _is_loopback(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refused(text: str) -> KvkeeperError:
    return KvkeeperError(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS", text)
