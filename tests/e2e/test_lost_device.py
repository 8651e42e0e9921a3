"""A device that has no memory left, or that is lost to the engine's process: who hears of it, and what goes on."""

import asyncio
import dataclasses
import json
import os
import signal
from asyncio.subprocess import Process
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, KvkeeperError, Sampling
from kvkeeper.common.service.process import LOST, ServiceLost, StartError
from kvkeeper.engine_service.compute.model_runner import Runner, StepBounds
from kvkeeper.engine_service.ranks import team
from kvkeeper.engine_service.ranks.meeting import Meeting
from kvkeeper.engine_service.ranks.messages import Kind
from kvkeeper.engine_service.ranks.ranks import MOST_LOSSES, Ranks
from tests.support.models.odd_models import LOST_TOKEN, OUT_OF_MEMORY_TOKEN, faulty_model
from tests.support.processes import faulty_engine, odd_rank
from tests.support.processes.engine_command import engine_process, ready
from tests.support.processes.service_pair import DEADLINE_S, Services, generate, toy_output, until
from tests.support.stand_ins.device_faults import out_of_memory
from tests.support.worlds.cache_api import failure

pytestmark = pytest.mark.in_turn

PROMPT = list(range(3, 16))
LONG = GenerateOptions(sampling=Sampling(max_tokens=1500, temperature=0, repetition_penalty=1.0))
NAME = health_pb2.HealthCheckRequest(service="kvkeeper.engine.v1.EngineService")
STATUS = health_pb2.HealthCheckResponse


async def read_log(process: Process) -> list[dict[str, Any]]:
    """The rest of what the engine says, to its end: fields, or a line that is none of the log's."""
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        said = (await process.stderr.read()).decode()
        await process.wait()
    return [json.loads(line) if line.startswith("{") else {"line": line} for line in said.splitlines()]


async def health_until_the_end(address: str) -> list[int]:
    """Each state that a watch of the engine's health tells."""
    told = []
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            async for state in health_pb2_grpc.HealthStub(channel).Watch(NAME, timeout=DEADLINE_S):
                told.append(state.status)
        except grpc.aio.AioRpcError:
            return told
    return told


@pytest.mark.parametrize("num_fronts", [0, 1])
async def test_a_lost_device_ends_the_engine_and_the_next_one_goes_on(world: Services, num_fronts: int) -> None:
    await world.start_cache(num_blocks=1024)
    listen = f"unix:{world.folder}/other"
    flags = ("--cache", world.cache.address, "--listen", listen, "--fronts", str(num_fronts))
    module = faulty_engine.__name__
    async with AsyncEngineClient(listen, CallOptions(retry_s=0)) as client:
        async with engine_process(*flags, module=module) as process:
            await ready(process)
            assert (await generate(client, PROMPT)).usage.cached_tokens == 0
            health = asyncio.create_task(health_until_the_end(listen))
            left = client.generate([1, 2, 3], LONG)
            await anext(left)
            waiting = asyncio.create_task(generate(client, [7, 8], 1500, resubmit_s=DEADLINE_S))
            submitted = await client.submit([4, 5, 6], LONG)
            ended = await failure(generate(client, [9, LOST_TOKEN]))
            with pytest.raises(KvkeeperError) as also_ended:
                _ = [chunk async for chunk in left]
            for error in (ended, also_ended.value):
                assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DEVICE_LOST")
                assert error.retry_after == 1.0
            log = await read_log(process)
            assert process.returncode == LOST
            (told,) = (line for line in log if line.get("event") == "device_lost")
            assert told["level"] == "error"
            assert told["message"].startswith("cudaErrorIllegalAddress: a kernel went wrong")
            odd = [line for line in log if "exception" in line or "line" in line or line["event"] == "batch_failed"]
            assert not odd, json.dumps(odd)
            assert (await health)[-1] == STATUS.NOT_SERVING
        pool = await world.wait_idle()

        async def none_is_quarantined() -> bool:
            return (await world.pool()).num_quarantined_blocks == 0

        await until(none_is_quarantined)
        assert pool.num_indexed_blocks >= 3
        async with engine_process(*flags, module=module) as process:
            await ready(process)
            async with AsyncEngineClient(listen) as later:
                again = await generate(later, PROMPT)
            assert again.usage.cached_tokens == 12
            assert again.token_ids == [toy_output(PROMPT, 8)]
            assert (await waiting).token_ids == [toy_output([7, 8], 1500)]
            with pytest.raises(KvkeeperError, match="UNKNOWN_REQUEST"):
                await client.result(submitted)


