"""Disk and remote tier: bytes a second beside plain O_DIRECT and a bare client, and a first token from each beside computing.

Both sides of the first take turns: blocks in batches, in the four threads of the service, between the file and one arena. Plain
O_DIRECT reads and writes the same places with one call a block and nothing else; the slab makes digests and rows beside it.
Nothing of it is in the system's cache, so reads are cold. The remote tier's store takes turns with a pipelined client of
redis-py on the same server, with values of the same size, in the same batches and threads; the store makes digests and keyed
checks beside it, asks for the era with each batch, and has the bytes in the arena at the end. Then a 32 M parameter Llama in
both services, one thread: prompts of 2,000 tokens that lie in the tier alone, after pool and host tier have had others, against
prompts that are new. What is measured there decides whether a load pays; with `always` every load is ordered.
"""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import numpy as np
import redis

from kvkeeper.cache_service.core.values.copies import NAME_BYTES, TierOrder, TierResult
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.memory.disk.disk_threads import NUM_THREADS
from kvkeeper.cache_service.memory.disk.slab import Slab, make_slab
from kvkeeper.cache_service.memory.private_file import make_file
from kvkeeper.cache_service.memory.remote.redis_link import OneServer
from kvkeeper.cache_service.memory.remote.redis_link import RedisServer as RedisPlaces
from kvkeeper.cache_service.memory.remote.remote_address import parse_address, read_secret
from kvkeeper.cache_service.memory.remote.remote_store import RemoteStore
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient
from tests.benchmarks.both_services import ask, both_services
from tests.benchmarks.llama import build_folder, random_prompt
from tests.support.remote.redis_server import PASSWORD, RedisServer

_SLAB_BYTES, _HOST_BYTES, _REMOTE_BYTES = 768 << 20, 256 << 20, 192 << 20
_NUM_TURNS = 6
_PROMPT_TOKENS, _NUM_PROMPTS = 2_000, 6

Work = Callable[[list[TierOrder]], None]


def figures() -> Iterator[dict[str, object]]:
    for block_kib in (64, 512, 2048):
        yield {"case": "disk bytes", "block_KiB": block_kib, **_rates(block_kib << 10)}
    for block_kib in (64, 512, 2048):
        with tempfile.TemporaryDirectory() as folder, closing(RedisServer(Path(folder))) as server:
            yield {"case": "remote bytes", "block_KiB": block_kib, **_remote_rates(server, block_kib << 10)}
    with tempfile.TemporaryDirectory() as folder:
        build_folder(Path(folder, "model"))
        for tier in ("disk", "remote"):
            for worth in ("auto", "always"):
                found = asyncio.run(_first_tokens(folder, tier, worth))
                yield {"case": "first token", "tier": tier, "worth": worth, "prompt_tokens": _PROMPT_TOKENS, **found}


