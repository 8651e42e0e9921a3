"""Row 16: the end of a session with a million blocks delays no other session by more than 50 ms.

Another session steps without a pause meanwhile. What it waits for is counted in the time that the loop's thread computes,
because a machine that gives the thread no time is no fault of the service. The objects that stand before the first step are
frozen, as `python -m kvkeeper.cache_service` does it: this process holds far more of them than a service does, and one garbage
collection that looked at them all would be counted as a wait for the reclaim.
"""

import asyncio
import gc
import random
import time

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import SequenceId
from tests.soak.row import Counts
from tests.support.worlds.cache_api import Api, Session, serving
from tests.support.worlds.core_pool import int32, step_batch

NUM_BLOCKS = 1_000_000
MOST_DELAY = 0.05
_SPEC = pb.KvSpec(model_id="tiny", num_layers=1, num_kv_heads=1, head_dim=1, kv_dtype=pb.KV_DTYPE_FLOAT16, block_size=1,
                  layout=pb.KV_LAYOUT_BLOCK_MAJOR)  # fmt: skip
_NUM_SEQUENCES = (512, 64, 8)  # by seed: the longer the sequences, the longer each takes
_STEPS_BEFORE = 50


async def run(seed: int) -> Counts:
    """Counts reclaims; the fault is a step that was answered while one was under way."""
    try:
        return await _run(random.Random(seed), _NUM_SEQUENCES[seed % len(_NUM_SEQUENCES)])
    finally:
        gc.unfreeze()


async def _run(rng: random.Random, num_sequences: int) -> Counts:
    length = NUM_BLOCKS // num_sequences
    num_held = length * num_sequences
    async with serving(num_blocks=NUM_BLOCKS + 12_000, max_tokens_per_sequence=length, max_sequences=num_sequences) as api:
        dying, stepping = await api.open(spec=_SPEC, ttl_ms=60_000), await api.open(spec=_SPEC, ttl_ms=60_000)
        _fill(api, dying, num_sequences, length, rng)
        assert (await api.stats()).pools[0].num_referenced_blocks == num_held
        gc.collect()
        gc.freeze()
        delays = [await _step(stepping, step_id) for step_id in range(1, _STEPS_BEFORE)]
        closing = asyncio.ensure_future(dying.call("CloseSession"))
        (pool,) = api.server.session_manager.registry.pools
        step_id, num_meanwhile, worst = _STEPS_BEFORE, 0, 0.0
        while not closing.done() or pool.manager.queries.stats().num_referenced_blocks or step_id < 2 * _STEPS_BEFORE:
            worst = max(worst, await _step(stepping, step_id))
            step_id += 1
            num_meanwhile += 0 < pool.manager.queries.stats().num_referenced_blocks < num_held
        await closing
        await api.audit()
        assert worst <= MOST_DELAY, f"a step waited {1000 * worst:.0f} ms, {1000 * max(delays):.1f} ms at most before"
    return Counts(1, num_meanwhile)


def _fill(api: Api, session: Session, num_sequences: int, length: int, rng: random.Random) -> None:
    """Sequences that hold a million blocks, some of them committed; in the core, to save the time of the wire."""
    (pool,) = api.server.session_manager.registry.pools
    (live,) = [live for live in api.server.session_manager.sessions if live.core.id == session.opened.session_id]
    ids = range(1, num_sequences + 1)
    for sequence_id in ids:
        tokens = int32(range(sequence_id, sequence_id + length))
        pool.manager.creation.create(live.core.id, SequenceArgs(SequenceId(sequence_id), tokens))
    pool.manager.steps.step(live.core.id, step_batch(1, 0, starts=[(i, length, 0) for i in ids]))
    committed = rng.choice([0, length // 2, length])
    pool.manager.steps.step(live.core.id, step_batch(2, 1, commits=[(i, committed, []) for i in ids]))


async def _step(session: Session, step_id: int) -> float:
    """Seconds that the loop's thread computed until a step was answered."""
    started = time.thread_time()
    await session.step(step_id)
    return time.thread_time() - started