async def test_blocks_that_a_lost_device_may_write_wait_for_the_end_of_the_process(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine(faulty_model())
    client = await world.client(engine)
    assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]
    with pytest.raises(KvkeeperError, match="DEVICE_LOST"):
        await generate(client, [9, LOST_TOKEN])
    with pytest.raises(ServiceLost, match="cudaErrorIllegalAddress"):
        await engine.wait_end()
    refused = await failure(generate(client, PROMPT))
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert (await world.wait_idle()).num_quarantined_blocks > 0, "this process lives and has the memory mapped"


async def test_a_device_that_has_no_memory_for_the_next_session_ends_the_engine(world: Services) -> None:
    num_sessions = 0

    def make_ready(runner: Runner, bounds: StepBounds) -> None:
        nonlocal num_sessions
        num_sessions += 1
        if num_sessions > 1:
            raise out_of_memory()

    await world.start_cache(num_blocks=1024)
    engine = await world.start_engine(dataclasses.replace(faulty_model(), make_ready=make_ready))
    left = (await world.client(engine)).generate([1, 2, 3], LONG)
    await anext(left)
    await world.stop_cache()
    await world.start_cache(num_blocks=1024)
    with pytest.raises(ServiceLost, match=r"cudaErrorMemoryAllocation .*--pool-memory"):
        await engine.wait_end()
    with pytest.raises(KvkeeperError, match="DEVICE_LOST"):
        _ = [chunk async for chunk in left]
    assert num_sessions == 2


async def test_a_step_without_memory_ends_its_requests_alone_and_says_what_helps(world: Services) -> None:
    client = await world.serve(faulty_model())
    with structlog.testing.capture_logs() as logs, pytest.raises(KvkeeperError) as failed:
        await generate(client, [9, OUT_OF_MEMORY_TOKEN])
    assert (failed.value.code, failed.value.reason) == (grpc.StatusCode.INTERNAL, "REQUEST_FAILED")
    (told,) = (line for line in logs if line["event"] == "batch_failed")
    assert told["log_level"] == "error"
    assert "exc_info" not in told
    assert told["message"].startswith(
        "cudaErrorMemoryAllocation (2.50 GiB were asked for, 640.50 MiB are free): the device has not so much memory left; "
    )
    assert "--token-budget" in told["message"]
    assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]
    assert (await world.wait_idle()).num_referenced_blocks == 0


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("loading", ["cudaErrorMemoryAllocation (2.50 GiB were asked for", "lower --pool-memory", "--tensor-parallel"]),
        ("warming", ["cudaErrorMemoryAllocation (2.50 GiB were asked for", "lower --pool-memory", "--tensor-parallel"]),
        ("lost", ["cudaErrorLaunchFailure: a kernel went wrong"]),
    ],
)
async def test_a_start_that_the_device_ends_is_one_sentence(
    world: Services, monkeypatch: pytest.MonkeyPatch, where: str, says: list[str]
) -> None:
    monkeypatch.setenv(faulty_engine.VARIABLE, where)
    await world.start_cache()
    listen = f"unix:{world.folder}/other"
    async with engine_process("--cache", world.cache.address, "--listen", listen, module=faulty_engine.__name__) as process:
        log = await read_log(process)
    assert process.returncode == 1
    (said,) = (line["line"] for line in log if "line" in line)
    assert said.startswith("kvkeeper engine: --device cpu: ")
    assert all(part in said for part in says)
    assert not [line for line in log if line.get("level") in ("error", "critical")]
    if where != "loading":
        assert (await world.wait_idle()).num_quarantined_blocks == 0


async def test_a_first_rank_that_loses_its_device_ends_the_engine(world: Services) -> None:
    await world.start_cache()
    listen = f"unix:{world.folder}/other"
    flags = ("--cache", world.cache.address, "--listen", listen, "--tensor-parallel", "2")
    async with AsyncEngineClient(listen, CallOptions(retry_s=0)) as client:
        async with engine_process(*flags, module=faulty_engine.__name__) as process:
            await ready(process)
            assert (await generate(client, PROMPT)).usage.cached_tokens == 0
            with pytest.raises(KvkeeperError, match="DEVICE_LOST"):
                await generate(client, [9, LOST_TOKEN])
            log = await read_log(process)
        assert process.returncode == LOST
        (told,) = (line for line in log if line.get("event") == "device_lost")
        assert told["message"].startswith("cudaErrorIllegalAddress: ")
    assert (await world.wait_idle()).num_quarantined_blocks == 0


