"""What a disk or a server that hangs, lies, is full or is gone costs others: nothing, is the aim.

Both services with the demo model. One stream goes on while prompts come and go that lie in the tier alone, so that each of
them asks it and stores to it (`--tier-worth always`). Spells with a fault take turns with spells in which the tier answers. The
figures are the times between the stream's tokens; requests that failed; and prompts whose first tokens are not those of their
first run, for which nothing was cached. `fired` is what the service counted of the fault: zeros there would say nothing.
"""

import asyncio
import mmap
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, KvkeeperError
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.benchmarks.both_services import ask, both_services
from tests.benchmarks.faulty_disk_service import ANSWERS, HANGS, IS_FULL, IS_GONE, LIES
from tests.support.remote.redis_server import RedisServer

_NUM_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 24, 160, 4
_STREAM_TOKENS, _NUM_ROUNDS = 200, 3
_VOCAB_SIZE = 512
_DISK_STATES = {"hangs": HANGS, "lies": LIES, "is full": IS_FULL, "is gone": IS_GONE}
_FIRED = ("late_{}_loads", "damaged_{}_blocks", "failed_{}_blocks", "{}_rests")


@dataclass(slots=True)
class _Spells:
    """What was seen in all spells of one state."""

    gaps: list[float] = field(default_factory=list)
    num_prompts: int = 0
    num_wrong: int = 0
    num_failed: int = 0
    fired: dict[str, int] = field(default_factory=dict)


def figures() -> Iterator[dict[str, object]]:
    for tier in ("disk", "remote"):
        yield from asyncio.run(_faults(tier))


async def _faults(tier: str) -> list[dict[str, object]]:
    async with AsyncExitStack() as stack:
        engine, cache, faults = await stack.enter_async_context(_services(tier))
        rng = np.random.default_rng(1)
        prompts = [rng.integers(3, _VOCAB_SIZE, _PROMPT_TOKENS).astype(np.int32) for _ in range(_NUM_PROMPTS)]
        expected = [(await ask(engine, prompt, _NEW_TOKENS)).token_ids for prompt in prompts]
        for _ in range(2):  # what comes to the tier is asked for again
            for prompt in prompts:
                await ask(engine, prompt, _NEW_TOKENS)
        spells: dict[str, list[_Spells]] = {name: [_Spells(), _Spells()] for name in faults}
        for _ in range(_NUM_ROUNDS):
            for name, (begin, end) in faults.items():
                await _spell(cache, engine, tier, prompts, expected, spells[name][0])
                begin()
                await _spell(cache, engine, tier, prompts, expected, spells[name][1])
                end()
        return [_row(tier, name, *both) for name, both in spells.items()]


def _row(tier: str, name: str, without: _Spells, with_fault: _Spells) -> dict[str, object]:
    p50, p99 = ([float(np.percentile(each.gaps, share)) * 1e3 for each in (without, with_fault)] for share in (50, 99))
    return {
        "tier": tier,
        "fault": name,
        "token_p50_ms": round(p50[1], 2),
        "token_p99_ms": round(p99[1], 2),
        "p50_share": round(p50[1] / p50[0], 3),
        "p99_share": round(p99[1] / p99[0], 3),
        "prompts": with_fault.num_prompts,
        "failed": without.num_failed + with_fault.num_failed,
        "wrong": without.num_wrong + with_fault.num_wrong,
        "fired": with_fault.fired,
        "hit_blocks_without": without.fired["hit"],
    }


async def _spell(
    cache: AsyncCacheClient,
    engine: AsyncEngineClient,
    tier: str,
    prompts: list[np.ndarray],
    expected: list[list[int]],
    seen: _Spells,
) -> None:
    """One stream from its first token to its last, beside prompts that come and go."""
    before = await _counts(cache, tier)

    async def come_and_go() -> None:
        while True:
            place = seen.num_prompts % len(prompts)
            try:
                seen.num_wrong += (await ask(engine, prompts[place], _NEW_TOKENS)).token_ids != expected[place]
            except KvkeeperError:
                seen.num_failed += 1
            seen.num_prompts += 1

    others = asyncio.create_task(come_and_go())
    seen.gaps += (await ask(engine, prompts[0][:16], _STREAM_TOKENS)).gaps
    others.cancel()
    await asyncio.gather(others, return_exceptions=True)
    for name, count in (await _counts(cache, tier)).items():
        seen.fired[name] = seen.fired.get(name, 0) + count - before[name]


async def _counts(cache: AsyncCacheClient, tier: str) -> dict[str, int]:
    pool = (await cache.stats()).pools[0]
    fired = {name.format(tier): int(getattr(pool, "num_" + name.format(tier))) for name in _FIRED}
    return {**fired, "hit": int(getattr(pool, f"num_{tier}_hit_blocks"))}


Faults = dict[str, tuple[Callable[[], None], Callable[[], None]]]  # how each begins, and how it ends


@asynccontextmanager
async def _services(tier: str) -> AsyncIterator[tuple[AsyncEngineClient, AsyncCacheClient, Faults]]:
    """Both services, with room for a few of the prompts in the pool and in the host tier."""
    async with AsyncExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd()))
        sizes = ("--num-pools", "1", "--num-blocks", "60", "--num-host-blocks", "60", "--tier-worth", "always")
        if tier == "disk":
            state = _shared_byte(Path(own, "state"))
            program: tuple[str, ...] = ("tests.benchmarks.faulty_disk_service", f"{own}/state")
            below: tuple[str, ...] = ("--disk-path", f"{own}/disk", "--disk-memory", "64MiB", "--disk-deadline", "0.2")
            faults = _disk_faults(state)
        else:
            server = stack.enter_context(closing(RedisServer(Path(own))))
            program = ("kvkeeper.cache_service",)
            below = ("--remote", server.address, "--remote-secret", str(server.secret()), "--remote-admit", "all")
            below += ("--remote-deadline", "0.2")
            faults = _server_faults(server)
        of_engine = ("--model", str(DEMO_MODEL_DIR), "--threads", "1", "--dtype", "float32")
        services = both_services(*of_engine, cache=program, cache_flags=(*sizes, *below))
        yield *await stack.enter_async_context(services), faults


def _shared_byte(path: Path) -> mmap.mmap:
    path.write_bytes(bytes([ANSWERS]))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def _disk_faults(state: mmap.mmap) -> Faults:
    def turn_to(what: int) -> Callable[[], None]:
        def turn() -> None:
            state[0] = what

        return turn

    return {name: (turn_to(what), turn_to(ANSWERS)) for name, what in _DISK_STATES.items()}


def _server_faults(server: RedisServer) -> Faults:
    def lie() -> None:
        client = server.client()
        for key in server.blocks():
            client.setrange(key, client.strlen(key) - 3, b"\x55\xaa\x55")

    def fill(most: str) -> Callable[[], None]:
        return lambda: server.client().config_set("maxmemory", most)

    return {
        "hangs": (server.hang, server.go_on),
        "lies": (lie, lambda: None),
        "is full": (fill("1mb"), fill("0")),
        "is gone": (server.kill, server.start),
    }
