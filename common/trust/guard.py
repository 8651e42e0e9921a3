"""Guard: all that an endpoint needs of trust, made from a service's config at its start.

A service without tokens and without an authority of clients has no gate: it listens on this host alone, and every program that
can connect may do everything, see settings.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvkeeper.common.service.listen import socket_path
from kvkeeper.common.service.process import StartError
from kvkeeper.common.trust.credentials import KnownCallers
from kvkeeper.common.trust.gate import Gate
from kvkeeper.common.trust.private_file import FileRefused
from kvkeeper.common.trust.refusals import RefusedCalls
from kvkeeper.common.trust.settings import TrustConfig
from kvkeeper.common.trust.tls import ServerTls

if TYPE_CHECKING:
    from prometheus_client import Metric


class Guard:
    """Raises StartError where a file cannot be used."""

    def __init__(self, config: TrustConfig) -> None:
        self.refused = RefusedCalls()
        self._tls: ServerTls | None = None
        known: KnownCallers | None = None
        flag = "--tls-cert"
        try:
            if config.tls_cert is not None and config.tls_key is not None:
                self._tls = ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)
            flag = "--auth-tokens"
            if config.auth_tokens is not None:
                known = KnownCallers(config.auth_tokens)
        except FileRefused as error:
            raise StartError(f"{flag}: {error}") from None
        certified = self._tls is not None and self._tls.asks_for_certificates
        self.has_gate = known is not None or certified
        is_socket = socket_path(config.listen) is not None
        self._gate = Gate(known, self.refused, is_private_socket=is_socket, certified=certified)

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """That come before all others."""
        return (self._gate,) if self.has_gate else ()

    @property
    def tls(self) -> grpc.ServerCredentials | None:
        """None: connections are not encrypted."""
        return None if self._tls is None else self._tls.credentials()

    def metrics(self, prefix: str, elsewhere: Mapping[str, int] | None = None, **labels: str) -> "Iterator[Metric]":
        """elsewhere: calls that other processes did not let in, by reason; labels: that each sample has beside its reason."""
        return self.refused.metrics(prefix, labels, elsewhere or {})
