"""Why a service was not reached: each cause by a real connection, told by both clients in words that say what to do."""

import datetime
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from kvkeeper.client import AsyncCacheClient, CacheClient, CallOptions, EngineClient, KvkeeperError
from kvkeeper.client.credentials import Credentials
from tests.support.trust.certificates import SERVER_NAMES, Certificate, authority, issue

QUICK = CallOptions(timeout_s=5.0, retry_s=0.0)
HOUR = datetime.timedelta(hours=1)


@dataclass
class Servers:
    """Servers that never see a call, one for each kind of credentials, and an authority."""

    folder: Path
    ca: Certificate = field(default_factory=authority)
    running: list[grpc.Server] = field(default_factory=list)

    def start(self, certificate: Certificate | None = None, *, asks: bool = False) -> str:
        """The address of a server. certificate: it shows, None for one without TLS; asks: for one of the client."""
        server = grpc.server(futures.ThreadPoolExecutor(1))
        self.running.append(server)
        if certificate is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            pair = [(certificate.key_pem, certificate.pem)]
            port = server.add_secure_port(
                "127.0.0.1:0", grpc.ssl_server_credentials(pair, self.ca.pem if asks else None, require_client_auth=asks)
            )
        server.start()
        return f"127.0.0.1:{port}"

    def trusting(self, ca: Certificate | None = None, shown: Certificate | None = None) -> Credentials:
        """What a client that uses TLS shows, and the authority that it trusts."""
        cert, key = (None, None) if shown is None else shown.write(self.folder, "client")
        return Credentials(tls_ca=(ca or self.ca).write(self.folder, "ca")[0], tls_cert=cert, tls_key=key)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    for server in made.running:
        server.stop(None).wait()


def server_certificate(servers: Servers, **how: object) -> Certificate:
    return issue("server", servers.ca, **{"names": SERVER_NAMES, **how})  # type: ignore[arg-type]


Case = Callable[[Servers], tuple[str, Credentials]]
CASES: dict[str, tuple[Case, str]] = {
    "nothing listens": (
        lambda _: ("127.0.0.1:1", Credentials()),
        "the cache service does not answer at 127.0.0.1:1; start it with `kvkeeper cache`, or both services with `kvkeeper up`",
    ),
    "no socket": (lambda s: (f"unix:{s.folder}/none", Credentials()), "start it with `kvkeeper cache`"),
    "a name without a port": (
        lambda _: ("foo.invalid", Credentials()),
        "it is host:port or unix:/path; the name of this host is",
    ),
    "a URL": (lambda _: ("http://127.0.0.1:7410", Credentials()), "it is host:port or unix:/path, not a URL"),
    "no TLS here": (lambda s: (s.start(server_certificate(s)), Credentials()), "refuses a connection without TLS: give tls_ca"),
    "no TLS there": (lambda s: (s.start(), s.trusting()), "uses no TLS, and this client does"),
    "another authority": (
        lambda s: (s.start(server_certificate(s)), s.trusting(authority("other"))),
        "is not trusted (unable to get local issuer certificate): see tls_ca",
    ),
    "an old certificate": (
        lambda s: (s.start(server_certificate(s, ends=-HOUR)), s.trusting()),
        "is not trusted (certificate has expired)",
    ),
    "another host": (
        lambda s: (s.start(server_certificate(s, names=("elsewhere",))), s.trusting()),
        "is for another host name than that of this address",
    ),
    "no certificate": (lambda s: (s.start(server_certificate(s), asks=True), s.trusting()), "asks for a certificate"),
    "a foreign certificate": (
        lambda s: (s.start(server_certificate(s), asks=True), s.trusting(shown=issue("client", authority("other")))),
        "or refuses this one: see tls_cert and tls_key",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_service_that_is_not_reached_is_told_with_its_cause(servers: Servers, case: str) -> None:
    make, expected = CASES[case]
    target, credentials = make(servers)
    with CacheClient(target, QUICK, credentials) as client, pytest.raises(KvkeeperError) as caught:
        client.stats()
    assert caught.value.service_down
    assert expected in caught.value.message


async def test_the_client_for_asyncio_tells_it_alike(servers: Servers) -> None:
    async with AsyncCacheClient(servers.start(server_certificate(servers)), QUICK, Credentials()) as client:
        with pytest.raises(KvkeeperError, match="refuses a connection without TLS"):
            await client.stats()


def test_a_stream_names_the_engine() -> None:
    with EngineClient("127.0.0.1:1", QUICK) as client, pytest.raises(KvkeeperError, match="start it with `kvkeeper engine`"):
        list(client.generate("text"))


def test_clients_heed_the_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEPER_ENGINE_LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("KVKEEPER_CACHE_LISTEN", "127.0.0.1:3")
    with EngineClient(options=QUICK) as engine, pytest.raises(KvkeeperError, match=r"at 127\.0\.0\.1:2;"):
        engine.model()
    with CacheClient(options=QUICK) as cache, pytest.raises(KvkeeperError, match=r"at 127\.0\.0\.1:3;"):
        cache.stats()
