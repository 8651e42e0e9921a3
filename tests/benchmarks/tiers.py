"""The disk tier: bytes a second beside plain O_DIRECT on the same file, and a first token from the disk beside computing it.

Both sides of the first take turns: blocks in batches, in the four threads of the service, between the file and one arena. Plain
O_DIRECT reads and writes the same places with one call a block and nothing else; the slab makes digests and rows beside it.
Nothing of it is in the system's cache, so reads are cold. The second is a 32 M parameter Llama in both services, one thread:
prompts of 2,000 tokens that lie on the disk alone, after pool and host tier have had others, against prompts that are new.
"""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from kvkeeper.cache_service.core.values.copies import NAME_BYTES, TierOrder, TierResult
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.memory.disk.disk_threads import NUM_THREADS
from kvkeeper.cache_service.memory.disk.slab import Slab, make_slab
from kvkeeper.cache_service.memory.kept_file import make_file
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient
from tests.benchmarks.both_services import ask
from tests.benchmarks.llama import build_folder, random_prompt
from tests.benchmarks.processes import process

_SLAB_BYTES, _HOST_BYTES = 768 << 20, 256 << 20
_NUM_TURNS = 6
_PROMPT_TOKENS, _NUM_PROMPTS = 2_000, 6

Work = Callable[[list[TierOrder]], None]


def figures() -> Iterator[dict[str, object]]:
    for block_kib in (64, 512, 2048):
        yield {"case": "bytes", "block_KiB": block_kib, **_rates(block_kib << 10)}
    with tempfile.TemporaryDirectory() as folder:
        build_folder(Path(folder, "model"))
        yield {"case": "first token", "prompt_tokens": _PROMPT_TOKENS, **asyncio.run(_first_tokens(folder))}


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

        def through(call: Callable[..., list[TierResult]]) -> Work:
            def work(part: list[TierOrder]) -> None:
                assert call(part, hosts) == [TierResult.DONE] * len(part)

            return work

        seconds: dict[str, list[float]] = {"write": [], "plain_write": [], "read": [], "plain_read": []}
        _timed(orders, plainly(os.pwritev))  # the first write of a place costs the file system more
        for turn in range(_NUM_TURNS):
            works = [("write", through(slab.write)), ("plain_write", plainly(os.pwritev))]
            for name, work in works if turn % 2 else reversed(works):
                seconds[name].append(_timed(orders, work))
            _timed(orders, through(slab.write))  # so that rows and bytes fit
            works = [("read", through(slab.read)), ("plain_read", plainly(os.preadv))]
            for name, work in works if turn % 2 else reversed(works):
                seconds[name].append(_timed(orders, work))
        num_bytes = len(orders) * block_bytes
        rates = {f"{name}_MB_s": round(num_bytes / float(np.median(each)) / 1e6) for name, each in seconds.items()}
        shares = {
            f"{name}_share": round(float(np.median(seconds[f"plain_{name}"]) / np.median(seconds[name])), 3)
            for name in ("write", "read")
        }
        os.close(plain)
        is_direct = slab.is_direct
        slab.close()
        arena.close()
        return {**rates, **shares, "direct": is_direct}


def _timed(orders: list[TierOrder], work: Work) -> float:
    """Seconds until the threads have done all orders, in parts as the service gives them."""
    size = max((4 << 20) // _block_bytes(orders), 1)
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


def _block_bytes(orders: list[TierOrder]) -> int:
    return _SLAB_BYTES // len(orders)


async def _first_tokens(folder: str) -> dict[str, object]:
    async with _services(folder) as (cache, engine):
        rng = np.random.default_rng(2)
        await ask(engine, random_prompt(rng, 64), 4)  # warms it up
        prompts = [random_prompt(rng, _PROMPT_TOKENS) for _ in range(_NUM_PROMPTS)]
        computed = [(await ask(engine, prompt, 2)).first_token_seconds for prompt in prompts]
        while (pool := (await cache.stats()).pools[0]).num_queued_disk_blocks or pool.num_busy_disk_blocks:
            await ask(engine, random_prompt(rng, 64), 1)  # a pause in which the service goes on
        before = pool.num_disk_hit_blocks
        from_disk = [(await ask(engine, prompt, 2)).first_token_seconds for prompt in prompts[:-2]]  # the others may be above
        pool = (await cache.stats()).pools[0]
        num_loaded = pool.num_disk_hit_blocks - before
        return {
            "computed_ms": round(float(np.median(computed)) * 1e3, 1),
            "from_disk_ms": round(float(np.median(from_disk)) * 1e3, 1),
            "loaded_blocks_a_prompt": round(num_loaded / len(from_disk), 1),
            "block_KiB": pool.pool.block_bytes >> 10,
            "late_loads": pool.num_late_disk_loads,
        }


@asynccontextmanager
async def _services(folder: str) -> AsyncIterator[tuple[AsyncCacheClient, AsyncEngineClient]]:
    """Both services, with room for two of the prompts in the pool and for two in the host tier."""
    cache, engine = f"unix:{folder}/cache", f"unix:{folder}/engine"
    sizes = ("--num-pools", "1", "--num-blocks", "300", "--num-host-blocks", "300")
    disk = ("--disk-path", f"{folder}/disk", "--disk-memory", "2GiB")
    async with AsyncExitStack() as stack:
        flags = ("--listen", cache, "--runtime-dir", folder, *sizes, *disk)
        await stack.enter_async_context(process("-m", "kvkeeper.cache_service", *flags))
        of_engine = ("--listen", engine, "--cache", cache, "--model", f"{folder}/model", "--threads", "1")
        await stack.enter_async_context(process("-m", "kvkeeper.engine_service", *of_engine))
        clients = AsyncCacheClient(cache), AsyncEngineClient(engine)
        yield await stack.enter_async_context(clients[0]), await stack.enter_async_context(clients[1])
