"""Endpoint: one address and the grpc.aio server that serves there, with health and, if wanted, reflection.

HealthListener is a second address for health alone, SharedAddress an address that several processes serve.

Health has one rule. The name "" is liveness: SERVING until the service is asked to stop, also while it waits. The service's
own name is readiness: SERVING while it takes requests.

The service calls in this order: open, start, set_serving; and at its end: drain, stop, release. The address is given back last,
when nothing else of the service is left for a successor to collide with.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvkeeper.common.service.listen import AddressInUse, SocketLock, check_free, socket_path
from kvkeeper.common.service.methods import MAX_PROMPT_MESSAGE_BYTES, MethodRouter
from kvkeeper.common.service.process import StartError

_MOST = 2**31 - 1  # that an option can say
HealthServicer: Any = health.aio.HealthServicer  # type: ignore[attr-defined]

_OPTIONS = [
    # Compressed messages are refused: unpacking a few kilobytes may cost much time and memory here, and the sender nothing.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # Gateways and clients ping every few seconds, with calls and without. A connection that only pings, and does so without a
    # pause, is closed: each ping gets a reply, which costs the sender less than this service.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 64),
]
_HEALTH_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    ("grpc.max_receive_message_length", 1024),  # a request is the name of a service
    ("grpc.max_metadata_size", 4096),
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.max_concurrent_streams", 8),
    # A connection that watches or rests makes room for a probe: its client asks again.
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 1_000),
]
MAX_CALLS_EACH = 256  # of one connection, where no setting says so; sessions and watchers have one each


def _call_options(max_calls_each: int, max_connections: int = _MOST) -> list[tuple[str, int]]:
    """The options of a server that bound how many calls of one connection it knows at once.

    Calls that were let in wait here for their turn, so gRPC itself is to drop none of them. Calls that the client has ended
    count, too, until they are put away: a client that begins and ends calls without a pause would else fill the memory with
    them. A quarter more may be known than are let in, so that a client may begin calls while those before them are put away.
    """
    most = min(max_connections * max_calls_each, _MOST)
    return [
        ("grpc.max_concurrent_streams", max_calls_each),
        ("grpc.http2.max_deallocating_streams", max_calls_each // 4),
        ("grpc.server.max_pending_requests", most),
        ("grpc.server.max_pending_requests_hard_limit", most),
    ]


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may call at once. Made for services whose clients are not trusted with the service's time."""

    max_connections: int
    max_calls_each: int  # of one connection; its further calls wait on the client's side
    interceptors: Sequence[grpc.aio.ServerInterceptor]

    def options(self) -> list[tuple[str, int]]:
        """The options of the server."""
        return [
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            *_call_options(self.max_calls_each, self.max_connections),
            # Of a message that no method has asked for yet, little is taken in: gRPC would take in megabytes after a while.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 16 << 10),
        ]


class Guard(Protocol):
    """What stands between a server and its callers; kvkeeper.common.trust makes it."""

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """That come before all others."""

    @property
    def tls(self) -> grpc.ServerCredentials | None:
        """None: connections are not encrypted."""


