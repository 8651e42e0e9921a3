"""Engines over several ranks, each a process with an arena of its own: tokens, tiers, and the loss of any process.

The model is the hash toy mostly, whose next token is wrong where a slot in the arena of any rank is. A start of another rank
costs seconds of a processor, so each test asks an engine for much.
"""

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.client import AsyncEngineClient, BeamSearch, GenerateOptions, Sampling
from kvkeeper.common.service.process import StartError
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.ranks import rank_process
from kvkeeper.engine_service.server import RunningServer
from tests.support.processes.engine_command import engine_process, logged
from tests.support.processes.service_pair import BLOCK_SIZE, DEADLINE_S, GREEDY, Services, generate, toy_output, until
from tests.support.remote.redis_server import RedisServer

PROMPT = list(range(40, 40 + 5 * BLOCK_SIZE + 1))
PROMPTS = [[place + 1, *range(40, 40 + 2 * BLOCK_SIZE)] for place in range(6)]
TEXTS = ["def main():\n    ", "import os\n", "class Cache:\n    def get(self, key):\n"]
NUM_NEW = 24


async def start(world: Services, num_ranks: int = 2, **options: Any) -> tuple[RunningServer, AsyncEngineClient]:
    engine = await world.start_engine(tensor_parallel=num_ranks, **options)
    return engine, await world.client(engine)


def processes_of(engine: RunningServer) -> list[int]:
    assert engine.ranks is not None
    return engine.ranks.processes


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_of(engine: int) -> tuple[list[int], Path]:
    """The processes of the other ranks of an engine's process, and the folder in which they met."""
    told = {}
    for child in " ".join(path.read_text() for path in Path(f"/proc/{engine}/task").glob("*/children")).split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if rank_process.__name__ in words:
            told[int(child)] = Path(words[words.index(rank_process.__name__) + 3])
    (folder,) = set(told.values())
    return list(told), folder


async def ask_and(client: AsyncEngineClient, prompt: list[int], num_tokens: int, meanwhile: Callable[[], None]) -> list[int]:
    """The tokens of one request, in the middle of which something happens."""
    sampling = Sampling(temperature=0, repetition_penalty=1.0, max_tokens=num_tokens)
    token_ids: list[int] = []
    has_happened = False
    async for chunk in client.generate(prompt, GenerateOptions(sampling=sampling)):
        token_ids += chunk.token_ids
        if not has_happened and chunk.token_ids:
            has_happened = True
            meanwhile()
    return token_ids


async def test_prefixes_forks_swaps_and_lower_tiers_on_two_ranks(world: Services, tmp_path: Path) -> None:
    await world.start_cache(num_blocks=17, num_host_blocks=65, num_pools=1, disk_path=tmp_path / "disk", disk_memory=4 << 20)
    _, client = await start(world, preemption="swap", chunk_size=7)
    outputs = await asyncio.gather(*(generate(client, prompt, NUM_NEW, skip_look_up=True) for prompt in PROMPTS))
    assert [output.token_ids for output in outputs] == [[toy_output(prompt, NUM_NEW)] for prompt in PROMPTS]
    first, second = await generate(client, PROMPT), await generate(client, [*PROMPT, 7, 8])
    assert (first.token_ids, second.token_ids) == ([toy_output(PROMPT, 8)], [toy_output([*PROMPT, 7, 8], 8)])
    assert second.usage.cached_tokens == 5 * BLOCK_SIZE
    many = await generate(client, PROMPT[:-2], n=3)
    assert many.token_ids == [toy_output(PROMPT[:-2], 8)] * 3
    beams = [found async for found in client.generate(PROMPT, GenerateOptions(beam_search=BeamSearch(2), sampling=GREEDY))]
    assert beams
    for _ in range(2):
        for place in range(16):  # more than pool and host tier hold
            prompt = [100 + place, *PROMPT]
            assert (await generate(client, prompt)).token_ids == [toy_output(prompt, 8)]
    pool = await world.pool()
    assert pool.num_swap_outs > 0
    assert pool.num_failed_transfers == 0
    assert pool.num_copies_on_write > 0
    assert pool.num_disk_hit_blocks > 0
    assert pool.num_damaged_disk_blocks == 0
    idle = await world.wait_idle()
    assert (idle.num_quarantined_blocks, idle.num_transfer_blocks) == (0, 0)


