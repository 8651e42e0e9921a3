"""Both services in this process, behind real channels and shared memory, for end-to-end tests."""

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.server import RunningServer as RunningCache
from kvkeeper.cache_service.server import start_server as start_cache
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions, GenerateOptions, Retention, Sampling, Usage
from kvkeeper.common.service.settings import parse_switch
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.compute.served_model import ServedModel
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.model.hash_toy import expected_next_token
from kvkeeper.engine_service.server import RunningServer as RunningEngine
from kvkeeper.engine_service.server import start_server as start_engine
from kvkeeper.engine_service.values.request import Retention as ToyRetention
from tests.support.models.odd_models import LateGate, late_gate_model, odd_model

T = TypeVar("T")
BLOCK_SIZE = 4
DEADLINE_S = 20.0  # of anything in a test
_ALWAYS = {"tier_worth": "always"}  # what a tier hits does not depend on how fast this machine is
# The variables by which an engine in a process of its own takes them, too: KVKEEPER_ENGINE_OVERLAP=off pytest tests/e2e.
OVERLAP = parse_switch(os.environ.get("KVKEEPER_ENGINE_OVERLAP", "on"))
_INTERVAL = os.environ.get("KVKEEPER_ENGINE_STREAM_INTERVAL_MS")
_PACE = {} if _INTERVAL is None else {"stream_interval_ms": float(_INTERVAL)}
FRONTS_VARIABLE = "KVKEEPER_ENGINE_FRONTS"
GREEDY = Sampling(temperature=0, repetition_penalty=1.0)


def num_fronts() -> int:
    """Fronts of each engine of a test that says nothing of them: none, which starts sooner, unless the variable says more."""
    return int(os.environ.get(FRONTS_VARIABLE, "0"))


@dataclass
class Output:
    """What one request gave: tokens, text and finish reason of each continuation."""

    token_ids: list[list[int]]
    texts: list[str]
    reasons: list[str | None]
    usage: Usage


class Services:
    """A folder with one cache service and any number of engines, all with addresses in it."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.cache: RunningCache
        self.engines: list[RunningEngine] = []
        self._stack = stack
        self._num_engines = 0
        self._cache_is_up = False
        stack.push_async_callback(self.stop_cache)

    async def start_cache(self, **options: Any) -> RunningCache:
        """options: fields of CacheConfig, and clock of start_server."""
        options = {"num_blocks": 64, "drain_timeout": 0.0, "pool_memory": 1 << 20, **_ALWAYS, **options}
        extras = {name: options.pop(name) for name in ("clock",) if name in options}
        config = CacheConfig(listen=f"unix:{self.folder}/cache", runtime_dir=self.folder / "run", **options)
        self.cache = await start_cache(config, **extras)
        self._cache_is_up = True
        return self.cache

    async def stop_cache(self) -> None:
        """As if it had crashed: no session is closed first."""
        if self._cache_is_up:
            self._cache_is_up = False
            await self.cache.stop()

    async def start_engine(
        self, model: ServedModel | None = None, *, model_folder: Path | None = None, **options: Any
    ) -> RunningEngine:
        """model: loaded already; model_folder: what the engine loads itself; by default the hash toy."""
        self._num_engines += 1
        address = f"unix:{self.folder}/engine{self._num_engines}"
        options = {
            "listen": address,
            "model": HASH_TOY if model_folder is None else str(model_folder),
            "block_size": BLOCK_SIZE,
            "progress": False,
            "drain_timeout": 2.0,
            "fronts": num_fronts(),
            "overlap": OVERLAP,
            **_PACE,
            **options,
        }
        if num_fronts() > 1 and options["listen"] == address:
            options["listen"] = "127.0.0.1:0"  # a Unix socket takes one front
        engine = await start_engine(EngineConfig(cache=self.cache.address, **options), model=model)
        self._stack.push_async_callback(engine.stop)
        await engine.wait_ready()
        self.engines.append(engine)
        return engine

    async def serve(
        self, model: ServedModel | None = None, *, cache: dict[str, Any] | None = None, **engine: Any
    ) -> AsyncEngineClient:
        """Starts a cache service and an engine on it. Returns the engine's client."""
        await self.start_cache(**(cache or {}))
        return await self.client(await self.start_engine(model, **engine))

    async def start_gated_engine(self, **options: Any) -> tuple[RunningEngine, threading.Event]:
        """An engine with steps that wait for the gate, where they compute a GATE_TOKEN."""
        gate = threading.Event()
        engine = await self.start_engine(odd_model(gate), **options)
        self._stack.callback(gate.set)
        return engine, gate

    async def start_late_engine(
        self, num_tokens: int, model: ServedModel | None = None, **options: Any
    ) -> tuple[RunningEngine, LateGate]:
        """An engine that stands still once a sequence has so many tokens; the gate opens at the end."""
        gate = LateGate(num_tokens)
        engine = await self.start_engine(late_gate_model(gate, model), **options)
        self._stack.callback(gate.is_open.set)
        return engine, gate

    async def serve_gated(
        self, *, cache: dict[str, Any] | None = None, **engine: Any
    ) -> tuple[AsyncEngineClient, threading.Event]:
        """As `serve`, with a gated engine. Returns its client and the gate."""
        await self.start_cache(**(cache or {}))
        gated, gate = await self.start_gated_engine(**engine)
        return await self.client(gated), gate

    def defer(self, close: Callable[[], Awaitable[None]]) -> None:
        """Run at the end, before what was started earlier is stopped."""
        self._stack.push_async_callback(close)

    async def client(self, engine: RunningEngine, retry_s: float = 0) -> AsyncEngineClient:
        return await self._stack.enter_async_context(AsyncEngineClient(engine.address, CallOptions(retry_s=retry_s)))

    async def cache_client(self) -> AsyncCacheClient:
        return await self._stack.enter_async_context(AsyncCacheClient(self.cache.address))

    async def wait_idle(self) -> cache_pb.PoolStats:
        """Until no sequence is left in the pool; its counts then."""

        async def is_idle() -> cache_pb.PoolStats | None:
            for pool in await self._pools():
                busy = pool.num_running_sequences or pool.num_waiting_sequences or pool.num_fenced_blocks
                return None if busy else pool
            return None  # a service that has just started has none, until an engine opens its session

        return await until(is_idle)

    async def pool(self) -> cache_pb.PoolStats:
        """Counts of the one pool, after an audit."""
        return (await self._pools())[0]

    async def _pools(self) -> Sequence[cache_pb.PoolStats]:
        async with AsyncCacheClient(self.cache.address) as client:
            assert list((await client.check_invariants()).violations) == []
            return (await client.stats()).pools


