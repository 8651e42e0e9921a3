"""Whether a service takes requests: grpc.health.v1 reports it under the service's name. The name "" stands for the process."""

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeeper.client import CallOptions, KvkeeperError
from kvkeeper.client.backends import BLOCKING, run
from kvkeeper.client.transport import AsyncTransport

_POLL_S = 0.05
_NAMES = {"cache": "kvkeeper.cache.v1.CacheService", "engine": "kvkeeper.engine.v1.EngineService"}
_SERVING = health_pb2.HealthCheckResponse.SERVING


def is_serving(service: str, address: str, options: CallOptions) -> bool:
    """Whether the service, "cache" or "engine", takes requests now. Raises KvkeeperError where it does not answer."""
    transport = AsyncTransport(address, options, health_pb2_grpc.HealthStub, backend=BLOCKING)
    try:
        answer = run(transport.call_by_name("Check", health_pb2.HealthCheckRequest(service=_NAMES[service])))
    finally:
        run(transport.close())
    return bool(answer.status == _SERVING)


async def until_serving(address: str) -> None:
    """Returns when the service at the address serves, be it the cache or the engine; the caller limits the time."""
    transport = AsyncTransport(address, CallOptions(timeout_s=5.0, retry_s=0.0), health_pb2_grpc.HealthStub)
    try:
        while not await _is_serving(transport):  # noqa: ASYNC110  the event is in another process
            await asyncio.sleep(_POLL_S)
    finally:
        await transport.close()


async def _is_serving(transport: AsyncTransport) -> bool:
    for name in _NAMES.values():
        try:
            answer = await transport.call(transport.stub.Check, health_pb2.HealthCheckRequest(service=name))
        except KvkeeperError:
            continue  # the name of the other service, no service yet, or a service that is starting
        return bool(answer.status == _SERVING)
    return False
