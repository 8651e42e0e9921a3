"""Pools that cannot be made, and pools that make room: nothing stays open or in use, and no other pool waits.

And what the garbage collector is told of pools.
"""

import asyncio
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvkeeper.cache_service import __main__ as command
from kvkeeper.cache_service import server
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.core.values.errors import OutOfPools
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.memory.disk.disk_directory import DiskDirectory
from kvkeeper.cache_service.memory.disk.slab import Slab
from kvkeeper.cache_service.memory.kept.kept_pool import KeptPool
from kvkeeper.cache_service.memory.kept.memory_directory import MemoryDirectory
from kvkeeper.cache_service.memory.remote.remote_store import RemoteStore
from kvkeeper.cache_service.memory.shared_memory import SharedMemory
from kvkeeper.cache_service.runtime.pool_registry import PoolRegistry
from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.threads import NoThread
from tests.support.worlds.memory_folder import SPEC, memory_folder


async def test_a_pool_that_cannot_be_kept_leaves_no_slab_in_use_and_no_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def remote(_: KvSpec) -> RemoteStore:
        return cast(RemoteStore, SimpleNamespace(name_key=b"key", close=lambda: closed.append("store")))

    def refuse(*_: object) -> None:
        raise OutOfMemory("no memory")

    with memory_folder() as folder:
        disks, directory = DiskDirectory(tmp_path / "disk", 1 << 20, 1), MemoryDirectory(folder, keep=True)
        config = CacheConfig(num_blocks=16, num_host_blocks=16, num_pools=1)
        registry = PoolRegistry(config, SharedMemory(), lambda _: None, directory, disks, remote=remote)
        await registry.reserve()
        monkeypatch.setattr(MemoryDirectory, "make_pool", refuse)
        real = Slab.close

        def close(slab: Slab) -> None:
            closed.append("slab")
            real(slab)

        monkeypatch.setattr(Slab, "close", close)
        with pytest.raises(OutOfPools):
            await registry.obtain(SPEC)
        assert sorted(closed) == ["slab", "store"]
        assert not disks._in_use
        registry.close()
        directory.close()
        disks.close()


async def test_a_pool_that_finds_no_thread_at_any_step_leaves_nothing_and_the_next_attempt_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    run, num_before_refusal, num_refused = loop.run_in_executor, [10**9], 0

    def run_in_executor(executor: Any, function: Any, *args: Any) -> Any:
        if num_before_refusal[0] == 0:
            raise RuntimeError("can't start new thread")
        num_before_refusal[0] -= 1
        return run(executor, function, *args)

    def left() -> tuple[int, list[str], list[str]]:
        gc.collect()
        files = sorted(path.name[:5] for path in folder.iterdir())
        return len(os.listdir("/proc/self/fd")), files, sorted(path.name[:5] for path in (tmp_path / "disk").iterdir())

    monkeypatch.setattr(loop, "run_in_executor", run_in_executor)
    with memory_folder() as folder:
        disks, directory = DiskDirectory(tmp_path / "disk", 1 << 20, 1), MemoryDirectory(folder, keep=True)
        config = CacheConfig(num_blocks=16, num_host_blocks=16, num_pools=1)
        registry = PoolRegistry(config, SharedMemory(), lambda _: None, directory, disks)
        await registry.reserve()
        slab = await asyncio.to_thread(disks.obtain, SPEC)  # it is made once, and stays
        slab.close()
        disks.give_back(slab)
        before = left()
        while True:
            num_before_refusal[0] = num_refused
            loop.set_default_executor(executor := ThreadPoolExecutor())
            try:
                pool = await registry.obtain(SPEC)
                break
            except NoThread:
                num_refused += 1
            executor.shutdown()
            await asyncio.sleep(0)  # neither a thread, nor a traceback, nor the loop holds anything now
            assert (left(), disks._in_use, registry.pools) == (before, set(), [])
        num_before_refusal[0] = 10**9
        assert num_refused >= 6, "the core, both arenas, the slab and its rows, the files, the index"
        assert await registry.obtain(SPEC) is pool
        registry.close()
        directory.close()
        disks.close()


async def test_a_server_that_hangs_holds_up_a_pool_that_makes_room_but_not_the_loop() -> None:
    loop, is_closing, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    ended_in_time: list[bool] = []

    def close() -> None:
        loop.call_soon_threadsafe(is_closing.set)
        ended_in_time.append(may_end.wait(5))

    def remote(_: KvSpec) -> RemoteStore:
        return cast(RemoteStore, SimpleNamespace(name_key=b"key", facts={}, close=close))

    config = CacheConfig(num_blocks=16, num_host_blocks=16, num_pools=1)
    registry = PoolRegistry(config, SharedMemory(), lambda _: None, remote=remote)
    await registry.reserve()
    await registry.obtain(SPEC)
    other = asyncio.create_task(registry.obtain(replace(SPEC, key=b"other")))
    await is_closing.wait()
    may_end.set()  # by the loop, which goes on
    await other
    assert ended_in_time == [True]
    registry.close()


async def test_the_pools_of_before_are_opened_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, is_opening, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    ended_in_time: list[bool] = []

    def open_pools(_: MemoryDirectory) -> list[KeptPool]:
        loop.call_soon_threadsafe(is_opening.set)
        ended_in_time.append(may_end.wait(5))
        return []

    monkeypatch.setattr(MemoryDirectory, "open_pools", open_pools)
    with memory_folder() as folder:
        directory = MemoryDirectory(folder, keep=True)
        config = CacheConfig(num_blocks=16, num_pools=1)
        registry = PoolRegistry(config, SharedMemory(), lambda _: None, directory)
        reserving = asyncio.create_task(registry.reserve())
        await is_opening.wait()
        may_end.set()  # by the loop, which goes on
        await reserving
        assert ended_in_time == [True]
        registry.close()
        directory.close()


@pytest.mark.parametrize("owns_process", [True, False])
async def test_the_collector_is_told_that_a_pool_stays_where_the_process_is_the_services_alone(owns_process: bool) -> None:
    class Other:
        """What another part of the process has made."""

    config = CacheConfig(num_blocks=16, num_pools=1)
    registry = PoolRegistry(config, SharedMemory(), lambda _: None, owns_process=owns_process)
    await registry.reserve()
    other = Other()
    other.own = other  # type: ignore[attr-defined]  # only the collector ends it
    alive = weakref.ref(other)
    await registry.obtain(SPEC)
    del other
    try:
        gc.collect()
        assert (alive() is not None) == owns_process
        await registry.obtain(replace(SPEC, key=b"other"))  # the pool before makes room, and is to be collected
        assert gc.get_freeze_count() > 0
        assert alive() is None
    finally:
        registry.close()
        if owns_process:
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # for the tests behind this one, what all of them have imported


async def test_the_command_has_its_process_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}

    async def start(config: CacheConfig, **options: object) -> None:
        told.update(options)
        raise StartError("it was asked")

    monkeypatch.setattr(server, "start_server", start)
    with pytest.raises(StartError):
        await command._serve(CacheConfig())
    assert told == {"owns_process": True}
