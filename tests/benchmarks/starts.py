"""What it takes until a sequence runs: admission of a prompt of 1,024 tokens over a step lane, and a crowd of idle sequences.

An admission is two exchanges, a create and the step that starts it, each after a pause as between the steps of an engine. With
PEER=vllm, vLLM's manager in this process admits the same prompts in turn. The crowd is created one by one, all at once, and in
calls of 256 as an engine does.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np

from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.new_sequence import NewSequence
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems
from tests.benchmarks.growing import BLOCK_SIZE
from tests.benchmarks.processes import process
from tests.benchmarks.sessions import open_session
from tests.benchmarks.turns import peer_or_reason
from tests.benchmarks.vllm_manager import VllmManager

_PROMPT_LEN, _NUM_PROMPTS, _NUM_WARM_UP = 1024, 400, 50
_NUM_BLOCKS = (_NUM_PROMPTS + 10) * (_PROMPT_LEN // BLOCK_SIZE + 1)
_NUM_IDLE, _IDLE_LEN, _IN_CALL = 10_000, 64, 256
_PAUSE = 0.001  # seconds


def figures() -> Iterator[dict[str, object]]:
    has_peer, reason = peer_or_reason()
    if reason:
        yield {"peer": "vllm", "left_out": reason}
    yield {"case": "admission", "tokens": _PROMPT_LEN, **asyncio.run(_admit_all(has_peer))}
    for how in ("one by one", "all at once", f"in calls of {_IN_CALL}"):
        yield {"case": "idle sequences", "sequences": _NUM_IDLE, "how": how, "seconds": round(asyncio.run(_crowd(how)), 2)}


@asynccontextmanager
async def _session(num_blocks: int, num_sequences: int) -> AsyncIterator[AsyncCacheSession]:
    limits = ["--num-blocks", str(num_blocks), "--max-sequences", str(num_sequences)]
    with tempfile.TemporaryDirectory() as folder:
        cache = f"unix:{folder}/cache"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *limits),
            AsyncCacheClient(cache) as client,
            await open_session(client) as session,
        ):
            if not await session.attach_step_lane():
                raise RuntimeError("the cache service gave no step lane")
            yield session


async def _admit_all(has_peer: bool) -> dict[str, object]:
    rng, times = np.random.default_rng(0), list[list[float]]()
    peer = VllmManager(_NUM_BLOCKS, BLOCK_SIZE) if has_peer else None
    async with _session(_NUM_BLOCKS, 64) as session:
        for number in range(1, _NUM_PROMPTS + 1):
            prompt = rng.integers(0, 32_000, _PROMPT_LEN).astype(np.int32)
            row = list(await _admit(session, number, prompt))
            if peer is not None:
                begin = time.perf_counter()
                peer.start([(number, prompt)])
                row.append((time.perf_counter() - begin) * 1e6)
                await asyncio.sleep(_PAUSE)
            times.append(row)
    create, start, *of_peer = np.median(np.array(times)[_NUM_WARM_UP:], axis=0)
    figure: dict[str, object] = {"create_us": round(create), "start_us": round(start), "in_all_us": round(create + start)}
    if of_peer:
        figure |= {"peer": "vllm", "peer_us": round(of_peer[0]), "ratio_to_peer": round((create + start) / of_peer[0], 2)}
    return figure


async def _admit(session: AsyncCacheSession, number: int, prompt: np.ndarray) -> tuple[float, float]:
    """Microseconds of the create and of the step that starts it; the sequence is committed and has ended afterwards."""
    length = np.array([_PROMPT_LEN], np.int32)
    starting = StepItems(start_ids=np.array([number]), start_max_new=length, start_max_hit=length - np.int32(1))
    begin = time.perf_counter()
    await session.create_sequence(number, prompt)
    created = time.perf_counter() - begin
    await asyncio.sleep(_PAUSE)
    begin = time.perf_counter()
    await session.step(starting)
    started = time.perf_counter() - begin
    none, one = np.zeros(1, np.int32), np.array([number])
    await asyncio.sleep(_PAUSE)
    await session.step(StepItems(commit_ids=one, commit_lens=length, commit_num_new=none, release_ids=one))
    await asyncio.sleep(_PAUSE)
    return created * 1e6, started * 1e6


async def _crowd(how: str) -> float:
    """Seconds until all sequences wait."""
    prompts = [np.arange(number, number + _IDLE_LEN, dtype=np.int32) for number in range(_NUM_IDLE)]
    async with _session(1024, _NUM_IDLE) as session:
        begin = time.perf_counter()
        if how == "one by one":
            for number, prompt in enumerate(prompts, 1):
                await session.create_sequence(number, prompt)
        elif how == "all at once":
            await asyncio.gather(*(session.create_sequence(number, prompt) for number, prompt in enumerate(prompts, 1)))
        else:
            new = [NewSequence(number, prompt) for number, prompt in enumerate(prompts, 1)]
            for first in range(0, _NUM_IDLE, _IN_CALL):
                await session.create_sequences(new[first : first + _IN_CALL])
        return time.perf_counter() - begin
