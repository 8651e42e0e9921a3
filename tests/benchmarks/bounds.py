"""How a session fares beside one that asks for all that it may: endless look-ups, full steps, tens of thousands that wait.

The other session lives in a process of its own, `python -m tests.benchmarks.bounds unix:/path WHAT`. Sequences have 4,096
tokens at most. Delays are those of the service: the longest step of a session of 64 sequences meanwhile. Of sequences that
wait, the memory that the service takes for each.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import CallOptions
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.errors import to_error
from kvkeeper.client.new_sequence import NewSequence
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems
from tests.benchmarks.delay import Steady
from tests.benchmarks.growing import Growing
from tests.benchmarks.processes import process, start_child, tell_child
from tests.benchmarks.sessions import open_session, ready_session

NUM_TOKENS = 800_000  # of a look-up
NUM_STARTED = 6000
NUM_WAITING = 41_820  # of 19 tokens
_PROMPT_LEN = 19
_SECONDS = 3.0
_LOAD = Growing(64)
_FLAGS = ["--num-blocks", "300000", "--max-sequences", "65536", "--max-tokens-per-sequence", "4096"]


def figures() -> Iterator[dict[str, object]]:
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for what in ("match", "explain", "pin", "starts", "waiting"):
        with tempfile.TemporaryDirectory() as folder:
            cache = f"unix:{folder}/cache"
            async with (
                process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *_FLAGS) as service,
                AsyncCacheClient(cache) as client,
            ):
                steady = Steady(await ready_session(client, _LOAD, 0))
                before = _resident_bytes(service.pid)
                other = await start_child("-m", "tests.benchmarks.bounds", cache, what)
                taken = _resident_bytes(service.pid) - before
                quiet = await steady.step_until(asyncio.create_task(asyncio.sleep(1.0)))
                happening = asyncio.create_task(tell_child(other))
                busy = await steady.step_until(happening)
                await other.wait()
            each = {"waiting": NUM_WAITING, "bytes_each": taken // NUM_WAITING, "bytes_each_aim": 1536}
            rows.append({
                "beside": what,
                "p99_us": round(float(np.percentile(busy, 99))),
                "longest_us": round(max(busy)),
                "longest_us_aim": 50_000,
                "quiet_p99_us": round(float(np.percentile(quiet, 99))),
                "quiet_longest_us": round(max(quiet)),
                **(each if what == "waiting" else {}),
            })  # fmt: skip
    return rows


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) << 10


async def _attack(address: str, what: str) -> None:
    async with AsyncCacheClient(address, CallOptions(timeout_s=300.0)) as client:
        session = await open_session(client)
        if what in ("starts", "waiting"):
            await _create(session, NUM_STARTED if what == "starts" else NUM_WAITING)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        begin = time.perf_counter()
        if what == "starts":
            await _start(session)
        elif what != "waiting":
            print(await _look_up(address, session, what), file=sys.stderr)
        print(time.perf_counter() - begin, flush=True)


async def _create(session: AsyncCacheSession, number: int) -> None:
    prompts = np.random.default_rng(0).integers(0, 32_000, (number, _PROMPT_LEN)).astype(np.int32)
    sequences = [NewSequence(sequence_id, prompt) for sequence_id, prompt in enumerate(prompts, 1)]
    for at in range(0, number, 256):
        await session.create_sequences(sequences[at : at + 256])


async def _start(session: AsyncCacheSession) -> None:
    most = getattr(session.pool, "max_step_items", 0) or NUM_STARTED  # of a service without the bound
    for at in range(0, NUM_STARTED, most):
        ids = np.arange(at + 1, min(at + most, NUM_STARTED) + 1)
        lens = np.full(len(ids), _PROMPT_LEN, np.int32)
        await session.step(StepItems(start_ids=ids, start_max_new=lens, start_max_hit=lens, start_may_wait=np.ones_like(lens)))


async def _look_up(address: str, session: AsyncCacheSession, what: str) -> dict[str, int]:
    """Calls by what they ended with; the message is made once, so that they come as fast as they are answered."""
    method, more = {"match": ("MatchPrefix", {}), "explain": ("ExplainMatch", {}), "pin": ("PinPrefix", {"ttl_ms": 1000})}[what]
    fields = {"session_id": session.session_id, "epoch": session.epoch, **more}
    raw = getattr(pb, f"{method}Request")(**fields, token_ids=range(NUM_TOKENS)).SerializeToString()
    ends, until = Counter[str](), time.perf_counter() + _SECONDS
    connected: Any = grpc.aio.insecure_channel(address, [("grpc.max_send_message_length", -1)])
    async with connected as channel:
        call = channel.unary_unary(f"/kvkeeper.cache.v1.CacheService/{method}")
        while time.perf_counter() < until:
            try:
                await call(raw)
                ends["answered"] += 1
            except grpc.aio.AioRpcError as error:
                ends[to_error(error).reason] += 1
    return dict(ends)


if __name__ == "__main__":
    asyncio.run(_attack(sys.argv[1], sys.argv[2]))
