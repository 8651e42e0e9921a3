"""Rows 13 and 14: engines that are stopped past their lease, and wake up.

Real processes, stopped and continued by signals. While they sleep their leases end and another session takes every block there
is; when they wake they go on writing into the arena, and send every call of their life again. Nothing that they send may
change anything, and nothing that they write may be found in a block of another session.
"""

import asyncio
import json
import random
import signal
import sys
from dataclasses import dataclass

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.soak.row import Counts
from tests.soak.state_hash import state_hash
from tests.support.processes.services import environment
from tests.support.worlds.cache_api import BLOCK_BYTES, BLOCK_SIZE, DEADLINE, Api, Session, blocks_of, int32s, serving

TTL_MS = 500
_START_S = 60.0  # that the processes may take to start on a busy machine
_NUM_ENGINES = 4
_CYCLES = 4
_NUM_BLOCKS = 64
_REFUSALS = {"UNKNOWN_SESSION", "STALE_EPOCH"}


@dataclass
class _Result:
    """Sums over the cycles of a unit."""

    num_cycles: int = 0
    num_refused_calls: int = 0
    num_late_writes: int = 0  # blocks seen to be written after the lease of their engine had ended


class _Child:
    """One engine process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.blocks: list[int] = []  # that it writes: its sequence's last one, and the copy that a fork was given

    async def ask(self, word: str) -> dict[str, object]:
        await self.tell(word)
        return await self.answer()

    async def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        await self.process.stdin.drain()

    async def answer(self, within: float = DEADLINE) -> dict[str, object]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), within)
        assert line, "an engine process ended"
        found: dict[str, object] = json.loads(line)
        return found


async def stale_calls(seed: int) -> Counts:
    """Counts cycles; the fault is an old call that arrived, and was refused."""
    result = await _run(random.Random(seed))
    return Counts(result.num_cycles, result.num_refused_calls)


async def foreign_writes(seed: int) -> Counts:
    """Counts cycles; the fault is an engine that wrote after its lease had ended."""
    result = await _run(random.Random(seed))
    return Counts(result.num_cycles, result.num_late_writes)


async def _run(rng: random.Random) -> _Result:
    result = _Result()
    async with serving(num_blocks=_NUM_BLOCKS) as api:
        children = [await _start(api) for _ in range(_NUM_ENGINES)]
        try:
            await asyncio.gather(*(child.answer(_START_S) for child in children))
            for _ in range(_CYCLES):
                await _cycle(api, children, rng, result)
        finally:
            for child in children:
                if child.process.returncode is None:
                    child.process.kill()
                await child.process.wait()
    return result


async def _start(api: Api) -> _Child:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.processes.engine_process", api.server.address, str(TTL_MS),
        stdin=pipe, stdout=pipe, env=environment(api.server.attach_path.parent),
    )  # fmt: skip
    return _Child(process)


async def _cycle(api: Api, children: list[_Child], rng: random.Random, result: _Result) -> None:
    working = await asyncio.gather(*(child.ask("work") for child in children))
    for child, answer in zip(children, working, strict=True):
        assert isinstance(answer["blocks"], list)
        child.blocks = answer["blocks"]
    by_id = {live.core.id: live for live in api.server.session_manager.sessions}
    lives = [by_id[str(answer["session"])] for answer in working]
    for child in children:
        child.process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(DEADLINE):
        for live in lives:
            await live.over.wait()
    (pool,) = api.server.session_manager.registry.pools
    other = await api.open(ttl_ms=60_000)
    taken = await _take_all(other)
    late = [block for child in children for block in child.blocks]
    assert len(late) == 2 * len(children), "a sequence and its fork"
    assert not set(taken) & set(late), "a block was granted that a stopped engine may still write"
    mine = np.frombuffer(rng.randbytes(len(taken) * BLOCK_BYTES), np.uint8).reshape(-1, BLOCK_BYTES)
    blocks = blocks_of(pool)
    blocks[taken] = mine
    before, written = state_hash(pool.manager), [bytes(blocks[block]) for block in late]
    for child in children:
        child.process.send_signal(signal.SIGCONT)
    refused = await asyncio.gather(*(child.answer() for child in children))
    assert all(answer["refused"] in _REFUSALS for answer in refused), refused
    await _replay(children, result)
    assert state_hash(pool.manager) == before, "a call of an ended session changed the pool"
    result.num_late_writes += sum(bytes(blocks[block]) != old for block, old in zip(late, written, strict=True))
    np.testing.assert_array_equal(blocks[taken], mine, "foreign bytes")
    await asyncio.gather(*(child.ask("drain") for child in children))
    assert (await api.stats()).pools[0].num_quarantined_blocks == 0
    await other.call("CloseSession")
    # Open again, so that the old calls also meet a live session, and another's epoch.
    await asyncio.gather(*(child.ask("idle") for child in children))
    before = state_hash(pool.manager)
    await _replay(children, result)
    assert state_hash(pool.manager) == before, "a call of an ended session changed a later one"
    await asyncio.gather(*(child.ask("drain") for child in children))
    await api.audit()
    result.num_cycles += len(children)


async def _replay(children: list[_Child], result: _Result) -> None:
    for answer in await asyncio.gather(*(child.ask("replay") for child in children)):
        reasons = answer["reasons"]
        assert isinstance(reasons, dict)
        assert set(reasons) <= _REFUSALS, f"old calls were answered {reasons}"
        result.num_refused_calls += sum(reasons.values())


async def _take_all(session: Session) -> list[int]:
    """Every block that can be had."""
    (stats,) = (await session.api.stats()).pools
    num_blocks = stats.num_free_blocks + stats.num_cached_blocks
    await session.create(1, BLOCK_SIZE * num_blocks, first=1)
    raw = await session.api.raw_step(session.start_bytes(1, 1, max_hit=0))
    taken = int32s(pb.StepResponse.FromString(raw).start_block_ids)
    assert len(taken) == num_blocks
    return taken
