"""How a client's stream and the health checks fare beside a hostile client: long texts, bombs, and very many requests.

With the demo model, made to take long prompts. The attacker is a process of its own, with one connection. Its processor time is
not the service's: the gaps without it are measured beside a process that keeps a processor busy. Rounds with and without
alternate; ratios are of a round and those around it.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeeper.client import AsyncEngineClient, GenerateOptions, KvkeeperError, Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.benchmarks.attacker import ATTACKS
from tests.benchmarks.both_services import both_services
from tests.benchmarks.processes import process, start_child, tell_child
from tests.support.processes.services import free_ports

_SERVICE = "kvkeeper.engine.v1.EngineService"
_MAX_LEN = 32768  # tokens, so that texts of 1 MB are not refused for their length alone
_NUM_NEW = 256  # tokens of one stream of the quiet client
_ROUND_S = float(os.environ.get("HOSTILE_SECONDS", "6"))
_NUM_ROUNDS = 3  # with the attack; with one more without
_HEALTH_PAUSE_S = 0.02
_ENGINE_FLAGS = tuple(os.environ.get("HOSTILE_FLAGS", "").split())
_BUSY = "print('ready', flush=True)\nwhile True: pass"


def figures() -> Iterator[dict[str, object]]:
    names = os.environ.get("HOSTILE_ATTACKS", " ".join(ATTACKS)).split()
    for name in names:
        yield asyncio.run(_measure(name))


async def _measure(what: str) -> dict[str, object]:
    async with _services() as (client, address):
        await _quiet_round(client, address, 1.0)  # warms up
        idle = await _quiet_round(client, address, _ROUND_S)
        without: list[_Round] = []
        beside: list[_Round] = []
        ends: dict[str, int] = {}
        for round_idx in range(2 * _NUM_ROUNDS + 1):
            if round_idx % 2 == 0:
                async with process("-c", _BUSY, ready_on="stdout"):
                    without.append(await _quiet_round(client, address, _ROUND_S))
                continue
            attacker = await start_child("-m", "tests.benchmarks.attacker", address, what)
            begin = asyncio.create_task(_quiet_round(client, address, _ROUND_S, attacker))
            beside.append(await begin)
            for reason, num in json.loads(await tell_child(attacker, b"stop")).items():
                ends[reason] = ends.get(reason, 0) + num
            await attacker.wait()
            await _until_idle(client)
    quiet_p99 = np.median([of.gap(99) for of in without])
    return {
        "attack": what,
        "calls": ends,
        "gap_p50_ms": _ms(np.median([of.gap(50) for of in beside])),
        "gap_p99_ms": _ms(np.median([of.gap(99) for of in beside])),
        "gap_longest_ms": _ms(max(of.gap(100) for of in beside)),
        "tokens": sum(len(of.gaps) for of in beside),
        "busy_gap_p50_ms": _ms(np.median([of.gap(50) for of in without])),
        "busy_gap_p99_ms": _ms(quiet_p99),
        "busy_gap_longest_ms": _ms(max(of.gap(100) for of in without)),
        "idle_gap_p99_ms": _ms(idle.gap(99)),
        "gap_p50_ratio": round(float(np.median([of.gap(50) for of in beside]) / np.median([of.gap(50) for of in without])), 2),
        "gap_p99_ratio": round(float(np.median([of.gap(99) for of in beside]) / quiet_p99), 2),
        "gap_p99_ratio_aim": 3,
        "first_token_longest_ms": _ms(max(max(of.first, default=0) for of in beside)),
        "busy_first_token_longest_ms": _ms(max(max(of.first, default=0) for of in without)),
        "health_p99_ms": _ms(np.median([of.health_at(99) for of in beside])),
        "health_longest_ms": _ms(max(of.health_at(100) for of in beside)),
        "health_longest_ms_aim": 100,
        "busy_health_p99_ms": _ms(np.median([of.health_at(99) for of in without])),
        "busy_health_longest_ms": _ms(max(of.health_at(100) for of in without)),
        "quiet_failures": sum(of.num_failed for of in beside),
    }


class _Round:
    """What the quiet client saw in a round, in seconds."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.first: list[float] = []  # from asking to the first token
        self.health: list[float] = []
        self.num_failed = 0

    def gap(self, percent: float) -> float:
        return float(np.percentile(self.gaps, percent)) if self.gaps else float("nan")

    def health_at(self, percent: float) -> float:
        return float(np.percentile(self.health, percent))


async def _quiet_round(
    client: AsyncEngineClient, address: str, seconds: float, attacker: asyncio.subprocess.Process | None = None
) -> _Round:
    """Streams one after the other, and health checks meanwhile; the attack begins with a stream under way."""
    found = _Round()
    checking = asyncio.create_task(_check_health(address, found))
    streaming = asyncio.create_task(_stream(client, found))
    await asyncio.sleep(0.2)
    if attacker is not None:
        found.gaps.clear()
        assert attacker.stdin is not None
        attacker.stdin.write(b"go\n")
    await asyncio.sleep(seconds)
    for task in (streaming, checking):
        task.cancel()
    for result in await asyncio.gather(streaming, checking, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return found


async def _stream(client: AsyncEngineClient, found: _Round) -> None:
    sampling = Sampling(max_tokens=_NUM_NEW, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    while True:
        last, begin = 0.0, time.perf_counter()
        try:
            async with client.generate("def main():\n    ", GenerateOptions(sampling=sampling)) as chunks:
                async for _ in chunks:
                    now = time.perf_counter()
                    if last:
                        found.gaps.append(now - last)
                    else:
                        found.first.append(now - begin)
                    last = now
        except Exception as error:
            found.num_failed += 1
            print(f"the quiet client failed: {error}", file=sys.stderr)
            await asyncio.sleep(0.1)


async def _check_health(address: str, found: _Round) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            begin = time.perf_counter()
            await stub.Check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=60)
            found.health.append(time.perf_counter() - begin)
            await asyncio.sleep(_HEALTH_PAUSE_S)


async def _until_idle(client: AsyncEngineClient) -> None:
    """Until what the attack left is gone, so that it does not reach into the next round."""
    while left := await client.list_requests():
        for request in left:
            with suppress(KvkeeperError):  # it has ended meanwhile
                await client.cancel(request.request_id)


@asynccontextmanager
async def _services() -> AsyncIterator[tuple[AsyncEngineClient, str]]:
    """The client of an engine and its address; over TCP, where connections can be told apart."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(DEMO_MODEL_DIR, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": _MAX_LEN}))
        flags = ("--model", str(model), "--threads", "1", *_ENGINE_FLAGS)
        (address,) = free_ports(1)
        async with both_services(*flags, listen=address) as (client, _):
            yield client, address


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 2)
