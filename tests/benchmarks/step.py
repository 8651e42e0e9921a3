"""One Step over a streamed Unix-socket session, against a bare echo of messages of the same size, each server a process.

With PEER=vllm, vLLM's manager in this process goes through the same steps in turn.
"""

import asyncio
import tempfile
from collections.abc import Iterator

import grpc

from kvkeeper.client.cache import AsyncCacheClient
from tests.benchmarks.growing import Growing
from tests.benchmarks.processes import process
from tests.benchmarks.sessions import Load, ready_session
from tests.benchmarks.turnover import Turnover
from tests.benchmarks.turns import Turns, fills_each_step, peer_or_reason

_NUM_WARM_UP = 40
_NUM_STEPS, _NUM_CROWDED, _NUM_TO_FILL = 300, 60, 480  # to fill: only one step in block_size counts
_MOST_CREATED = 5_000  # sequences over a load; more of them would take minutes


def figures() -> Iterator[dict[str, object]]:
    has_peer, reason = peer_or_reason()
    if reason:
        yield {"peer": "vllm", "left_out": reason}
    yield asyncio.run(_compare(Growing(1), "steady", False))
    for num_sequences in (256, 1024):
        yield asyncio.run(_compare(Growing(num_sequences), "steady", has_peer))
        yield asyncio.run(_compare(Turnover(num_sequences, 1), "1 end + 1 start a step", has_peer))
        yield asyncio.run(_compare(Turnover(num_sequences, num_sequences // 10), "10 % end, as many start", has_peer))
        load = Growing(num_sequences, are_staggered=False)
        yield asyncio.run(_compare(load, "all fill a block", has_peer))
        yield asyncio.run(_compare(Growing(num_sequences), "steady, prefix caching off", False, "--no-prefix-caching"))


async def _compare(load: Load, case: str, has_peer: bool, *flags: str) -> dict[str, object]:
    num_steps = _NUM_STEPS if fills_each_step(load) else _NUM_TO_FILL
    if (_NUM_WARM_UP + num_steps) * len(load.created(0)) > _MOST_CREATED:
        num_steps = _NUM_CROWDED
    num_blocks = load.num_blocks(_NUM_WARM_UP + num_steps)
    limits = ["--num-blocks", str(num_blocks), "--max-sequences", str(load.max_sequences), *flags]
    turns = Turns(load, _NUM_WARM_UP, num_steps)
    with tempfile.TemporaryDirectory() as folder:
        cache, echo = f"unix:{folder}/cache", f"unix:{folder}/echo"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *limits),
            process("-m", "tests.benchmarks.echo_server", echo, ready_on="stdout"),
            AsyncCacheClient(cache) as client,
            grpc.aio.insecure_channel(echo) as channel,
            await ready_session(client, load, 0) as session,
        ):
            await turns.take({"": session}, channel, has_peer)
    return {"sequences": load.num_sequences, "case": case, **turns.figure()}
