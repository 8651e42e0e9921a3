"""A cache service in this process behind a real channel, its clock, and calls on it as a client in any language makes them."""

import asyncio
import functools
import heapq
import itertools
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1 import cache_service_pb2_grpc as pb_grpc
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.memory.arena import ByteArray
from kvkeeper.cache_service.memory.shared_memory import SharedMemory, SharedMemoryArena
from kvkeeper.cache_service.runtime.pool import Pool
from kvkeeper.cache_service.server import RunningServer, start_server
from kvkeeper.client.errors import KvkeeperError, to_error

DEADLINE = 10.0  # seconds that anything in a test may take
BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 3 * 4  # layers, K and V, tokens, elements of a token, bytes of an element
SPEC = pb.KvSpec(
    model_id="tiny",
    num_layers=2,
    num_kv_heads=1,
    head_dim=3,
    kv_dtype=pb.KV_DTYPE_FLOAT32,
    block_size=BLOCK_SIZE,
    layout=pb.KV_LAYOUT_BLOCK_MAJOR,
)


def spec_of(base: pb.KvSpec = SPEC, **changes: object) -> pb.KvSpec:
    """A spec with other values."""
    spec = pb.KvSpec()
    spec.CopyFrom(base)
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


ROW = SPEC.num_kv_heads * SPEC.head_dim  # elements of K, or of V, of a token in one layer


