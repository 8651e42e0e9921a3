"""What HTTP costs: the same completions over our own front, over the gateway, and from the engine itself over gRPC; in turns.

One node with the demo model, before it the front and the real gateway. So many streams at once, 64 new tokens each, new prompts
in every round. The client over HTTP reads chunks as they come, without a library, whose own cost is not meant. Before that, how
long a front takes from its start until it serves, which is what a killed one costs its clients.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import numpy as np

from kvkeeper.cli.start.http import until_serving
from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import ask
from tests.support.processes.nodes import Nodes, nodes
from tests.support.processes.services import environment, free_ports, short_folder

_STREAMS = (1, 16, 64)
_WORKERS, _NUM_STARTS = (1, 2), 5
_NUM_NEW, _NUM_ROUNDS = 64, 5
_TIMEOUT_S = 300.0
Ask = Callable[[str], Awaitable[tuple[float, float]]]


def figures() -> Iterator[dict[str, object]]:
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    async with (
        asyncio.timeout(_TIMEOUT_S),
        nodes(1, num_blocks=4000) as world,
        AsyncEngineClient(world.nodes[0].address) as direct,
    ):
        starts = [await _time_starts(world.nodes[0].address, num_workers) for num_workers in _WORKERS]
        return starts + await _compare_all(world, direct)


async def _time_starts(engine: str, num_workers: int) -> dict[str, object]:
    seconds = list[float]()
    for _ in range(_NUM_STARTS):
        begin = time.perf_counter()
        async with _front(engine, num_workers):
            seconds.append(time.perf_counter() - begin)
    return {"case": "start", "workers": num_workers, "seconds": round(float(np.median(seconds)), 2)}


async def _compare_all(world: Nodes, direct: AsyncEngineClient) -> list[dict[str, object]]:
    async with _front(world.nodes[0].address) as front:
        own, gateway = _Connections(front, world.model), _Connections(_address(world), world.model)
        ways: dict[str, Ask] = {"http": own.ask, "gateway": gateway.ask, "grpc": lambda prompt: _over_grpc(direct, prompt)}
        return [await _compare(ways, num_streams) for num_streams in _STREAMS]


@asynccontextmanager
async def _front(engine: str, num_workers: int = 1) -> AsyncIterator[str]:
    """The address of a front of this engine, of so many processes."""
    (address, _) = free_ports()
    with short_folder() as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvkeeper.cli", "http", "--listen", address, "--engine", engine),
            *("--workers", str(num_workers)),
            env=environment(folder),
        )
        try:
            await until_serving(address)
            yield address
        finally:
            process.terminate()
            await process.wait()


def _address(world: Nodes) -> str:
    return world.base_url.removeprefix("http://").removesuffix("/v1")


async def _compare(ways: dict[str, Ask], num_streams: int) -> dict[str, object]:
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for round_idx in range(_NUM_ROUNDS + 1):
        for way, ask_by in ways.items():
            prompts = [f"def f_{way}_{num_streams}_{round_idx}_{number}(x):\n    return" for number in range(num_streams)]
            begin = time.perf_counter()
            found = await asyncio.gather(*map(ask_by, prompts))
            if round_idx:  # the first one warms up
                rates[way].append(num_streams * _NUM_NEW / (time.perf_counter() - begin))
                times[way] += found
    row: dict[str, object] = {"streams": num_streams, "new_tokens": _NUM_NEW}
    for way in ways:
        first, whole = np.array(times[way]).T * 1e3
        row |= {f"{way}_first_token_p{p}_ms": round(float(np.percentile(first, p)), 1) for p in (50, 99)}
        row |= {f"{way}_request_p{p}_ms": round(float(np.percentile(whole, p)), 1) for p in (50, 99)}
        row[f"{way}_tokens_per_second"] = round(float(np.median(rates[way])), 1)
    for way in ("http", "gateway"):
        ratios = np.array(rates[way]) / np.array(rates["grpc"])
        row[f"{way}_tokens_per_second_ratio"] = round(float(np.median(ratios)), 3)
    return row


class _Connections:
    """Connections to one server, which stay open from request to request."""

    def __init__(self, address: str, model: str) -> None:
        self._address, self._model = address, model
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: str) -> tuple[float, float]:
        """Seconds to the first token, and to the last."""
        fields = {"model": self._model, "prompt": prompt, "max_tokens": _NUM_NEW, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        host, _, port = self._address.rpartition(":")
        begin = time.perf_counter()
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        told = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in told, told
        first, last = 0.0, b""
        while num_bytes := int(await reader.readline(), 16):
            part = await reader.readexactly(num_bytes + 2)
            first = first or time.perf_counter() - begin
            last = (last + part[:-2])[-2000:]
        await reader.readline()
        seconds = time.perf_counter() - begin
        self._idle.append((reader, writer))
        assert f'"completion_tokens":{_NUM_NEW}'.encode() in last, "every token was asked for"
        return first, seconds


async def _over_grpc(client: AsyncEngineClient, prompt: str) -> tuple[float, float]:
    reply = await ask(client, prompt, _NUM_NEW)
    return reply.first_token_seconds, reply.seconds