class HealthListener:
    """A second address that serves grpc.health.v1 and nothing else, for probes that have no credentials.

    Whatever its caller asks, it says only whether the service serves: the statuses are those of the service's own address,
    from one servicer. So any host may reach it. It is bounded: few connections, each ended after a while, small messages.
    `address` shows the port where 0 was asked for. Has to be made on the running loop.
    """

    def __init__(self, listen: str, servicer: Any) -> None:
        """No call is served yet. Raises StartError."""
        self._server = grpc.aio.server(options=_HEALTH_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        try:
            check_free(listen)
            port = self._server.add_insecure_port(listen)
        except AddressInUse as error:
            raise StartError(f"--health-address {listen}: {error}") from None
        except (RuntimeError, OSError):
            raise StartError(f"--health-address {listen}: the address is in use or cannot be had") from None
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Ends every call."""
        await self._server.stop(grace=None)


class Endpoint:
    """A server at an address. address is what a client's channel takes. Made by open."""

    def __init__(self, address: str, server: grpc.aio.Server, lock: SocketLock | None, health: Any) -> None:
        self.address = address
        self._server = server
        self._lock = lock
        self._health = health
        self.health_listener: HealthListener | None = None
        self._service_name = ""

    @classmethod
    async def open(
        cls,
        listen: str,
        max_message_bytes: int = 0,
        admission: Admission | None = None,
        guard: Guard | None = None,
        health: Any = None,
        *,
        is_shared: bool = False,
    ) -> "Endpoint":
        """Takes the address; no call is served yet. max_message_bytes: of any message, where that is more than 4 MiB.

        admission: None where all clients are trusted with the service's time. guard: None where every caller is let in.
        health: a HealthServicer of the service's own. is_shared: another process has taken the address (SharedAddress)
        for this one and others, among which the kernel divides the connections.

        Raises StartError, AddressInUse.
        """
        path = socket_path(listen)
        lock: SocketLock | None = None
        most = max(MAX_PROMPT_MESSAGE_BYTES, max_message_bytes) + 4096  # above the limits in methods.py, which give a reason
        server = grpc.aio.server(
            interceptors=(*(guard.interceptors if guard else ()), *(admission.interceptors if admission else ())),
            options=[
                *_OPTIONS,
                ("grpc.so_reuseport", int(is_shared)),  # two services on one port would share its connections at random
                ("grpc.max_receive_message_length", most),
                *(_call_options(MAX_CALLS_EACH) if admission is None else admission.options()),
            ],
        )
        try:
            if not is_shared:
                if path is not None:
                    lock = SocketLock(path)
                else:
                    check_free(listen)
            address = _bind(server, listen, guard.tls if guard else None)
            return cls(address, server, lock, HealthServicer() if health is None else health)
        except BaseException:
            await server.stop(grace=None)
            if lock is not None:
                lock.release()
            raise

    async def start(self, methods: MethodRouter, *others: MethodRouter, has_reflection: bool) -> None:
        """Returns calls from now on. Health says that the process lives, and that the service does not serve yet.

        others: of protocols that the service speaks beside its own, whose name alone is the one that health knows.
        """
        self._service_name = methods.service_name
        self._server.add_generic_rpc_handlers((methods, *others))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if has_reflection:
            names = [router.service_name for router in (methods, *others)]
            reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        await self._server.start()
        if self.health_listener is not None:
            await self.health_listener.start()

    def open_health(self, listen: str) -> None:
        """Takes a second address, where health alone is served from start to stop. Raises StartError."""
        self.health_listener = HealthListener(listen, self._health)

    async def set_serving(self, is_serving: bool) -> None:
        """Sets the health of the service's name: whether it takes requests."""
        statuses = health_pb2.HealthCheckResponse
        await self._health.set(self._service_name, statuses.SERVING if is_serving else statuses.NOT_SERVING)

    async def drain(self) -> None:
        """Sets both names to NOT_SERVING for good; set_serving has no effect any more."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float | None = 0.2) -> None:
        """Ends the calls that still run."""
        if self.health_listener is not None:
            await self.health_listener.stop()
        await self._server.stop(grace)

    def release(self) -> None:
        """Gives the address back: removes the socket and its lock file."""
        if self._lock is not None:
            self._lock.release()


def _bind(server: grpc.aio.Server, listen: str, tls: grpc.ServerCredentials | None) -> str:
    """The address; a Unix socket is for its owner only. Raises StartError, AddressInUse."""
    is_socket = socket_path(listen) is not None
    host = listen.rpartition(":")[0]
    old_mask = os.umask(0o177)
    try:
        port = server.add_insecure_port(listen) if tls is None else server.add_secure_port(listen, tls)
    except RuntimeError:
        raise StartError(f"--listen {listen}: the address is in use or cannot be had") from None
    finally:
        os.umask(old_mask)
    return listen if is_socket else f"{host}:{port}"


class SharedAddress:
    """An address that several processes of one service listen at, held for as long as the service lives.

    The service finds the address free, as one that listens by itself does. Then it holds the port with a socket that listens
    to nothing: the kernel lets only processes of the same user join it, and divides connections among those that listen. A
    process that ends can so be started again while no other process takes its place. A Unix socket has one process.
    `address`: with the port that was had, where 0 was asked for. Raises StartError, AddressInUse.
    """

    def __init__(self, listen: str) -> None:
        self.address = listen
        self._lock: SocketLock | None = None
        self._held: list[socket.socket] = []
        path = socket_path(listen)
        if path is not None:
            self._lock = SocketLock(path)
            return
        check_free(listen)
        host, _, number = listen.rpartition(":")
        port = int(number)
        try:
            for family, kind, _, _, where in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
                held = socket.socket(family, kind)
                self._held.append(held)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                held.bind((where[0], port, *where[2:]))
                port = held.getsockname()[1]
        except OSError as error:
            self.release()
            raise StartError(f"--listen {listen}: {error.strerror or error}") from None
        self.address = f"{host}:{port}"

    def release(self) -> None:
        """Gives the address back: removes a Unix socket and its lock file."""
        for held in self._held:
            held.close()
        if self._lock is not None:
            self._lock.release()
