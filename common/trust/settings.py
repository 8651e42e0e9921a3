"""The settings that both services have, and which of their combinations about trust a service starts with.

Rule: an address that other hosts reach needs both ends proved: the service by TLS, its callers by tokens or certificates.
Imports no grpc, so that a wrong combination is reported at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from kvkeeper.common.service.settings import (
    HEALTH_ADDRESS,
    METRICS_ADDRESS,
    TRACE_ENDPOINT,
    ConfigError,
    is_local,
    log_level_setting,
    setting,
)

_trust, _watching = partial(setting, group="Trust"), partial(setting, group="Watching")


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The settings that both services have, beside those of their own."""

    tls_cert: Path | None = _trust(
        None,
        "file with the service's certificate and its chain in PEM, which switches TLS on",
        default_text="no TLS",
        details="With --tls-key. Files that change are taken for new connections; no restart is needed.",
    )
    tls_key: Path | None = _trust(None, "file with the key of --tls-cert in PEM, of mode 0600", default_text="no TLS")
    tls_client_ca: Path | None = _trust(
        None,
        "file with the authority in PEM that signs clients' certificates; every connection needs one then",
        default_text="clients show no certificate",
        details="Without --auth-tokens each of its certificates stands for an operator of all tenants; with it, for the entry"
        " [[certificate]] of its name.",
    )
    auth_tokens: Path | None = _trust(
        None,
        "file of mode 0600 with hashed tokens and names of certificates, each with tenant and role",
        default_text="every program that can connect may do everything",
        details="kvkeeper token makes an entry. A file that changes is read again. Over a Unix socket a caller without a token"
        " is the operator, because the socket is open to its user alone.",
    )
    metrics_listen: str = _watching(
        "", "loopback host:port that serves /metrics for Prometheus", default_text="none", check=METRICS_ADDRESS
    )
    health_address: str = _watching(
        "",
        "host:port that answers grpc.health.v1 alone, without TLS and credentials, for probes",
        default_text="none",
        check=HEALTH_ADDRESS,
        details="Other hosts may reach it: it tells whether the service serves, and nothing else.",
    )
    trace_endpoint: str = _watching(
        "",
        "URL of an OpenTelemetry collector, http://host:4318/v1/traces, that gets traces",
        default_text="none",
        check=TRACE_ENDPOINT,
    )
    reflection: bool = _watching(True, "answer gRPC server reflection")
    log_level: str = log_level_setting()


class TrustConfig(Protocol):
    """The part of a config that is about trust."""

    @property
    def listen(self) -> str: ...
    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_client_ca(self) -> Path | None: ...
    @property
    def auth_tokens(self) -> Path | None: ...


def check_trust(config: TrustConfig) -> None:
    """Raises ConfigError for a combination that lets in more than its flags say."""
    if config.tls_cert is None and config.tls_key is not None:
        raise ConfigError("--tls-key: goes with --tls-cert, which is missing")
    if config.tls_cert is not None and config.tls_key is None:
        raise ConfigError("--tls-cert: goes with --tls-key, which is missing")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("--tls-client-ca: goes with --tls-cert and --tls-key, which are missing")
    if config.listen.startswith("unix:") and config.tls_cert is not None:
        raise ConfigError("--tls-cert: a Unix socket is open to this user alone and speaks no TLS; --listen has one")
    if is_local(config.listen):
        return
    missing = []
    if config.tls_cert is None:
        missing.append("--tls-cert with --tls-key")
    if config.auth_tokens is None and config.tls_client_ca is None:
        missing.append("--auth-tokens or --tls-client-ca")
    if missing:
        reason = f"only loopback addresses and Unix sockets are served without credentials, not {config.listen!r}"
        raise ConfigError(f"--listen: {reason}; give {', and '.join(missing)}")


def check_targets(flag: str, addresses: Sequence[str], tls_ca: Path | None, tls_flag: str) -> None:
    """Addresses that a service connects to. Raises ConfigError for one on another host without TLS."""
    for address in addresses:
        if tls_ca is None and not is_local(address):
            raise ConfigError(f"{flag}: {address} is not of this host, so it needs TLS, see {tls_flag}")
