"""One Step over a step lane, against the same bare gRPC echo that `step` compares with, and against the step over gRPC.

The three take turns in one run, so that all meet the same machine, with a pause after each, in which a device would work. Two
sessions step the same load: one over its lane, one over StreamSteps. With churn one sequence ends and one starts in each step.
The client's encoding and decoding are part of our time and not of the echo's.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.cache import AsyncCacheClient, AsyncCacheSession
from kvkeeper.client.steps import StepItems, encode
from tests.benchmarks.echo_server import METHOD, SIZE_KEY
from tests.benchmarks.growing import BLOCK_SIZE, Growing
from tests.benchmarks.processes import process

_NUM_WARM_UP, _NUM_STEPS = 60, 640
_PAUSE = 0.001  # seconds
_SPEC = pb.KvSpec(
    model_id="bench",
    revision="0",
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    kv_dtype=pb.KV_DTYPE_FLOAT16,
    block_size=BLOCK_SIZE,
    layout=pb.KV_LAYOUT_BLOCK_MAJOR,
    compute_dtype="float32",
)


def figures() -> Iterator[dict[str, object]]:
    for num_sequences in (64, 256, 1024):
        for has_churn in (False, True):
            yield asyncio.run(_compare(Growing(num_sequences), has_churn))


async def _compare(load: Growing, has_churn: bool) -> dict[str, object]:
    num_steps = _NUM_WARM_UP + _NUM_STEPS
    num_blocks = 2 * (load.num_blocks(num_steps) + 4 * num_steps)
    limits = ["--num-blocks", str(num_blocks), "--max-sequences", str(4 * load.num_sequences)]
    with tempfile.TemporaryDirectory() as folder:
        cache, echo = f"unix:{folder}/cache", f"unix:{folder}/echo"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *limits),
            process("-m", "tests.benchmarks.echo_server", echo, ready_on="stdout"),
        ):
            lane, stream, bare = await _take_turns(load, cache, echo, has_churn)
    return {
        "sequences": load.num_sequences,
        "case": "1 end + 1 start" if has_churn else "steady",
        "lane_us": _quartiles(lane),
        "grpc_us": _quartiles(stream),
        "baseline": "stream echo of the same sizes",
        "baseline_us": _quartiles(bare),
        "ratio": round(float(np.median(lane) / np.median(bare)), 3),
        "grpc_ratio": round(float(np.median(stream) / np.median(bare)), 3),
    }


def _quartiles(times_us: list[float]) -> str:
    return "/".join(f"{value:.0f}" for value in np.percentile(times_us, (25, 50, 75)))


class _Stepping:
    """A session under load. With churn sequence i of the load is replaced in step i."""

    def __init__(self, session: AsyncCacheSession, load: Growing, has_churn: bool) -> None:
        self.session = session
        self._load = load
        self._has_churn = has_churn
        self._ids = load.ids
        self._lens = load.lens
        self._next_id = load.num_sequences + 1
        self._rng = np.random.default_rng(1)

    async def start(self) -> None:
        for sequence_id, prompt in zip(self._ids.tolist(), self._load.prompts(), strict=True):
            await self.session.create_sequence(sequence_id, prompt)
        await self.session.step(StepItems(**self._load.start_columns()))

    async def next_items(self, step_idx: int) -> StepItems:
        """What the next step does; sequences that it starts are created here."""
        lens = self._lens
        columns = {
            "commit_ids": self._ids,
            "commit_lens": lens,
            "commit_num_new": np.ones(len(lens), np.int32),
            "commit_tokens": self._rng.integers(0, 32000, len(lens)).astype(np.int32),
            "reserve_ids": self._ids,
            "reserve_min": lens + np.int32(1),
            "reserve_max": lens + np.int32(1),
        }
        self._ids, self._lens = self._ids.copy(), lens + np.int32(1)
        if self._has_churn:
            row, prompt = step_idx % len(lens), self._rng.integers(0, 32000, BLOCK_SIZE + 1).astype(np.int32)
            started = np.array([self._next_id], np.int64)
            await self.session.create_sequence(self._next_id, prompt)
            kept = np.delete(np.arange(len(lens)), row)
            columns |= {
                "release_ids": self._ids[row : row + 1].copy(),
                "reserve_ids": columns["reserve_ids"][kept],
                "reserve_min": columns["reserve_min"][kept],
                "reserve_max": columns["reserve_max"][kept],
                "start_ids": started,
                "start_max_new": np.full(1, 512, np.int32),
                "start_max_hit": np.full(1, 512, np.int32),
            }
            self._ids[row], self._lens[row] = self._next_id, BLOCK_SIZE + 1
            self._next_id += 1
        return StepItems(**columns)


async def _take_turns(load: Growing, cache: str, echo: str, has_churn: bool) -> tuple[list[float], list[float], list[float]]:
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    async with AsyncCacheClient(cache) as client, grpc.aio.insecure_channel(echo) as channel:
        open_session = client.open_session
        async with (
            await open_session(_SPEC, pb.EXECUTOR_ENGINE, ttl_ms=60_000, client_name="lane") as over_lane,
            await open_session(_SPEC, pb.EXECUTOR_ENGINE, ttl_ms=60_000, client_name="grpc") as over_grpc,
        ):
            if not await over_lane.attach_step_lane():
                raise RuntimeError("the cache service gave no step lane")
            sessions = [_Stepping(session, load, has_churn) for session in (over_lane, over_grpc)]
            for stepping in sessions:
                await stepping.start()
            request_size = len(encode(StepItems(**load.grow_columns(0)), over_grpc.session_id, over_grpc.epoch, 2, 1))
            message, reply_size = bytes(request_size), 4 * load.num_sequences + 8 * (load.num_sequences // BLOCK_SIZE) + 40
            open_echo: Any = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
            call = open_echo(metadata=((SIZE_KEY, str(reply_size)),))
            for step_idx in range(_NUM_WARM_UP + _NUM_STEPS):
                for stepping, ours in zip(sessions, times, strict=False):
                    items = await stepping.next_items(step_idx)
                    await asyncio.sleep(_PAUSE)
                    begin = time.perf_counter()
                    await stepping.session.step(items)
                    ours.append((time.perf_counter() - begin) * 1e6)
                    await asyncio.sleep(_PAUSE)
                begin = time.perf_counter()
                await call.write(message)
                await call.read()
                times[2].append((time.perf_counter() - begin) * 1e6)
                await asyncio.sleep(_PAUSE)
            await call.done_writing()
    return tuple(each[_NUM_WARM_UP:] for each in times)  # type: ignore[return-value]
