"""One Step over a streamed Unix-socket session, against a bare echo of messages of the same size.

Both servers are processes of their own; calls alternate, so that both meet the same machine, with a pause after each, in
which a device would work: what the cache service leaves for after its answer is done then, and slows down neither. The client's
encoding and decoding are part of our time and not of the echo's. Sequences that start are created before their step, as an
engine does when a request arrives. With PEER=vllm, vLLM's manager in this process goes through the same steps in turn.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.steps import StepItems, encode
from tests.benchmarks.echo_server import METHOD, SIZE_KEY
from tests.benchmarks.growing import BLOCK_SIZE, Growing
from tests.benchmarks.processes import process
from tests.benchmarks.turnover import Turnover
from tests.benchmarks.vllm_manager import VllmManager, why_not

_NUM_WARM_UP = 40
_NUM_STEPS, _NUM_CROWDED, _NUM_TO_FILL = 300, 60, 480  # to fill: only one step in block_size counts
_MOST_CREATED = 5_000  # sequences over a load; more of them would take minutes
_PAUSE = 0.001  # seconds


@dataclass(slots=True)
class _Times:
    """Microseconds of each counted step: over the session, of the echo, and of the peer where there is one."""

    ours: list[float] = field(default_factory=list)
    echo: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)


def figures() -> Iterator[dict[str, object]]:
    wanted = os.environ.get("PEER", "")
    if wanted not in ("", "vllm"):
        raise SystemExit(f"PEER={wanted}: the one peer is vllm")
    has_peer = bool(wanted)
    if has_peer and (missing := why_not()):
        yield {"peer": wanted, "left_out": missing}
        has_peer = False
    yield asyncio.run(_compare(Growing(1), "steady", False))
    for num_sequences in (256, 1024):
        yield asyncio.run(_compare(Growing(num_sequences), "steady", has_peer))
        yield asyncio.run(_compare(Turnover(num_sequences, 1), "1 end + 1 start a step", has_peer))
        yield asyncio.run(_compare(Turnover(num_sequences, num_sequences // 10), "10 % end, as many start", has_peer))
        load = Growing(num_sequences, are_staggered=False)
        yield asyncio.run(_compare(load, "all fill a block", has_peer))
        yield asyncio.run(_compare(Growing(num_sequences), "steady, prefix caching off", False, "--no-prefix-caching"))


async def _compare(load: Growing | Turnover, case: str, has_peer: bool, *flags: str) -> dict[str, object]:
    num_steps = _NUM_WARM_UP + (_NUM_TO_FILL if _all_fill_at_once(load) else _NUM_STEPS)
    if num_steps * len(load.created(0)) > _MOST_CREATED:
        num_steps = _NUM_WARM_UP + _NUM_CROWDED
    limits = ["--num-blocks", str(load.num_blocks(num_steps)), "--max-sequences", str(load.max_sequences), *flags]
    with tempfile.TemporaryDirectory() as folder:
        cache, echo = f"unix:{folder}/cache", f"unix:{folder}/echo"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *limits),
            process("-m", "tests.benchmarks.echo_server", echo, ready_on="stdout"),
        ):
            beside = VllmManager(load.num_blocks(num_steps), BLOCK_SIZE) if has_peer else None
            times = await _alternate(load, num_steps, cache, echo, beside)
    figure = {
        "sequences": load.num_sequences,
        "case": case,
        **_quartiles("", times.ours),
        "baseline": "stream echo of the same sizes",
        **_quartiles("baseline_", times.echo),
        "ratio": round(float(np.median(times.ours) / np.median(times.echo)), 3),
    }
    if times.peer:
        figure |= {"peer": "vllm", **_quartiles("peer_", times.peer)}
        figure["ratio_to_peer"] = round(float(np.median(times.ours) / np.median(times.peer)), 3)
    return figure


def _quartiles(prefix: str, times: list[float]) -> dict[str, object]:
    low, middle, high = np.percentile(times, (25, 50, 75))
    return {
        f"{prefix}median_us": round(float(middle), 1),
        f"{prefix}quartiles_us": [round(float(low), 1), round(float(high), 1)],
    }


async def _alternate(load: Growing | Turnover, num_steps: int, cache: str, echo: str, peer: VllmManager | None) -> _Times:
    times = _Times()
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
            first = list(zip(load.ids.tolist(), load.prompts(), strict=True))
            for sequence_id, prompt in first:
                await session.create_sequence(sequence_id, prompt)
            await session.step(StepItems(**load.start_columns()))
            if peer is not None:
                peer.start(first)
            call, message = None, b""
            for step_idx in range(num_steps):
                created = load.created(step_idx)
                for sequence_id, prompt in created:
                    await session.create_sequence(sequence_id, prompt)
                items = StepItems(**load.grow_columns(step_idx))
                if call is None:
                    message = bytes(len(encode(items, session.session_id, session.epoch, 2, 1)))
                    call = _open_echo(channel, load)
                if created:
                    await asyncio.sleep(_PAUSE)
                begin = time.perf_counter()
                await session.step(items)
                ours_us = (time.perf_counter() - begin) * 1e6
                await asyncio.sleep(_PAUSE)
                begin = time.perf_counter()
                await call.write(message)
                await call.read()
                echo_us = (time.perf_counter() - begin) * 1e6
                peer_us = peer.step(items, created) if peer is not None else 0.0
                await asyncio.sleep(_PAUSE)
                if step_idx >= _NUM_WARM_UP and load.fills(step_idx):
                    times.ours.append(ours_us)
                    times.echo.append(echo_us)
                    if peer is not None:
                        times.peer.append(peer_us)
            assert call is not None
            await call.done_writing()
    return times


def _open_echo(channel: grpc.aio.Channel, load: Growing | Turnover) -> Any:
    """A call whose replies are as long as those of the load: a number per sequence, two per new block, tables of starts."""
    num_new = load.num_sequences if _all_fill_at_once(load) else load.num_sequences // BLOCK_SIZE
    start_bytes = sum(20 + 4 * -(-len(prompt) // BLOCK_SIZE) for _, prompt in load.created(0))
    reply_size = 4 * load.num_sequences + 8 * num_new + start_bytes + 40
    open_call: Any = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
    return open_call(metadata=((SIZE_KEY, str(reply_size)),))


def _all_fill_at_once(load: Growing | Turnover) -> bool:
    """Whether most steps fill no block, and are not counted."""
    return not all(map(load.fills, range(BLOCK_SIZE)))