async def until(condition: Callable[[], Awaitable[T | None]]) -> T:
    """What the condition gives once that is true; a test fails when it takes long."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if found := await condition():
                return found
            await asyncio.sleep(0)


async def until_stats(client: AsyncEngineClient, condition: Callable[[pb.GetStatsResponse], object]) -> pb.GetStatsResponse:
    """The engine's counts once they are such."""

    async def are_such() -> pb.GetStatsResponse | None:
        stats = await client.stats()
        return stats if condition(stats) else None

    return await until(are_such)


@asynccontextmanager
async def services() -> AsyncIterator[Services]:
    with tempfile.TemporaryDirectory(prefix="kvk") as name:
        async with AsyncExitStack() as stack:
            yield Services(Path(name), stack)


async def generate(
    client: AsyncEngineClient, prompt: Any, max_tokens: int = 8, sampling: Sampling = GREEDY, **options: Any
) -> Output:
    """One request to its end."""
    fields = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__} | {"max_tokens": max_tokens}
    generation = client.generate(prompt, GenerateOptions(sampling=Sampling(**fields), **options))
    n = options.get("n") or 1
    token_ids: list[list[int]] = [[] for _ in range(n)]
    texts = [""] * n
    reasons: list[str | None] = [None] * n
    async for chunk in generation:
        token_ids[chunk.index] += chunk.token_ids
        texts[chunk.index] += chunk.text
        assert reasons[chunk.index] is None, "nothing comes after the end of a continuation"
        reasons[chunk.index] = chunk.finish_reason
    assert generation.usage is not None
    return Output(token_ids, texts, reasons, generation.usage)


def toy_output(prompt: Sequence[int], num_tokens: int, retention: Retention | None = None) -> list[int]:
    """What the hash toy says greedily, worked out without a cache."""
    kept = None if retention is None else ToyRetention(retention.num_sink_tokens, retention.num_window_tokens)
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(expected_next_token(tokens, retention=kept))
    return tokens[len(prompt) :]
