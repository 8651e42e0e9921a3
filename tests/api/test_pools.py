"""Pools by KV spec: which sessions share one, which pool makes room for another, and what fails for want of memory."""

import asyncio
import threading
import weakref
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.cache_service.rpc.convert.kv_spec import kv_spec_message
from kvkeeper.cache_service.runtime import pool_registry
from kvkeeper.common.service.memory_limit import OutOfMemory
from tests.support.worlds.cache_api import DEADLINE, Api, MemoryOf, blocks_of, refusal, refused, serving, spec_of


async def test_equal_specs_share_a_pool_and_others_do_not(api: Api) -> None:
    await api.open()
    await api.open(spec=spec_of(tensor_parallel_size=1))
    assert len((await api.stats()).pools) == 1
    await api.open(spec=spec_of(revision="other"))
    assert [pool.num_sessions for pool in (await api.stats()).pools] == [2, 1]


async def test_every_pool_in_use_is_a_refusal(api: Api) -> None:
    first = await api.open()
    await api.open(spec=spec_of(revision="b"))
    await refused(api.open(spec=spec_of(revision="c")), "OUT_OF_POOLS", flag="--num-pools")
    await first.call("CloseSession")
    await api.open(spec=spec_of(revision="c"))


async def test_the_least_recently_used_idle_pool_makes_room() -> None:
    made: list[SharedMemoryArena] = []

    def allocate(num_bytes: int) -> SharedMemoryArena:
        made.append(SharedMemoryArena(num_bytes))
        return made[-1]

    async with serving(memory=MemoryOf(allocate)) as api:
        for revision in ("a", "b", "a"):
            session = await api.open(spec=spec_of(revision=revision))
            pools = api.server.session_manager.registry.pools
            (pool,) = [pool for pool in pools if kv_spec_message(pool.info.spec).revision == revision]
            blocks_of(pool)[:] = 7
            await session.call("CloseSession")
        assert len(made) == 2
        await api.open(spec=spec_of(revision="c"))
        assert [pool.pool.spec.revision for pool in (await api.stats()).pools] == ["a", "c"]
        assert len(made) == 3  # never the old memory: a process may have kept it
        assert not made[-1].array.any()


async def test_a_quarantine_keeps_its_pool(api: Api) -> None:
    session = await api.open()
    (pool,) = api.server.session_manager.registry.pools
    pool.quarantines.add(session.opened.session_id)
    await session.call("CloseSession")
    await api.open(spec=spec_of(revision="b"))
    assert (await refusal(api.open(spec=spec_of(revision="c")))).reason == "OUT_OF_POOLS"
    pool.quarantines.clear()
    await api.open(spec=spec_of(revision="c"))


async def test_sessions_wait_for_the_memory_to_be_reserved() -> None:
    may_go_on = threading.Event()

    def allocate(num_bytes: int) -> SharedMemoryArena:
        assert may_go_on.wait(DEADLINE)
        return SharedMemoryArena(num_bytes)

    async with serving(num_blocks=4, memory=MemoryOf(allocate)) as api:
        opening = asyncio.ensure_future(api.open())
        await api.stats()
        assert not opening.done()
        may_go_on.set()
        await asyncio.wait_for(opening, DEADLINE)


async def test_a_cancelled_opening_leaves_nothing() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def allocate(num_bytes: int) -> SharedMemoryArena:
        begun.set()
        assert may_go_on.wait(DEADLINE)
        return SharedMemoryArena(num_bytes)

    async with serving(num_blocks=4, memory=MemoryOf(allocate)) as api:
        opening = asyncio.ensure_future(api.open())
        assert await asyncio.to_thread(begun.wait, DEADLINE)
        opening.cancel()
        await asyncio.wait({opening})
        await api.until(lambda _: not api.server.session_manager.registry._making.locked())  # the service knows
        may_go_on.set()
        await api.open()
        stats = await api.stats()
        assert (len(stats.pools), len(stats.sessions)) == (1, 1)


async def test_others_step_while_the_arrays_of_a_pool_are_made(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def make(*args: Any) -> PoolManager:
        begun.set()
        assert may_go_on.wait(DEADLINE)
        return PoolManager(*args)

    other = await api.open()
    monkeypatch.setattr(pool_registry, "PoolManager", make)
    opening = asyncio.ensure_future(api.open(spec=spec_of(revision="b")))
    assert await asyncio.to_thread(begun.wait, DEADLINE)
    await other.step(1)
    assert not opening.done()
    may_go_on.set()
    await asyncio.wait_for(opening, DEADLINE)


async def test_no_memory_for_a_pool_names_the_flag() -> None:
    def allocate(num_bytes: int) -> SharedMemoryArena:
        raise OutOfMemory(f"{num_bytes} bytes are wanted, 0 are available")

    async with serving(num_blocks=4, memory=MemoryOf(allocate)) as api:
        await refused(api.open(), "OUT_OF_POOLS", flag="--num-blocks")
        assert (await api.stats()).num_opened_sessions == 0


async def test_a_block_that_does_not_fit_names_the_flag(api: Api) -> None:
    await refused(api.open(spec=spec_of(num_layers=1024)), "OUT_OF_POOLS", flag="--pool-memory")


async def test_a_pool_larger_than_the_machine_is_refused() -> None:
    spec = spec_of(num_layers=1024, num_kv_heads=1024, head_dim=4096, block_size=1024)
    async with serving(num_blocks=1 << 20) as api:
        await refused(api.open(spec=spec), "OUT_OF_POOLS", flag="--num-blocks")
        await api.open(spec=spec_of(num_layers=1))


async def test_tiny_blocks_do_not_make_a_huge_core() -> None:
    spec = spec_of(num_layers=1, head_dim=1, block_size=1)
    async with serving(pool_memory=16 << 20, num_pools=1) as api:
        assert (await api.open(spec=spec)).opened.pool.num_blocks == 1 << 20


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layout": 3}, "groups"),  # KV_LAYOUT_GROUPED without any
        ({"layout": pb.KV_LAYOUT_OPAQUE}, "num_layers"),
    ],
)
async def test_a_layout_without_what_it_needs_is_refused(api: Api, changes: dict[str, object], field: str) -> None:
    await refused(api.open(spec=spec_of(**changes)), "INVALID_FIELD", field=f"spec.{field}")
    assert (await api.stats()).pools == []


async def test_a_pool_that_made_room_leaves_no_memory_behind() -> None:
    async with serving(num_pools=1) as api:
        session = await api.open()
        gone = weakref.ref(api.server.session_manager.registry.pools[0].manager.state)
        await session.call("CloseSession")
        await api.open(spec=spec_of(revision="b"))
        assert gone() is None
