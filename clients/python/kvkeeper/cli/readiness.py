"""Waiting for a service to say SERVING (grpc.health.v1)."""

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeeper.client import CallOptions, KvkeeperError
from kvkeeper.client.door import AsyncDoor

_POLL_S = 0.05


async def until_serving(address: str) -> None:
    """Returns when the service serves; the caller decides how long that may take."""
    door = AsyncDoor(address, CallOptions(timeout_s=5.0, retry_s=0.0), health_pb2_grpc.HealthStub)
    try:
        while not await _is_serving(door):  # noqa: ASYNC110  the event is in another process
            await asyncio.sleep(_POLL_S)
    finally:
        await door.close()


async def _is_serving(door: AsyncDoor) -> bool:
    try:
        answer = await door.call(door.stub.Check, health_pb2.HealthCheckRequest())
    except KvkeeperError:
        return False  # nobody there yet, or a service that has not got that far
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
