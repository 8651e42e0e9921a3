"""Liveness and readiness: what probes and `kvkeeper status` report of an engine that lives and refuses requests."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeeper.cli import main
from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.client import KvkeeperError
from tests.support.processes.service_pair import Services, generate, until

SERVICE = "kvkeeper.engine.v1.EngineService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)).status


async def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    code = await asyncio.to_thread(main, [*argv, "--json"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return code, json.loads(lines[-1])


async def test_an_engine_without_its_cache_lives_and_is_not_ready(world: Services, capsys: pytest.CaptureFixture[str]) -> None:
    cache = await world.start_cache()
    engine = await world.start_engine(lease_ms=500)
    flags = ("--cache", cache.address, "--engine", engine.address)
    code, report = await command(capsys, "status", *flags)
    assert (code, report["cache"]["state"], report["engine"]["state"]) == (0, "up", "up")
    await asyncio.wait_for(until_serving(engine.address), 20)
    await world.stop_cache()

    async def is_not_ready() -> bool:
        return await health(engine.address, SERVICE) == NOT_SERVING

    await until(is_not_ready)
    assert await health(engine.address, "") == SERVING, "restarting it would not help"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(until_serving(engine.address), 0.2)
    code, report = await command(capsys, "status", *flags)
    assert (code, report["cache"]["state"], report["engine"]["state"]) == (3, "down", "not ready")
    assert report["engine"]["detail"] == "its cache service does not answer"
    with pytest.raises(KvkeeperError, match="CACHE_SERVICE_DOWN"):
        await generate(await world.client(engine), [1])


async def test_status_follows_what_generate_is_told_and_not_a_late_health(
    world: Services, capsys: pytest.CaptureFixture[str]
) -> None:
    """Health changes a moment after the session is lost; status looks at the session itself."""
    cache = await world.start_cache()
    engine = await world.start_engine()
    engine.engine.memory, kept = None, engine.engine.memory
    code, report = await command(capsys, "status", "--cache", cache.address, "--engine", engine.address)
    engine.engine.memory = kept
    assert (code, report["engine"]["state"]) == (3, "not ready")


async def test_an_engine_s_health_address_follows_its_own(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine(lease_ms=500, health_address="127.0.0.1:0")
    assert engine._fronts.health_listener is not None
    probed = engine._fronts.health_listener.address
    assert await health(probed, SERVICE) == await health(probed, "") == SERVING
    await world.stop_cache()

    async def is_not_ready() -> bool:
        return await health(probed, SERVICE) == NOT_SERVING

    await until(is_not_ready)
    assert await health(probed, "") == SERVING
    await engine.drain()
    assert await health(probed, "") == NOT_SERVING


async def test_an_engine_that_drains_is_not_ready(world: Services, capsys: pytest.CaptureFixture[str]) -> None:
    cache = await world.start_cache()
    engine = await world.start_engine()
    await engine._fronts.drain()
    assert await health(engine.address, SERVICE) == await health(engine.address, "") == NOT_SERVING
    code, report = await command(capsys, "status", "--cache", cache.address, "--engine", engine.address)
    assert (code, report["engine"]["state"], report["engine"]["detail"]) == (3, "not ready", "it is starting or stopping")