async def test_requests_go_on_when_a_rank_dies_or_hangs(world: Services) -> None:
    await world.start_cache(num_blocks=129)
    engine, client = await start(world, rank_timeout=1.0)
    assert engine.ranks is not None
    for number, why in ((signal.SIGKILL, "ended with -9"), (signal.SIGSTOP, "does not answer")):
        (before,) = processes_of(engine)
        lost: list[str] = []
        told = engine.ranks.on_lost

        def note(lost: list[str] = lost, told: Callable[[], None] = told) -> None:
            assert engine.ranks is not None
            lost.append(engine.ranks.lost)
            told()

        engine.ranks.on_lost = note
        tokens = await ask_and(client, PROMPT, 120, lambda process=before, number=number: os.kill(process, number))  # type: ignore[misc]
        assert tokens == toy_output(PROMPT, 120)
        assert len(lost) == 1
        assert lost[0].startswith("rank 1: ") and why in lost[0]
        engine.ranks.on_lost = told
        (after,) = processes_of(engine)
        assert after != before
        assert not is_alive(before)
    assert (await generate(client, PROMPT)).usage.cached_tokens == 5 * BLOCK_SIZE, "what was committed is still cached"
    (process,) = processes_of(engine)
    os.kill(process, signal.SIGKILL)  # while there is nothing to compute

    async def is_replaced() -> bool:
        return processes_of(engine) not in ([process], []) and engine.engine.memory is not None

    await until(is_replaced)
    assert (await generate(client, [5, *PROMPT])).token_ids == [toy_output([5, *PROMPT], 8)]
    assert (await world.wait_idle()).num_quarantined_blocks == 0
    await engine.stop()
    assert processes_of(engine) == []


async def test_the_other_ranks_end_with_a_killed_engine(world: Services) -> None:
    await world.start_cache(num_blocks=129)
    flags = "--cache", world.cache.address, "--listen", f"unix:{world.folder}/e", "--tensor-parallel", "2"
    async with engine_process(*flags) as process:
        await logged(process, "ready", 3 * DEADLINE_S)  # two processes, one after the other, load torch
        ranks, folder = ranks_of(process.pid)
        assert len(ranks) == 1
        assert folder.is_dir()
        process.kill()

        async def are_gone() -> bool:
            return not any(map(is_alive, ranks))

        await until(are_gone)

        async def is_clean() -> bool:
            pool = await world.pool()
            return not pool.num_sessions and not pool.num_quarantined_blocks

        await until(is_clean)
        assert not folder.exists()


async def test_the_demo_model_gives_the_tokens_of_one_rank(world: Services) -> None:
    alone = await world.serve(
        model_folder=DEMO_MODEL_DIR, threads=1, cache={"num_blocks": 257, "num_pools": 2, "pool_memory": 8 << 20}
    )
    _, shared = await start(world, model_folder=DEMO_MODEL_DIR, threads=1, speculation="prompt-look-up", dtype="float32")
    for text in TEXTS:
        expected, found = await generate(alone, text, NUM_NEW), await generate(shared, text, NUM_NEW)
        assert (found.token_ids, found.texts) == (expected.token_ids, expected.texts)
    again = await generate(shared, TEXTS[2] * 2, NUM_NEW)
    assert again.usage.cached_tokens > 0
    assert again.token_ids == (await generate(alone, TEXTS[2] * 2, NUM_NEW)).token_ids