async def test_another_rank_that_loses_its_device_ends_the_engine(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faulty_engine.VARIABLE, "rank")
    await world.start_cache(num_blocks=1024)
    listen = f"unix:{world.folder}/other"
    flags = ("--cache", world.cache.address, "--listen", listen, "--tensor-parallel", "2")
    async with AsyncEngineClient(listen, CallOptions(retry_s=0)) as client:
        async with engine_process(*flags, module=faulty_engine.__name__) as process:
            await ready(process)
            assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]
            health = asyncio.create_task(health_until_the_end(listen))
            left = client.generate([1, 2, 3], LONG)
            await anext(left)
            with pytest.raises(KvkeeperError, match="DEVICE_LOST"):
                await generate(client, [9, LOST_TOKEN])
            with pytest.raises(KvkeeperError, match="DEVICE_LOST"):
                _ = [chunk async for chunk in left]
            log = await read_log(process)
        assert process.returncode == LOST
        (told,) = (line for line in log if line.get("level") in ("error", "critical"))
        assert told["event"] == "device_lost"
        assert told["message"].startswith("rank 1 on cpu: cudaErrorIllegalAddress: a kernel went wrong")
        odd = [line for line in log if "line" in line or line["event"] in ("rank_lost", "session_lost")]
        assert not odd, json.dumps(odd)
        assert (await health)[-1] == STATUS.NOT_SERVING
    assert (await world.wait_idle()).num_quarantined_blocks == 0


@pytest.mark.parametrize("kind", [Kind.SET_UP, Kind.ATTACH])
async def test_a_start_that_the_device_of_another_rank_ends_names_the_rank(
    world: Services, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    fault = {"faults_at": kind, "fault": "cudaErrorMemoryAllocation", "sizes": "2.50 GiB were asked for, 1 MiB are free"}
    monkeypatch.setattr(team, "rank_process", odd_rank)
    monkeypatch.setattr(Ranks, "_make_config", lambda ranks, rank: fault)
    monkeypatch.setattr(Meeting, "join", lambda *parts: None)  # the odd one does not come
    await world.start_cache()
    words = (
        r"--device cpu: rank 1 on cuda:1: cudaErrorMemoryAllocation \(2.50 GiB were asked for, "
        r".*--pool-memory.*--tensor-parallel of the engine divides"
    )
    with structlog.testing.capture_logs() as logs, pytest.raises(StartError, match=words) as ended:
        async with asyncio.timeout(DEADLINE_S):
            await world.start_engine(tensor_parallel=2)
    assert "\n" not in str(ended.value)
    assert not [line for line in logs if line["log_level"] in ("error", "critical")]
    if kind == Kind.ATTACH:
        assert (await world.wait_idle()).num_quarantined_blocks == 0


async def test_ranks_that_cannot_sit_on_their_arenas_end_a_start_and_an_engine_that_served(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are started again a few times, as ranks are that requests lose, and no more."""
    configs, num_started = dict[str, Any](killed_at=Kind.ATTACH), 0

    def make_config(ranks: Ranks, rank: int) -> dict[str, Any]:
        nonlocal num_started
        num_started += 1
        return dict(configs)

    monkeypatch.setattr(team, "rank_process", odd_rank)
    monkeypatch.setattr(team, "_LAST_WORDS_S", 0.5)
    monkeypatch.setattr(Ranks, "_make_config", make_config)
    monkeypatch.setattr(Meeting, "join", lambda *parts: None)  # the odd one does not come
    monkeypatch.setattr(Meeting, "add_up", lambda meeting, part: part * 2)
    await world.start_cache(num_blocks=1024)
    lost = "no session can be opened, because a rank is lost each time: rank 1: its process ended with -9"
    with pytest.raises(StartError, match=f"^--tensor-parallel 2: {lost}$"):
        async with asyncio.timeout(DEADLINE_S):
            await world.start_engine(tensor_parallel=2)
    assert num_started == MOST_LOSSES + 1
    configs.clear()
    engine = await world.start_engine(tensor_parallel=2)
    left = (await world.client(engine)).generate(PROMPT, LONG)
    await anext(left)
    num_started, configs["killed_at"] = 0, Kind.ATTACH
    assert engine.ranks is not None
    with structlog.testing.capture_logs() as logs:
        os.kill(engine.ranks.processes[0], signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ServiceLost, match=f"^{lost}$"):
                await engine.wait_end()
    assert num_started == MOST_LOSSES + 1
    assert [line["message"] for line in logs if line["event"] == "ranks_given_up"] == [lost]
    with pytest.raises(KvkeeperError, match="REQUEST_FAILED"):
        _ = [chunk async for chunk in left]
    await engine.stop()
    assert (await world.wait_idle()).num_quarantined_blocks == 0
