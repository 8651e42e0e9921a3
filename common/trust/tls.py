"""ServerTls: the certificate of a service and the authority of its clients' certificates, both reloaded when they change.

gRPC asks for them at each handshake, in a thread of its own. Open connections continue with what they were made with. Files
that do not belong together, as between the writing of one and the other, are left alone until they change again.
"""

import ssl
from pathlib import Path
from typing import Any

import grpc
import structlog

from kvkeeper.common.trust.private_file import FileRefused, read_private, read_public, stat_files

log = structlog.get_logger()


class ServerTls:
    """Raises FileRefused where the files cannot be used from the beginning."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Files in PEM. client_ca: every client needs a certificate of this authority."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._paths = [path for path in (cert, key, client_ca) if path is not None]
        self._state = stat_files(*self._paths)
        self._first = self._read()

    @property
    def asks_for_certificates(self) -> bool:
        return self._client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        changed: Any = self.changed  # the stubs do not know that None means no change
        return grpc.dynamic_ssl_server_credentials(self._first, changed, self.asks_for_certificates)

    def changed(self) -> "grpc.ServerCertificateConfiguration | None":
        """What the files hold where they have changed since they were asked for last, and can be used."""
        state = stat_files(*self._paths)
        if state == self._state:
            return None
        self._state = state
        try:
            found = self._read()
        except FileRefused as error:
            log.warning("certificate_not_reloaded", reason=str(error))
            return None
        log.info("certificate_reloaded")
        return found

    def _read(self) -> "grpc.ServerCertificateConfiguration":
        cert, key = read_public(self._cert), read_private(self._key)
        authority = None if self._client_ca is None else read_public(self._client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError):  # an SSLError is an OSError
            raise FileRefused(f"{self._cert} and {self._key} are not a certificate and its key without a password") from None
        if authority is not None:
            try:
                context.load_verify_locations(cadata=authority.decode("ascii"))
            except (OSError, ValueError):
                raise FileRefused(f"{self._client_ca} holds no certificate of an authority") from None
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=authority)


def _no_password() -> str:
    raise ValueError("a key with a password")