def le32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def le64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def int32s(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()


def commit_columns(sequence_id: int, num_tokens: int) -> dict[str, bytes]:
    """One item, with no new tokens."""
    return {"commit_sequence_ids": le64(sequence_id), "commit_num_tokens": le32(num_tokens), "commit_num_new_tokens": le32(0)}


class ManualClock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[tuple[float, int, _Timer]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> "_Timer":
        timer = _Timer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Runs what falls due on the way, in order."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            self._now, _, timer = heapq.heappop(self._timers)
            timer.run()
        self._now = end

    def stall(self, seconds: float) -> None:
        """Time passes while nothing runs; then all runs at once that fell due meanwhile."""
        self._now += seconds
        while self._timers and self._timers[0][0] <= self._now:
            heapq.heappop(self._timers)[2].run()


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        if self._callback is not None:
            self._callback()


class Session:
    """An open session; ids are the fields that every call of it carries."""

    def __init__(self, api: "Api", opened: pb.OpenSessionResponse) -> None:
        self.api = api
        self.opened = opened
        self.ids: dict[str, Any] = {"session_id": opened.session_id, "epoch": opened.epoch}

    async def create(self, sequence_id: int, num_tokens: int, *, first: int = 0, **fields: Any) -> int:
        """A prompt of consecutive numbers; returns the tokens that are cached."""
        tokens = range(first, first + num_tokens)
        request = pb.CreateSequenceRequest(**self.ids, sequence_id=sequence_id, token_ids=tokens, **fields)
        return (await self.api.stub.CreateSequence(request, timeout=DEADLINE)).num_matched_tokens

    async def compute(
        self, sequence_id: int, num_tokens: int, kv: np.ndarray | None = None, *, num_reserved: int = 0, **fields: Any
    ) -> list[int]:
        """A prompt by one-item calls, committed whole. kv: its K and V, as write_kv takes them. Returns the table."""
        await self.create(sequence_id, num_tokens, **fields)
        await self.call("ExtendSequence", sequence_id=sequence_id, num_tokens=max(num_tokens, num_reserved))
        if kv is not None:
            await self.write_kv(sequence_id, 0, kv)
        end = {"num_tokens": num_tokens, "first_token_idx": num_tokens}
        return list((await self.call("CommitSequence", sequence_id=sequence_id, **end)).sequence.block_table)

    async def prefill(self, sequence_id: int, num_tokens: int, *, num_committed: int = 0, **fields: Any) -> list[int]:
        """A prompt by the session's first two steps, committed whole or in part. Returns the table."""
        await self.create(sequence_id, num_tokens, **fields)
        started = pb.StepResponse.FromString(await self.api.raw_step(self.start_bytes(1, sequence_id)))
        await self.step(2, **commit_columns(sequence_id, num_committed or num_tokens))
        return int32s(started.start_block_ids)

    def step_bytes(self, step_id: int, *, completed: int | None = None, **columns: bytes) -> bytes:
        completed = step_id - 1 if completed is None else completed
        request = pb.StepRequest(**self.ids, step_id=step_id, completed_step_id=completed, **columns)
        return request.SerializeToString()

    def start_bytes(self, step_id: int, sequence_id: int, max_new: int = 1 << 20, max_hit: int = 1 << 20) -> bytes:
        return self.step_bytes(
            step_id,
            start_sequence_ids=le64(sequence_id),
            start_max_new_tokens=le32(max_new),
            start_max_hit_tokens=le32(max_hit),
        )

    async def step(self, step_id: int, **columns: bytes) -> pb.StepResponse:
        return pb.StepResponse.FromString(await self.api.raw_step(self.step_bytes(step_id, **columns)))

    async def call(self, method: str, **fields: Any) -> Any:
        """A unary call of this session by its name."""
        request = getattr(pb, method + "Request")(**self.ids, **fields)
        return await getattr(self.api.stub, method)(request, timeout=DEADLINE)

    async def write_kv(self, sequence_id: int, first: int, tokens: np.ndarray) -> None:
        """tokens: [num_layers, 2, num_tokens, elements of a token]."""
        chunks = [
            pb.WriteKvRequest(
                **self.ids,
                sequence_id=sequence_id,
                layer_idx=layer_idx,
                first_token_idx=first,
                key=layer[0].tobytes(),
                value=layer[1].tobytes(),
            )
            for layer_idx, layer in enumerate(tokens.astype("<f4"))
        ]
        await self.api.stub.WriteKv(iter(chunks), timeout=DEADLINE)

    async def read_kv(self, sequence_id: int, **fields: Any) -> list[pb.ReadKvResponse]:
        request = pb.ReadKvRequest(**self.ids, sequence_id=sequence_id, **fields)
        return [chunk async for chunk in self.api.stub.ReadKv(request, timeout=DEADLINE)]


class Api:
    """A channel to the service under test; server is None for one in a process of its own."""

    def __init__(self, server: RunningServer | None, channel: grpc.aio.Channel) -> None:
        self._server = server
        self.channel = channel
        self.stub: Any = pb_grpc.CacheServiceStub(channel)  # type: ignore[no-untyped-call]
        self.raw_step = channel.unary_unary("/kvkeeper.cache.v1.CacheService/Step")
        self.raw_stream = channel.stream_stream("/kvkeeper.cache.v1.CacheService/StreamSteps")

    @property
    def server(self) -> RunningServer:
        """Of a service in this process."""
        assert self._server is not None
        return self._server

    async def open(self, *, spec: pb.KvSpec = SPEC, engine: bool = True, **fields: Any) -> Session:
        executor = pb.EXECUTOR_ENGINE if engine else pb.EXECUTOR_CACHE
        request = pb.OpenSessionRequest(spec=spec, executor=executor, **fields)
        return Session(self, await self.stub.OpenSession(request, timeout=DEADLINE))

    async def stats(self) -> pb.GetStatsResponse:
        return await self.stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE)

    async def audit(self) -> None:
        answer = await self.stub.CheckInvariants(pb.CheckInvariantsRequest(), timeout=DEADLINE)
        assert not answer.violations, list(answer.violations)

    async def until(self, condition: Callable[[pb.GetStatsResponse], bool]) -> pb.GetStatsResponse:
        """Asks for stats until they are as wanted; fails past the deadline."""
        async with asyncio.timeout(DEADLINE):
            while not condition(stats := await self.stats()):
                pass
        return stats


async def failure(call: Awaitable[Any]) -> KvkeeperError:
    """What the call of a client fails with; it must, and with nothing else."""
    with pytest.raises(KvkeeperError) as caught:
        await call
    return caught.value


async def refusal(call: Awaitable[Any]) -> KvkeeperError:
    """What the call fails with; it must."""
    try:
        answer = await call
    except grpc.RpcError as error:
        return to_error(error)
    except KvkeeperError as error:
        return error
    raise AssertionError(f"not refused: {answer!r}")


@functools.cache
def documented_codes() -> dict[str, str]:
    """Reason -> code, as the comments of ErrorReason say."""
    body = re.search(r"enum ErrorReason \{(.*?)\n\}", Path(pb.__file__).with_name("cache_service.proto").read_text(), re.DOTALL)
    assert body is not None
    pattern = r"// ([A-Z_]+)(?: with RetryInfo)?: [^/]*?(?:// [^/]*?)*ERROR_REASON_([A-Z_]+) = "
    return {reason: code for code, reason in re.findall(pattern, body[1])}


async def refused(call: Awaitable[Any], reason: str, **metadata: str) -> None:
    """The call fails with this reason and its documented code, and with these metadata among its own."""
    error = await refusal(call)
    assert (error.reason, error.code.name) == (reason, documented_codes()[reason]), error
    assert metadata.items() <= error.metadata.items(), error.metadata


def kv_of(tokens: range, salt: int = 0) -> np.ndarray:
    """Some K and V: [num_layers, 2, num_tokens, elements of a token], another number everywhere."""
    shape = (SPEC.num_layers, 2, len(tokens), ROW)
    return (np.arange(np.prod(shape)).reshape(shape) + 1000 * tokens.start + salt).astype("<f4")


async def read_all(session: Session, sequence_id: int, **fields: object) -> np.ndarray:
    """What ReadKv answers, in the form of kv_of."""
    chunks = await session.read_kv(sequence_id, **fields)
    layers = []
    for layer_idx in range(SPEC.num_layers):
        of_layer = [chunk for chunk in chunks if chunk.layer_idx == layer_idx]
        parts = [
            np.concatenate([np.frombuffer(getattr(chunk, name), "<f4").reshape(-1, ROW) for chunk in of_layer])
            for name in ("key", "value")
        ]
        layers.append(np.stack(parts))
    return np.stack(layers)


class MemoryOf(SharedMemory):
    """Memory with arenas that a test makes."""

    def __init__(self, allocate: Callable[[int], SharedMemoryArena]) -> None:
        self.allocate = allocate  # type: ignore[method-assign]


def blocks_of(pool: Pool) -> ByteArray:
    """[num_blocks, block_bytes], a view of a pool in shared memory."""
    assert isinstance(pool.arena, SharedMemoryArena)
    return pool.arena.blocks(pool.info.num_blocks, pool.info.block_bytes)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Api]:
    """A service on a Unix socket of its own. settings: fields of CacheConfig, and clock, memory of start_server."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        extras = {name: settings.pop(name) for name in ("clock", "memory") if name in settings}
        defaults: dict[str, Any] = {"listen": f"unix:{folder}/s", "pool_memory": 64 << 10, "drain_timeout": 0}
        server = await start_server(CacheConfig(runtime_dir=Path(folder) / "run", **defaults | settings), **extras)
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                yield Api(server, channel)
        finally:
            await server.stop()
