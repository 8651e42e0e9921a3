"""One Step over a streamed Unix-socket session, against a bare echo of messages of the same size.

Both servers are processes of their own; calls alternate, so that both meet the same machine, with a pause after each, in
which a device would work: what the cache service leaves for after its answer is done then, and slows down neither. The client's
encoding and decoding are part of our time and not of the echo's.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.steps import StepItems, encode
from tests.benchmarks.echo_server import METHOD, SIZE_KEY
from tests.benchmarks.growing import BLOCK_SIZE, Growing
from tests.benchmarks.processes import process

_NUM_WARM_UP, _NUM_STEPS = 60, 640
_PAUSE = 0.001  # seconds


def figures() -> Iterator[dict[str, object]]:
    for num_sequences in (1, 256, 1024):
        yield asyncio.run(_compare(Growing(num_sequences), "each step some sequences fill a block"))
        if num_sequences > 1:
            load = Growing(num_sequences, are_staggered=False)
            yield asyncio.run(_compare(load, "steps in which all sequences fill a block"))
        yield asyncio.run(_compare(Growing(num_sequences), "prefix caching off", "--no-prefix-caching"))


async def _compare(load: Growing, case: str, *flags: str) -> dict[str, object]:
    num_blocks = load.num_blocks(_NUM_WARM_UP + _NUM_STEPS)
    limits = ["--num-blocks", str(num_blocks), "--max-sequences", str(load.num_sequences), *flags]
    with tempfile.TemporaryDirectory() as folder:
        cache, echo = f"unix:{folder}/cache", f"unix:{folder}/echo"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *limits),
            process("-m", "tests.benchmarks.echo_server", echo, ready_on="stdout"),
        ):
            ours, theirs = await _alternate(load, cache, echo)
    return {
        "sequences": load.num_sequences,
        "case": case,
        "median_us": round(float(np.median(ours)), 1),
        "p99_us": round(float(np.percentile(ours, 99)), 1),
        "baseline": "stream echo of the same sizes",
        "baseline_us": round(float(np.median(theirs)), 1),
        "baseline_p99_us": round(float(np.percentile(theirs, 99)), 1),
        "ratio": round(float(np.median(ours) / np.median(theirs)), 3),
    }


async def _alternate(load: Growing, cache: str, echo: str) -> tuple[list[float], list[float]]:
    ours: list[float] = []
    theirs: list[float] = []
    spec = pb.KvSpec(
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
    async with AsyncCacheClient(cache) as client, grpc.aio.insecure_channel(echo) as channel:
        async with await client.open_session(spec, executor=pb.EXECUTOR_ENGINE, client_name="bench") as session:
            for sequence_id, prompt in zip(load.ids.tolist(), load.prompts(), strict=True):
                await session.create_sequence(sequence_id, prompt)
            await session.step(StepItems(**load.start_columns()))
            request_size = len(encode(StepItems(**load.grow_columns(0)), session.session_id, session.epoch, 2, 1))
            message = bytes(request_size)
            # One result column of a row per sequence, and two of the new blocks for one row in block_size.
            num_new = load.num_sequences // BLOCK_SIZE if load.are_staggered else load.num_sequences
            reply_size = 4 * load.num_sequences + 8 * num_new + 40
            open_echo: Any = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
            call = open_echo(metadata=((SIZE_KEY, str(reply_size)),))
            for step_idx in range(_NUM_WARM_UP + _NUM_STEPS):
                items = StepItems(**load.grow_columns(step_idx))
                begin = time.perf_counter()
                await session.step(items)
                ours_us = (time.perf_counter() - begin) * 1e6
                await asyncio.sleep(_PAUSE)
                begin = time.perf_counter()
                await call.write(message)
                await call.read()
                theirs_us = (time.perf_counter() - begin) * 1e6
                await asyncio.sleep(_PAUSE)
                if step_idx >= _NUM_WARM_UP and load.fills(step_idx):
                    ours.append(ours_us)
                    theirs.append(theirs_us)
            await call.done_writing()
    return ours, theirs
