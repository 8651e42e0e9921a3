"""One Step over a step lane, against the same bare gRPC echo that `step` compares with, and against the step over gRPC.

Two sessions step the same load: one over its lane, one over StreamSteps. With PEER=vllm, vLLM's manager in this process goes
through the same steps in turn.
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

_NUM_WARM_UP, _NUM_STEPS = 60, 640


def figures() -> Iterator[dict[str, object]]:
    has_peer, reason = peer_or_reason()
    if reason:
        yield {"peer": "vllm", "left_out": reason}
    for num_sequences in (64, 256, 1024):
        yield asyncio.run(_compare(Growing(num_sequences), "steady", has_peer))
        yield asyncio.run(_compare(Turnover(num_sequences, 1), "1 end + 1 start a step", has_peer))


async def _compare(load: Load, case: str, has_peer: bool) -> dict[str, object]:
    num_blocks = 2 * load.num_blocks(_NUM_WARM_UP + _NUM_STEPS)
    limits = ["--num-blocks", str(num_blocks), "--max-sequences", str(2 * load.max_sequences)]
    turns = Turns(load, _NUM_WARM_UP, _NUM_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        cache, echo = f"unix:{folder}/cache", f"unix:{folder}/echo"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *limits),
            process("-m", "tests.benchmarks.echo_server", echo, ready_on="stdout"),
            AsyncCacheClient(cache) as client,
            grpc.aio.insecure_channel(echo) as channel,
            await open_session(client) as over_lane,
            await ready_session(client, load, 1) as over_grpc,
        ):
            if not await over_lane.attach_step_lane():
                raise RuntimeError("the cache service gave no step lane")
            await start(over_lane, load, 0)
            await turns.take({"": over_lane, "grpc_": over_grpc}, channel, has_peer)
    return {"sequences": load.num_sequences, "case": case, **turns.figure()}
