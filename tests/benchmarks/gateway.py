"""What the gateway costs: the same completions through it, over HTTP, and from the engine itself, over gRPC; in turns.

One node with the demo model behind the real gateway. So many streams at once, 64 new tokens each, new prompts in every round.
The client over HTTP reads server-sent events line by line, without the library of a vendor, whose own cost is not meant.
"""

import asyncio
import json
import time
from collections.abc import Iterator

import httpx2
import numpy as np

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import ask
from tests.support.processes.nodes import Nodes, nodes

_STREAMS = (1, 16, 64)
_NUM_NEW, _NUM_ROUNDS = 64, 5
_TIMEOUT_S = 300.0


def figures() -> Iterator[dict[str, object]]:
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    async with (
        nodes(1, num_blocks=4000) as world,
        AsyncEngineClient(world.nodes[0].address) as direct,
        httpx2.AsyncClient(timeout=_TIMEOUT_S, limits=httpx2.Limits(max_connections=max(_STREAMS))) as http,
    ):
        return [await _compare(world, direct, http, num_streams) for num_streams in _STREAMS]


async def _compare(world: Nodes, direct: AsyncEngineClient, http: httpx2.AsyncClient, num_streams: int) -> dict[str, object]:
    ways = {"gateway": lambda prompt: _over_http(world, http, prompt), "direct": lambda prompt: _over_grpc(direct, prompt)}
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
    ratios = np.array(rates["gateway"]) / np.array(rates["direct"])
    return row | {"tokens_per_second_ratio": round(float(np.median(ratios)), 3)}


async def _over_http(world: Nodes, http: httpx2.AsyncClient, prompt: str) -> tuple[float, float]:
    """Seconds to the first token, and to the last."""
    body = {
        "model": world.model,
        "prompt": prompt,
        "max_tokens": _NUM_NEW,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    body["stream_options"] = {"include_usage": True}
    begin, first, count = time.perf_counter(), 0.0, 0
    async with http.stream("POST", f"{world.base_url}/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begin
                usage = json.loads(line.removeprefix("data: ")).get("usage")
                count = usage["completion_tokens"] if usage else count
    assert count == _NUM_NEW, "every token was asked for"
    return first, time.perf_counter() - begin


async def _over_grpc(client: AsyncEngineClient, prompt: str) -> tuple[float, float]:
    reply = await ask(client, prompt, _NUM_NEW)
    return reply.first_token_seconds, reply.seconds