async def test_an_engine_of_two_ranks_takes_over_from_one_of_two(world: Services) -> None:
    await world.start_cache(num_blocks=129)
    giver, client = await start(world)
    taking: list[asyncio.Task[RunningServer]] = []

    def begin() -> None:
        taking.append(asyncio.create_task(world.start_engine(tensor_parallel=2, take_over=giver.address)))

    tokens = await ask_and(client, PROMPT, 150, begin)
    assert tokens == toy_output(PROMPT, 150)
    taker = await taking[0]
    assert (await generate(await world.client(taker), PROMPT)).token_ids == [toy_output(PROMPT, 8)]


async def test_a_model_that_cannot_be_split_so_is_refused(world: Services) -> None:
    await world.start_cache()
    with pytest.raises(StartError, match="ranks 3 is not supported; supported: divisors of the model's attention heads, 4"):
        await world.start_engine(model_folder=DEMO_MODEL_DIR, tensor_parallel=3)


async def test_prompts_of_another_engine_and_the_remote_tier_on_two_ranks(world: Services, tmp_path: Path) -> None:
    with closing(RedisServer(tmp_path)) as server:
        remote = {"remote": server.address, "remote_secret": server.secret(), "remote_admit": "all", "remote_deadline": 10.0}
        await world.start_cache(num_blocks=33, num_host_blocks=33, num_pools=2, **remote)
        helper, _ = await start(world, role="prefill")
        decoding = {"role": "decode", "prefill": helper.address, "prefill_min_tokens": 1}
        decoder, client = await start(world, **decoding)
        for prompt in PROMPTS:
            assert (await generate(client, prompt, NUM_NEW)).token_ids == [toy_output(prompt, NUM_NEW)]
        stats = decoder.engine.stats
        assert (stats.num_remote_prefills, stats.num_failed_remote_prefills) == (len(PROMPTS), 0)
        assert stats.num_prefill_tokens == 0
        alone = await world.start_engine(**decoding)  # of one rank: another KV spec, so its blocks are in another pool
        output = await generate(await world.client(alone), PROMPT, NUM_NEW)
        assert output.token_ids == [toy_output(PROMPT, NUM_NEW)]
        assert alone.engine.stats.num_prefill_tokens == len(PROMPT), "it computes the prompt again"
        await alone.stop()
        for _ in range(3):
            for place in range(16):  # more than pool and host tier hold
                prompt = [100 + place, *PROMPT]
                assert (await generate(client, prompt)).token_ids == [toy_output(prompt, 8)]
        (pool,) = [
            pool for pool in (await (await world.cache_client()).stats()).pools if pool.pool.spec.tensor_parallel_size == 2
        ]
        assert pool.num_remote_hit_blocks > 0
        assert pool.num_damaged_remote_blocks == pool.num_failed_remote_blocks == 0


async def test_a_draft_model_and_constraints_beside_two_ranks(world: Services) -> None:
    await world.start_cache(num_blocks=257, num_pools=2, pool_memory=8 << 20)
    models = {"model_folder": DEMO_MODEL_DIR, "threads": 1, "dtype": "float32"}
    alone = await world.client(await world.start_engine(**models))
    _, shared = await start(world, speculation="draft-model", draft_model=str(DEMO_MODEL_DIR), **models)
    pattern = r"v[0-9]{1,2}\.[0-9]\.(0|rc[1-3])"
    constrained = dataclasses.replace(GREEDY, regex=pattern)
    for sampling in (GREEDY, constrained):
        for text in TEXTS[:1]:
            expected, found = [await generate(client, text, NUM_NEW, sampling) for client in (alone, shared)]
            assert (found.token_ids, found.texts) == (expected.token_ids, expected.texts)
            assert sampling is GREEDY or re.match(pattern, found.texts[0])
    assert (await shared.stats()).acceptance_rate > 0.9, "a model is always right about itself"
    free = (await generate(alone, TEXTS[0], NUM_NEW)).token_ids[0]
    ruled = dataclasses.replace(GREEDY, bad_words_token_ids=[free[1:3], free[4:5]], min_tokens=NUM_NEW)
    expected, found = [await generate(client, TEXTS[0], NUM_NEW, ruled) for client in (alone, shared)]
    assert found.token_ids == expected.token_ids != [free]
