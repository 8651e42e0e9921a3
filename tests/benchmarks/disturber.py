"""A session that does something large while another one is measured: `python -m tests.benchmarks.disturber unix:/path WHAT`.

Prepares, prints "ready", waits for a line, does it, and prints the seconds that it took.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import numpy as np

from kvkeeper.client import CallOptions
from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems
from tests.benchmarks.admission import NUM_TOKENS, prompts
from tests.benchmarks.sessions import open_session

NUM_BLOCKS = 1 << 20
NUM_SEQUENCES = 120  # of so many tokens: 983,040 blocks
NUM_CACHED_SEQUENCES = 100  # of so many tokens: 819,200 cached blocks
NUM_LISTED = 1000
NUM_EVICTED = 200_000
_ADMISSIONS = 20


async def _main(address: str, what: str) -> None:
    async with AsyncCacheClient(address, CallOptions(timeout_s=300.0)) as client:
        session = await open_session(client)
        if what == "admission":
            cached, _ = prompts(0)
            await _compute(session, 1, cached)
            await session.step(StepItems(release_ids=np.array([1])))
            others = [prompts(0)[1] + np.int32(seed) * (prompts(0)[1] != cached) for seed in range(_ADMISSIONS)]
            took = await _at_a_word(lambda: _admit(session, others))
            await session.close()
        else:
            rng = np.random.default_rng(1)
            num_sequences = NUM_SEQUENCES if what == "reclaim" else NUM_CACHED_SEQUENCES
            for sequence_id in range(1, num_sequences + 1):
                await _compute(session, sequence_id, rng.integers(0, 32_000, NUM_TOKENS).astype(np.int32))
                if what != "reclaim":
                    await session.step(StepItems(release_ids=np.array([sequence_id])))
            if what == "list":
                for sequence_id in range(1000, 1000 + NUM_LISTED):
                    await session.create_sequence(sequence_id, np.array([1], np.int32))
            acts: dict[str, Callable[[], Awaitable[object]]] = {
                "reclaim": session.close,
                "stats": client.stats,
                "list": client.list_sequences,
                "evict": lambda: session.evict_blocks(num_blocks=NUM_EVICTED),
                "audit": client.check_invariants,
                "clear": session.clear_prefix_cache,
            }
            took = await _at_a_word(acts[what])
        print(took, flush=True)


async def _admit(session: AsyncCacheSession, tokens: list[np.ndarray]) -> None:
    """Half of each is cached; each goes before the next one comes."""
    for sequence_id, prompt in enumerate(tokens, start=2):
        await session.create_sequence(sequence_id, prompt.astype(np.int32))
        result = await session.step(_start(sequence_id))
        assert result.start_hits.tolist() == [NUM_TOKENS // 2]
        await session.step(StepItems(release_ids=np.array([sequence_id])))


async def _compute(session: AsyncCacheSession, sequence_id: int, tokens: np.ndarray) -> None:
    await session.create_sequence(sequence_id, tokens)
    await session.step(_start(sequence_id))
    one, length = np.array([sequence_id]), np.array([NUM_TOKENS], np.int32)
    await session.step(StepItems(commit_ids=one, commit_lens=length, commit_num_new=np.zeros(1, np.int32)))


def _start(sequence_id: int) -> StepItems:
    most = np.array([NUM_TOKENS], np.int32)
    return StepItems(start_ids=np.array([sequence_id]), start_max_new=most, start_max_hit=most)


async def _at_a_word(act: Callable[[], Awaitable[object]]) -> float:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    begin = time.perf_counter()
    await act()
    return time.perf_counter() - begin


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2]))
