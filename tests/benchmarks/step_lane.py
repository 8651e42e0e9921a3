"""One Step over a step lane, against the same bare gRPC echo that `step` compares with, and against the step over gRPC.

Two sessions, each of a service of its own, step the same load: one over its lane, one over StreamSteps. With PEER=vllm, vLLM's
manager in this process goes through the same steps in turn.
"""

import asyncio
import tempfile
from collections.abc import Iterator

import grpc

from kvkeeper.client.cache import AsyncCacheClient
from tests.benchmarks.growing import Growing
from tests.benchmarks.processes import process
from tests.benchmarks.sessions import Load, open_session, ready_session, start
from tests.benchmarks.turnover import Turnover
from tests.benchmarks.turns import Turns, peer_or_reason

_NUM_WARM_UP, _NUM_STEPS, _NUM_CROWDED = 60, 640, 100


def figures() -> Iterator[dict[str, object]]:
    has_peer, reason = peer_or_reason()
    if reason:
        yield {"peer": "vllm", "left_out": reason}
    for num_sequences in (64, 256, 1024):
        yield asyncio.run(_compare(Growing(num_sequences), "steady", has_peer))
        yield asyncio.run(_compare(Turnover(num_sequences, 1), "1 end + 1 start a step", has_peer))
    yield asyncio.run(_compare(Turnover(256, 25), "10 % end, as many start", has_peer, _NUM_CROWDED))


async def _compare(load: Load, case: str, has_peer: bool, num_steps: int = _NUM_STEPS) -> dict[str, object]:
    limits = ["--num-blocks", str(load.num_blocks(_NUM_WARM_UP + num_steps)), "--max-sequences", str(load.max_sequences)]
    turns = Turns(load, _NUM_WARM_UP, num_steps)
    with tempfile.TemporaryDirectory() as folder:
        lane, stream, echo = f"unix:{folder}/lane", f"unix:{folder}/stream", f"unix:{folder}/echo"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", lane, "--runtime-dir", f"{folder}/a", *limits),
            process("-m", "kvkeeper.cache_service", "--listen", stream, "--runtime-dir", f"{folder}/b", *limits),
            process("-m", "tests.benchmarks.echo_server", echo, ready_on="stdout"),
            AsyncCacheClient(lane) as lane_client,
            AsyncCacheClient(stream) as stream_client,
            grpc.aio.insecure_channel(echo) as channel,
            await open_session(lane_client) as over_lane,
            await ready_session(stream_client, load, 1) as over_grpc,
        ):
            if not await over_lane.attach_step_lane():
                raise RuntimeError("the cache service gave no step lane")
            await start(over_lane, load, 0)
            await turns.take({"": over_lane, "grpc_": over_grpc}, channel, has_peer)
    return {"sequences": load.num_sequences, "case": case, **turns.figure()}
