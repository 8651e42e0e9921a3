"""A server with the real gate, health and reflection, whose handlers of all RPCs count that they were entered."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

from kvkeeper.cache.v1 import cache_service_pb2
from kvkeeper.client.errors import KvkeeperError, to_error
from kvkeeper.common.service.endpoint import Endpoint
from kvkeeper.common.trust.caller import Caller, calling
from kvkeeper.common.trust.credentials import make_entry, make_token
from kvkeeper.common.trust.guard import Guard
from kvkeeper.engine.v1 import engine_service_pb2

DEADLINE_S = 10.0
FILES: tuple[Any, ...] = (cache_service_pb2, engine_service_pb2, vllm_engine_pb2, health_pb2, reflection_pb2)
OURS: tuple[Any, ...] = FILES[:3]


def services(files: Sequence[Any] = FILES) -> list[ServiceDescriptor]:
    """Every service that a process of ours answers for."""
    return [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]


def rpcs(files: Sequence[Any] = FILES) -> Iterator[tuple[str, MethodDescriptor]]:
    """Every RPC with its path on the wire."""
    for service in services(files):
        for method in service.methods:
            yield f"/{service.full_name}/{method.name}", method


class CountingRouter(grpc.GenericRpcHandler):
    """Returns every RPC of a service with nothing, and counts who entered."""

    def __init__(self, service: ServiceDescriptor, entered: "Counter[tuple[str, Caller]]") -> None:
        self.service_name = service.full_name
        self._entered = entered
        self._handlers = {f"/{service.full_name}/{method.name}": self._handler(method) for method in service.methods}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler:
        path = f"/{self.service_name}/{method.name}"

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> bytes:
            self._entered[path, calling()] += 1
            return b""

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> None:
            self._entered[path, calling()] += 1
            await context.write(b"")

        names = {False: "unary", True: "stream"}
        kind = f"{names[method.client_streaming]}_{names[method.server_streaming]}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(stream if method.server_streaming else unary)


@dataclass(frozen=True)
class Config:
    """What a guard reads of a service's config."""

    listen: str = "127.0.0.1:0"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    auth_tokens: Path | None = None


@dataclass
class GuardedServer:
    """entered: handler entries by RPC and caller."""

    address: str
    guard: Guard
    entered: "Counter[tuple[str, Caller]]"

    def entries(self, path: str) -> int:
        return sum(count for (entered, _), count in self.entered.items() if entered == path)


@asynccontextmanager
async def guarded_server(config: Config) -> AsyncIterator[GuardedServer]:
    guard = Guard(config)
    endpoint = await Endpoint.open(config.listen, guard=guard)
    entered: Counter[tuple[str, Caller]] = Counter()
    routers: list[Any] = [CountingRouter(service, entered) for service in services(OURS)]
    await endpoint.start(*routers, has_reflection=True)
    try:
        yield GuardedServer(endpoint.address, guard, entered)
    finally:
        await endpoint.stop(grace=None)
        endpoint.release()


class TokenFile:
    """A file of --auth-tokens that a test adds callers to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch(mode=0o600)

    def add(self, caller: Caller) -> str:
        """The caller's new token."""
        token = make_token()
        with self.path.open("a") as file:
            file.write(make_entry(token, caller) + "\n")
        return token

    def certify(self, name: str, caller: Caller) -> None:
        """The certificate of this name stands for the caller."""
        with self.path.open("a") as file:
            file.write(f'[[certificate]]\nname = "{name}"\ntenant = "{caller.tenant}"\nrole = "{caller.role}"\n\n')


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def raw_call(
    channel: grpc.aio.Channel, path: str, method: MethodDescriptor, metadata: Any = None, message: bytes = b""
) -> KvkeeperError | None:
    """Calls an RPC of any kind; what it is refused with, or None where it was answered.

    Where the client streams, it sends nothing: a message to a call that has ended meanwhile would end it another way.
    """
    names = {False: "unary", True: "stream"}
    kind = f"{names[method.client_streaming]}_{names[method.server_streaming]}"
    request = () if method.client_streaming else (message,)
    call = getattr(channel, kind)(path)(*request, timeout=DEADLINE_S, metadata=metadata)
    try:
        if method.client_streaming:
            with contextlib.suppress(grpc.aio.InternalError):  # the call has ended
                await call.done_writing()
        if method.server_streaming:
            await call.read()
        else:
            await call
    except grpc.RpcError as error:
        return to_error(error)
    finally:
        call.cancel()
    return None
