"""A sequence changes its session: HandOffSequence and TakeSequence over step lanes, and the bytes of KV that move for it.

The sequence goes to and fro between two sessions of one cache service, while 64 others of the first session step in between, as
they do in an engine that hands over one of its requests.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems
from tests.benchmarks.growing import BLOCK_SIZE, Growing
from tests.benchmarks.processes import process
from tests.benchmarks.sessions import open_session, ready_session

_NUM_HAND_OFFS = 200
_ID = 1_000_000
_AIM_MS = 2.0


def figures() -> Iterator[dict[str, object]]:
    for num_tokens in (1024, 32_768):
        yield asyncio.run(_hand_over(num_tokens))


async def _hand_over(num_tokens: int) -> dict[str, object]:
    load = Growing(64)
    num_blocks = load.num_blocks(_NUM_HAND_OFFS) + num_tokens // BLOCK_SIZE + 64
    limits = ["--num-blocks", str(num_blocks), "--max-sequences", "128", "--max-tokens-per-sequence", str(num_tokens + 64)]
    times = []
    with tempfile.TemporaryDirectory() as folder:
        listen = f"unix:{folder}/cache"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", listen, "--runtime-dir", folder, *limits),
            AsyncCacheClient(listen) as client,
            await ready_session(client, load, 1) as first,
            await open_session(client) as second,
        ):
            if not (await first.attach_step_lane() and await second.attach_step_lane()):  # as engines have one
                raise RuntimeError("the cache service gave no step lane")
            await _start_long(second, num_tokens)
            giver, taker = second, first
            for idx in range(_NUM_HAND_OFFS):
                await first.step(StepItems(**load.grow_columns(idx)))
                begin = time.perf_counter()
                taken = await taker.take(await giver.hand_off(_ID + idx), _ID + idx + 1)
                times.append(time.perf_counter() - begin)
                assert len(taken.block_table) == num_tokens // BLOCK_SIZE
                giver, taker = taker, giver
            (pool,) = (await client.stats()).pools
    middle, late = np.percentile(times, (50, 99)) * 1e3
    return {
        "tokens": num_tokens,
        "median_ms": round(float(middle), 2),
        "p99_ms": round(float(late), 2),
        "aim_ms": _AIM_MS,
        "hand_offs": pool.num_hand_offs,
        "kv_bytes_moved": pool.num_copies_on_write * pool.pool.block_bytes,
    }


async def _start_long(session: AsyncCacheSession, num_tokens: int) -> None:
    """A sequence of so many tokens, all of them committed."""
    await session.create_sequence(_ID, np.arange(num_tokens, dtype=np.int32))
    one, none = np.array([num_tokens], np.int32), np.zeros(1, np.int32)
    await session.step(StepItems(start_ids=np.array([_ID]), start_max_new=one, start_max_hit=none))
    await session.step(
        StepItems(commit_ids=np.array([_ID]), commit_lens=one, commit_num_new=none, commit_tokens=np.empty(0, np.int32))
    )
