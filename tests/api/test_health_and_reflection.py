"""What tools ask before they know anything: grpc.health.v1, also at an address of its own, and server reflection."""

import asyncio
import socket
import threading
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1 import cache_service_pb2_grpc as pb_grpc
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.cache_service.server import RunningServer, start_server
from kvkeeper.common.service.listen import check_free
from kvkeeper.common.service.process import StartError
from tests.support.worlds.cache_api import DEADLINE, SPEC, Api, MemoryOf, refusal, serving

ANY_PORT = "127.0.0.1:0"
SERVICE = "kvkeeper.cache.v1.CacheService"


async def health(channel: grpc.aio.Channel, service: str = SERVICE) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return (await stub.Check(request, timeout=DEADLINE, wait_for_ready=True)).status


async def test_a_running_service_is_serving(api: Api) -> None:
    assert await health(api.channel) == health_pb2.HealthCheckResponse.SERVING
    assert await health(api.channel, "") == health_pb2.HealthCheckResponse.SERVING
    await api.server.drain()
    assert await health(api.channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await health(api.channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_it_listens_before_its_memory_is_reserved(tmp_path: Path) -> None:
    may_go_on = threading.Event()

    def allocate(num_bytes: int) -> SharedMemoryArena:
        assert may_go_on.wait(DEADLINE)
        return SharedMemoryArena(num_bytes)

    async with serving() as other:  # for a folder with a short name
        folder = other.server.attach_path.parent
        listen = f"unix:{folder}/early"
        config = CacheConfig(listen=listen, runtime_dir=folder, pool_memory=64 << 10)
        starting = asyncio.create_task(start_server(config, memory=MemoryOf(allocate)))
        async with grpc.aio.insecure_channel(listen) as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING, "it lives"
            stub = pb_grpc.CacheServiceStub(channel)  # type: ignore[no-untyped-call]
            error = await refusal(stub.OpenSession(pb.OpenSessionRequest(spec=SPEC), timeout=DEADLINE))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "POOL_NOT_READY")
            assert error.retry_after is not None
            may_go_on.set()
            server = await asyncio.wait_for(starting, DEADLINE)
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
            await server.stop()


def health_address(server: RunningServer) -> str:
    listener = server._endpoint.health_listener
    assert listener is not None
    return listener.address


async def test_the_health_address_says_what_the_service_s_own_says() -> None:
    may_go_on = threading.Event()

    def allocate(num_bytes: int) -> SharedMemoryArena:
        assert may_go_on.wait(DEADLINE)
        return SharedMemoryArena(num_bytes)

    statuses = health_pb2.HealthCheckResponse
    async with serving() as other:  # for a folder with a short name, and for a port that is free again
        folder = other.server.attach_path.parent
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        config = CacheConfig(listen=f"unix:{folder}/early", runtime_dir=folder, pool_memory=64 << 10, health_address=address)
        starting = asyncio.create_task(start_server(config, memory=MemoryOf(allocate)))
        async with grpc.aio.insecure_channel(address) as channel:
            assert await health(channel) == statuses.NOT_SERVING, "it starts"
            assert await health(channel, "") == statuses.SERVING, "it lives"
            may_go_on.set()
            server = await asyncio.wait_for(starting, DEADLINE)
            assert health_address(server) == address
            assert await health(channel) == statuses.SERVING
            await asyncio.wait_for(server.drain(), DEADLINE)
            assert await health(channel) == await health(channel, "") == statuses.NOT_SERVING
            await server.stop()
        check_free(address)


async def test_the_health_address_answers_nothing_else() -> None:
    async with serving(health_address=ANY_PORT) as api, grpc.aio.insecure_channel(health_address(api.server)) as channel:
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        for method in pb.DESCRIPTOR.services_by_name["CacheService"].methods:
            call = channel.unary_unary(f"/{SERVICE}/{method.name}")
            assert (await refusal(call(b"", timeout=DEADLINE))).code is grpc.StatusCode.UNIMPLEMENTED, method.name
        unsent = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=DEADLINE)
        assert (await refusal(unsent.read())).code is grpc.StatusCode.UNIMPLEMENTED, "before a message is read"
        assert (await refusal(health(channel, "x" * 2000))).code is grpc.StatusCode.RESOURCE_EXHAUSTED, "a name is short"


async def test_a_health_address_that_is_taken_is_told() -> None:
    async with serving(health_address=ANY_PORT) as api:
        taken = health_address(api.server)
        with pytest.raises(StartError, match=f"--health-address {taken}: another program listens"):
            async with serving(health_address=taken):
                pass


async def listed(channel: grpc.aio.Channel) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE)
    return {service.name for service in (await call.read()).list_services_response.service}


async def test_reflection_lists_the_services(api: Api) -> None:
    assert await listed(api.channel) == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_reflection_can_be_switched_off() -> None:
    async with serving(reflection=False) as api:
        assert (await refusal(listed(api.channel))).code is grpc.StatusCode.UNIMPLEMENTED
