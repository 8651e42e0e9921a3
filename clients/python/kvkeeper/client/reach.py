"""Reach: the service that a channel leads to, and why a call did not reach it, in words that say what to do.

gRPC's own text names sockets and libraries. This file knows the texts of the causes that a user can mend: an address that is
none, no service there, TLS on one side alone, a certificate that is not trusted, or one that is missing.
"""

import re
from dataclasses import dataclass

import grpc

from kvkeeper.client.errors import KvkeeperError, to_error

_STUBS = {"CacheServiceStub": "cache", "EngineServiceStub": "engine"}
_NOT_CONNECTED = "failed to connect to all addresses"
_NOT_TRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([a-z -]+)")


@dataclass(frozen=True, slots=True)
class Reach:
    """service: "cache", "engine", or empty where it may be either."""

    service: str
    target: str
    uses_tls: bool

    @classmethod
    def by_stub(cls, stub_class: object, target: str, *, uses_tls: bool) -> "Reach":
        """The way to the service that a generated stub class is for."""
        return cls(_STUBS.get(getattr(stub_class, "__name__", ""), ""), target, uses_tls)

    def to_error(self, failure: grpc.RpcError, *, is_ours: bool = False) -> KvkeeperError:
        """The KvkeeperError that a failed call stands for; where no service answered, its message says why."""
        error = to_error(failure, is_ours=is_ours)
        if not error.service_down:
            return error
        return KvkeeperError(error.code, "", self.cause(error.message), error.metadata, error.retry_after)

    def cause(self, text: str) -> str:
        """Why no service answered, by gRPC's text, and what to do about it."""
        name = f"the {self.service} service" if self.service else "the service"
        where = f"{name} at {self.target}"
        if text.startswith("errors resolving"):
            unlike = ", not a URL" if "://" in self.target else "; the name of this host is not known"
            return f"{self.target} cannot be the address of {name}: it is host:port or unix:/path{unlike}"
        if "WRONG_VERSION_NUMBER" in text:
            return f"{where} uses no TLS, and this client does: leave out tls_ca (--tls-ca, KVKEEPER_TLS_CA)"
        if (found := _NOT_TRUSTED.search(text)) is not None:
            return f"the certificate of {where} is not trusted ({found[1].strip()}): see tls_ca (--tls-ca, KVKEEPER_TLS_CA)"
        if "Hostname Verification Check failed" in text:
            return f"the certificate of {where} is for another host name than that of this address"
        if _NOT_CONNECTED not in text:
            return f"the connection to {where} was lost: {text}"
        if "Socket closed" in text or "onnection reset" in text or "Broken pipe" in text:
            if self.uses_tls:
                return f"{where} asks for a certificate, or refuses this one: see tls_cert and tls_key (--tls-cert, --tls-key)"
            return f"{where} refuses a connection without TLS: give tls_ca (--tls-ca, KVKEEPER_TLS_CA)"
        start = f"`kvkeeper {self.service}`, or both services with `kvkeeper up`" if self.service else "`kvkeeper up`"
        return f"{name} does not answer at {self.target}; start it with {start}"