def _rates(block_bytes: int) -> dict[str, object]:
    spec = KvSpec(b"bench", "bench", 0, 0, 0, 0, 16, page_bytes=block_bytes)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path, spare = Path(folder, "slab.kv"), Path(folder, "spare.kv")
        os.close(make_file(spare, _SLAB_BYTES))
        make_slab(spare, path, spec, _SLAB_BYTES)
        slab, arena = Slab(path, spec, _SLAB_BYTES), SharedMemoryArena(_HOST_BYTES)
        arena.array[:] = np.random.default_rng(1).integers(0, 256, len(arena.array), np.uint8)
        hosts = arena.blocks(_HOST_BYTES // block_bytes, block_bytes)
        plain = os.open(path, os.O_RDWR | (os.O_DIRECT if slab.is_direct else 0))
        orders = [
            TierOrder(slot, slot % len(hosts), slot.to_bytes(NAME_BYTES), bytes(NAME_BYTES), bytes(64), slot, slab.era)
            for slot in range(1, slab.form.num_slots + 1)
        ]

        def plainly(call: Callable[[int, list[memoryview], int], int]) -> Work:
            def work(part: list[TierOrder]) -> None:
                for order in part:
                    done = call(plain, [memoryview(hosts[order.host])], slab.form.slot_at(order.slot))
                    assert done == block_bytes

            return work

        seconds: dict[str, list[float]] = {"write": [], "plain_write": [], "read": [], "plain_read": []}
        _timed(orders, plainly(os.pwritev), block_bytes)  # the first write of a place costs the file system more
        for turn in range(_NUM_TURNS):
            works = [("write", _through(slab.write, hosts)), ("plain_write", plainly(os.pwritev))]
            for name, work in works if turn % 2 else reversed(works):
                seconds[name].append(_timed(orders, work, block_bytes))
            _timed(orders, _through(slab.write, hosts), block_bytes)  # so that rows and bytes fit
            works = [("read", _through(slab.read, hosts)), ("plain_read", plainly(os.preadv))]
            for name, work in works if turn % 2 else reversed(works):
                seconds[name].append(_timed(orders, work, block_bytes))
        os.close(plain)
        is_direct = slab.is_direct
        slab.close()
        arena.close()
        return {**_figure(seconds, "plain", len(orders) * block_bytes), "direct": is_direct}


def _remote_rates(server: RedisServer, block_bytes: int) -> dict[str, object]:
    """The store beside a bare client; both have a connection for each thread."""
    spec = KvSpec(b"bench", "bench", 0, 0, 0, 0, 16, page_bytes=block_bytes)
    address = parse_address(server.address)
    secret = read_secret(server.secret())
    store = RemoteStore(RedisPlaces(address, OneServer(address, secret, 60.0), ttl=3600.0), secret, spec)
    bare = redis.Redis(address.host, address.port, password=PASSWORD, protocol=2, socket_timeout=60.0)
    arena = SharedMemoryArena(_REMOTE_BYTES)
    arena.array[:] = np.random.default_rng(1).integers(0, 256, len(arena.array), np.uint8)
    hosts = arena.blocks(_REMOTE_BYTES // block_bytes, block_bytes)
    orders = [TierOrder(at, at, at.to_bytes(NAME_BYTES), bytes(NAME_BYTES), bytes(64), at, 0) for at in range(1, len(hosts))]

    def put(part: list[TierOrder]) -> None:
        batch = bare.pipeline(transaction=False)
        for order in part:
            batch.execute_command("SET", b"bare:" + order.name, memoryview(hosts[order.host]))
        assert all(batch.execute())

    def get(part: list[TierOrder]) -> None:
        batch = bare.pipeline(transaction=False)
        for order in part:
            batch.execute_command("GET", b"bare:" + order.name)
        assert all(len(value) == block_bytes for value in batch.execute())

    seconds: dict[str, list[float]] = {"write": [], "bare_write": [], "read": [], "bare_read": []}
    for turn in range(_NUM_TURNS + 1):
        for pair in (
            (("write", _through(store.write, hosts)), ("bare_write", put)),
            (("read", _through(store.read, hosts)), ("bare_read", get)),
        ):
            for name, work in pair if turn % 2 else reversed(pair):
                seconds[name] += [_timed(orders, work, block_bytes)] * (turn > 0)  # the first turn makes connections and room
    store.close()
    arena.close()
    return _figure(seconds, "bare", len(orders) * block_bytes)


def _figure(seconds: dict[str, list[float]], other: str, num_bytes: int) -> dict[str, object]:
    """Bytes a second of each, and what share of the other's ours are."""
    medians = {name: float(np.median(each)) for name, each in seconds.items()}
    rates = {f"{name}_MB_s": round(num_bytes / each / 1e6) for name, each in medians.items()}
    return rates | {f"{name}_share": round(medians[f"{other}_{name}"] / medians[name], 3) for name in ("write", "read")}


def _through(call: Callable[..., list[TierResult]], hosts: np.ndarray) -> Work:
    def work(part: list[TierOrder]) -> None:
        assert call(part, hosts) == [TierResult.DONE] * len(part)

    return work


def _timed(orders: list[TierOrder], work: Work, block_bytes: int) -> float:
    """Seconds until the threads have done all orders, in parts as the service gives them."""
    size = max((4 << 20) // block_bytes, 1)
    parts = [orders[first : first + size] for first in range(0, len(orders), size)]
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if not parts:
                    return
                part = parts.pop(0)
            work(part)

    threads = [threading.Thread(target=run) for _ in range(NUM_THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


async def _first_tokens(folder: str, tier: str, worth: str) -> dict[str, object]:
    async with _services(folder, tier, worth) as (engine, cache):
        rng = np.random.default_rng(2)
        await ask(engine, random_prompt(rng, 64), 4)  # warms it up
        prompts = [random_prompt(rng, _PROMPT_TOKENS) for _ in range(_NUM_PROMPTS)]
        computed = [(await ask(engine, prompt, 2)).first_token_seconds for prompt in prompts]
        while (pool := (await cache.stats()).pools[0]) and getattr(pool, f"num_queued_{tier}_blocks"):
            await ask(engine, random_prompt(rng, 64), 1)  # a pause in which the service goes on
        before = getattr(pool, f"num_{tier}_hit_blocks")
        loaded = [(await ask(engine, prompt, 2)).first_token_seconds for prompt in prompts[:-2]]  # the others may be above
        pool = (await cache.stats()).pools[0]
        num_loaded = getattr(pool, f"num_{tier}_hit_blocks") - before
        return {
            "computed_ms": round(float(np.median(computed)) * 1e3, 1),
            "again_ms": round(float(np.median(loaded)) * 1e3, 1),
            "loaded_blocks_a_prompt": round(num_loaded / len(loaded), 1),
            "block_KiB": pool.pool.block_bytes >> 10,
            "late_loads": getattr(pool, f"num_late_{tier}_loads"),
            "unworthy_loads": getattr(pool, f"num_unworthy_{tier}_loads"),
            "break_even_tokens": getattr(pool, f"{tier}_break_even_tokens"),
            "first_byte_ms": 1e3 * getattr(pool, f"{tier}_first_byte_seconds"),
            "prefill_tokens_s": pool.prefill_rate_tokens,
        }


@asynccontextmanager
async def _services(folder: str, tier: str, worth: str) -> AsyncIterator[tuple[AsyncEngineClient, AsyncCacheClient]]:
    """Both services, with room for two of the prompts in the pool and for two in the host tier."""
    async with AsyncExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        sizes = ("--num-pools", "1", "--num-blocks", "300", "--num-host-blocks", "300", "--tier-worth", worth)
        below: tuple[str, ...] = ("--disk-path", f"{own}/disk", "--disk-memory", "2GiB")
        if tier == "remote":
            server = stack.enter_context(closing(RedisServer(Path(own))))
            below = ("--remote", server.address, "--remote-secret", str(server.secret()), "--remote-admit", "all")
        services = both_services("--model", f"{folder}/model", "--threads", "1", cache_flags=(*sizes, *below))
        yield await stack.enter_async_context(services)
