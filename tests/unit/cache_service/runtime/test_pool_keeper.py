"""When rows are written: after a moment, beside digests in a thread, and never while the service copies blocks."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import structlog

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kept_index import UInt64Array
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Int32Array, Tier
from kvkeeper.cache_service.memory.kept import index_file
from kvkeeper.cache_service.memory.kept.kept_pool import BlockDigests, KeptPool
from kvkeeper.cache_service.memory.kept.memory_directory import MemoryDirectory
from kvkeeper.cache_service.runtime import pool_keeper
from kvkeeper.cache_service.runtime.pool_keeper import PoolKeeper
from tests.support.worlds.core_pool import int32
from tests.support.worlds.memory_folder import SPEC, memory_folder


@dataclass(slots=True)
class Kept:
    """A pool in a folder. Digests are made when `may_digest` is set."""

    manager: PoolManager
    files: KeptPool
    may_digest: threading.Event

    def publish(self, *blocks: int, tokens: int) -> None:
        index = self.manager.state.index
        ids = np.full(len(blocks) * SPEC.block_size, tokens, np.int32)
        index.insert_run(index.root(""), ids, int32(blocks))

    @property
    def written(self) -> list[int]:
        return np.flatnonzero(self.files.device.index.table.checks).tolist()


class SlowDigests(BlockDigests):
    """Made when a test says so. threads: that have made some; begun: one is at it."""

    def __init__(self, kept: KeptPool, may_digest: threading.Event) -> None:
        super().__init__(kept)
        self.threads: list[str] = []
        self.begun = threading.Event()
        self._may_digest = may_digest

    def of(self, tier: Tier, blocks: Int32Array) -> UInt64Array:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self._may_digest.wait(10)
        return super().of(tier, blocks)


@pytest.fixture
def kept() -> Iterator[Kept]:
    with memory_folder() as folder:
        yield _kept(folder)


def _kept(folder: Path) -> Kept:
    directory = MemoryDirectory(folder, keep=True)
    files = directory.make_pool(directory.allocate(16 * SPEC.block_bytes), SPEC, 16)
    return Kept(PoolManager(PoolConfig(16, SPEC.block_size)), files, threading.Event())


async def test_few_bytes_are_digested_at_once_and_many_in_a_thread(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.may_digest.set()
    digests = SlowDigests(kept.files, kept.may_digest)
    keeper = PoolKeeper(kept.manager, kept.files, digests)
    await keeper.start()
    kept.publish(1, 2, tokens=7)
    await keeper.written()
    assert set(digests.threads) == {threading.current_thread().name}
    assert kept.written == [1, 2]
    digests.threads.clear()
    monkeypatch.setattr(pool_keeper, "_INLINE_BYTES", SPEC.block_bytes)
    kept.publish(3, 4, tokens=8)
    await keeper.written()
    assert kept.written == [1, 2, 3, 4]
    assert threading.current_thread().name not in digests.threads[:1]
    wanted = BlockDigests(kept.files).of(Tier.DEVICE, int32([1, 2, 3, 4]))
    rows = kept.manager.state.index.record.device.table.read()  # type: ignore[union-attr]
    assert rows.digests.tolist() == wanted.tolist()
    keeper.close(remove=True)


async def test_a_block_that_loses_its_node_while_it_is_digested_gets_no_row(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_keeper, "_INLINE_BYTES", 0)
    digests = SlowDigests(kept.files, kept.may_digest)
    keeper = PoolKeeper(kept.manager, kept.files, digests)
    await keeper.start()
    kept.publish(1, tokens=7)
    kept.publish(2, tokens=8)
    written = asyncio.create_task(keeper.written())
    assert await asyncio.to_thread(digests.begun.wait, 10)
    kept.manager.state.index.forget_blocks(int32([2]))
    kept.publish(3, tokens=9)  # it begins to lack something while a thread is running
    assert kept.written == []
    kept.may_digest.set()
    await written
    assert kept.written == [1, 3]
    keeper.close(remove=True)


async def test_the_end_of_the_service_writes_what_is_being_digested(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_keeper, "_INLINE_BYTES", 0)
    keeper = PoolKeeper(kept.manager, kept.files, SlowDigests(kept.files, kept.may_digest))
    await keeper.start()
    kept.publish(1, 2, tokens=7)
    keeper._write_some()
    await asyncio.sleep(0)
    assert kept.written == []
    kept.may_digest.set()
    keeper.write_all()
    assert kept.written == [1, 2]
    keeper.close(remove=False)


async def test_nothing_is_written_while_blocks_are_copied(kept: Kept) -> None:
    """What the index has may be what the copies fill."""
    keeper = PoolKeeper(kept.manager, kept.files)
    await keeper.start()
    done = asyncio.Event()

    async def copy() -> None:
        await done.wait()

    copying = asyncio.create_task(copy())
    keeper.copying = lambda: None if copying.done() else copying
    kept.publish(1, tokens=7)
    keeper._write_some()
    keeper.write_all()
    written = asyncio.create_task(keeper.written())
    for _ in range(10):
        await asyncio.sleep(0)
    assert kept.written == [] and not written.done()
    done.set()
    await written
    assert kept.written == [1]
    keeper.close(remove=True)


async def test_a_tenant_that_finds_no_room_for_its_name_is_told_and_stored_once_there_is_some(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real, are_stored = index_file.RootLog.store, asyncio.Event()

    def store(names: index_file.RootLog) -> None:
        real(names)
        if not names.num_unstored:
            are_stored.set()

    monkeypatch.setattr(index_file.RootLog, "store", store)
    monkeypatch.setattr(pool_keeper, "_NAMES_AFTER", 0.001)
    keeper = PoolKeeper(kept.manager, kept.files)
    await keeper.start()
    index = kept.files.device.index
    with structlog.testing.capture_logs() as logs:
        with monkeypatch.context() as patch:
            patch.setattr(index_file.os, "pwrite", no_room)
            kept.publish(1, 2, tokens=7)
            kept.manager.state.index.root("secret")
            assert index.num_unstored == 2
        await asyncio.wait_for(are_stored.wait(), 10)
    assert [(line["event"], line["log_level"]) for line in logs] == [("tenant_not_kept", "warning"), ("tenants_kept", "info")]
    assert "secret" not in str(logs)
    keeper.close(remove=True)
