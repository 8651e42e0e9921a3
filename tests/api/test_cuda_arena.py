"""A pool in CUDA memory, handed over by its handle; on a runtime of files, which keeps the rules of the real one."""

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.memory.device.cuda import CudaArena, CudaMemory
from kvkeeper.cache_service.server import start_server
from kvkeeper.client import AsyncCacheClient
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems
from kvkeeper.common.cuda import runtime
from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.handle import ArenaHandle, parse_handle
from kvkeeper.common.cuda.runtime import BoundRuntime
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.sizes import Share
from tests.support.stand_ins.fake_cuda import DEVICE, FakeCuda, bytes_at
from tests.support.worlds.cache_api import BLOCK_BYTES, SPEC, Api, ManualClock, Session, kv_of, read_all, refused, serving


@pytest.fixture
def service(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path, "service")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeCuda]:
    """The runtime of the process that this test is to be, beside the service's."""
    before, mine = runtime.cuda_runtime(), FakeCuda(tmp_path, "engine")
    runtime.use_runtime(mine)
    yield mine
    runtime.use_runtime(before)
    assert (mine.opened, mine.pinned) == ({}, set())  # after every test


@pytest.fixture
async def api(service: FakeCuda) -> AsyncIterator[Api]:
    async with serving(num_blocks=9, num_host_blocks=13, memory=CudaMemory(service, 0)) as served:
        yield served
        await served.audit()


@pytest.fixture
async def client(api: Api, engine: FakeCuda) -> AsyncIterator[AsyncCacheClient]:
    async with AsyncCacheClient(api.server.address) as made:
        yield made


async def opened(client: AsyncCacheClient) -> AsyncCacheSession:
    return await client.open_session(SPEC, executor=pb.EXECUTOR_ENGINE)


async def filled(session: Session, sequence_id: int, num_tokens: int) -> np.ndarray:
    content = kv_of(range(num_tokens), salt=sequence_id)
    await session.compute(sequence_id, num_tokens, content, first=100 * sequence_id)
    return content


async def test_both_ends_see_the_same_bytes(api: Api, client: AsyncCacheClient) -> None:
    session = await api.open(engine=False)
    content = await filled(session, 1, 10)
    table = (await session.call("GetSequence", sequence_id=1)).sequence.block_table
    mapped = await opened(client)
    assert mapped.pool.arena_kind == pb.ARENA_KIND_CUDA_IPC
    arena = await mapped.attach()
    shown = arena.device_bytes().__cuda_array_interface__
    assert shown["shape"] == (9 * BLOCK_BYTES,)
    pointer, is_read_only = shown["data"]  # type: ignore[misc]
    assert not is_read_only
    blocks = bytes_at(pointer, 9 * BLOCK_BYTES).view("<f4").reshape(9, SPEC.num_layers, 2, SPEC.block_size, -1)
    np.testing.assert_array_equal(blocks[table[2], :, :, :2], content[:, :, 8:])
    blocks[table[0]] += 1
    np.testing.assert_array_equal((await read_all(session, 1))[:, :, :4], content[:, :, :4] + 1)
    assert not blocks[0].any()  # all of it was zero
    with pytest.raises(ValueError, match="device_bytes"):
        _ = arena.array
    arena.close()


async def test_copies_and_swaps_of_clients_without_kernels_run_on_it(api: Api, service: FakeCuda) -> None:
    session = await api.open(engine=False)
    assert len(service.pinned) == 1  # the host tier, in the service
    content = await filled(session, 1, 6)
    await session.call("ForkSequence", parent_id=1, child_id=2, num_tokens=6)
    await session.call("ExtendSequence", sequence_id=2, num_tokens=7)
    await session.write_kv(2, 6, kv_of(range(1), salt=9))
    np.testing.assert_array_equal((await read_all(session, 2)), content)
    await session.call("SwapOutSequence", sequence_id=1)
    await session.call("ClearPrefixCache")
    await session.call("SwapInSequence", sequence_id=1)
    np.testing.assert_array_equal(await read_all(session, 1), content)
    (stats,) = (await api.stats()).pools
    assert stats.num_swap_ins == 1
    assert stats.num_copies_on_write > 0


async def test_it_stays_mapped_while_a_view_of_it_lives(api: Api, client: AsyncCacheClient, engine: FakeCuda) -> None:
    arena = await (await opened(client)).attach()
    view = arena.device_bytes()
    with pytest.raises(BufferError):
        arena.close()
    bytes_at(view.pointer, 1)[0] = 7
    assert len(engine.opened) == 1
    del view
    arena.close()
    arena.close()
    assert engine.opened == {}
    with pytest.raises(ValueError, match="closed"):
        arena.device_bytes()
    (pool,) = api.server.session_manager.registry.pools
    await api.until(lambda _: not pool.mappings)


async def test_a_process_maps_it_once_for_all_its_sessions(client: AsyncCacheClient, engine: FakeCuda) -> None:
    first, second = [await (await opened(client)).attach() for _ in range(2)]
    assert engine.num_opens == 1
    pointer = second.device_bytes().pointer
    assert first.device_bytes().pointer == pointer
    first.close()
    bytes_at(pointer, 1)[0] = 1
    second.close()
    third = await (await opened(client)).attach()
    assert engine.num_opens == 2
    third.close()


async def test_what_is_mapped_is_not_freed_and_outlives_the_service(service: FakeCuda, engine: FakeCuda) -> None:
    async with serving(num_blocks=9, memory=CudaMemory(service, 0)) as api:
        async with AsyncCacheClient(api.server.address) as client:
            arena = await (await opened(client)).attach()
            pointer = arena.device_bytes().pointer
    assert service.num_freed == 0
    bytes_at(pointer, 1)[0] = 5
    arena.close()
    async with serving(num_blocks=9, memory=CudaMemory(service, 0)) as api:
        await api.open()
    assert service.num_freed == 1


async def test_the_host_tier_is_pinned_where_that_works(client: AsyncCacheClient, engine: FakeCuda) -> None:
    arena = await (await opened(client)).attach()
    arena.pin_hosts()
    arena.pin_hosts()
    assert engine.pinned == {arena.host_array.ctypes.data}
    arena.close()
    engine.can_pin = False
    arena = await (await opened(client)).attach()
    arena.pin_hosts()
    assert arena.host_array.nbytes == 13 * BLOCK_BYTES
    arena.close()


async def test_the_host_tier_is_let_go_once_the_device_is_done(
    client: AsyncCacheClient, engine: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that were launched know its address alone."""
    arena = await (await opened(client)).attach()
    arena.pin_hosts()
    calls: list[str] = []

    def note(name: str, done: Callable[..., None]) -> Callable[..., None]:
        return lambda self, *args: calls.append(name) or done(self, *args)

    for name in ("synchronize", "unregister_host", "close"):
        monkeypatch.setattr(FakeCuda, name, note(name, getattr(FakeCuda, name)))
    arena.close()
    assert calls[:2] == ["synchronize", "unregister_host"]
    assert calls[-1] == "close"


async def test_a_process_without_the_device_is_told(api: Api, client: AsyncCacheClient, engine: FakeCuda) -> None:
    engine.uuids = ("cd" * 16,)
    session = await opened(client)
    with pytest.raises(KvkeeperError, match="not visible") as refused:
        await session.attach()
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    (pool,) = api.server.session_manager.registry.pools
    await api.until(lambda _: not pool.mappings)


async def test_no_room_on_the_device_names_the_flag(service: FakeCuda, tmp_path: Path) -> None:
    service.capacity = 1 << 20
    async with serving(num_blocks=1 << 15, memory=CudaMemory(service, 0)) as api:
        await refused(api.open(), "OUT_OF_POOLS", flag="--num-blocks")
    config = CacheConfig(listen=f"unix:{tmp_path}/s", runtime_dir=tmp_path / "run", pool_memory=8 << 20, device_wait=0.0)
    with pytest.raises(StartError, match=r"--pool-memory 8 MiB .* available on the device"):
        await start_server(config, memory=CudaMemory(service, 0))


async def test_pools_take_a_share_of_what_is_free_on_the_device(service: FakeCuda) -> None:
    service.capacity = (64 + 40) << 20
    async with serving(memory=CudaMemory(service, 0), pool_memory=Share(80)) as api:
        await api.open()
        assert [num_bytes for _, _, num_bytes in service.made.values()] == [16 << 20, 16 << 20]


async def test_a_device_that_is_not_there_stops_the_start(engine: FakeCuda, tmp_path: Path) -> None:
    config = CacheConfig(listen=f"unix:{tmp_path}/s", runtime_dir=tmp_path / "run", device="cuda:1")
    with pytest.raises(StartError, match=r"--device cuda:1: .*1 CUDA devices are visible"):
        await start_server(config)


def test_the_real_runtime_fails_by_name_where_there_is_no_device() -> None:
    with pytest.raises(CudaError, match=r"cuda-bindings is not installed|cudaGetDeviceCount: cudaError"):
        BoundRuntime().device_uuids()


HANDLE = ArenaHandle(DEVICE, b"s" * 64, 512, 4096, 3)


def test_a_handle_crosses_as_json_and_shows_itself_nowhere_else() -> None:
    assert parse_handle(json.loads(json.dumps(HANDLE.as_fields()))) == HANDLE
    assert b"s".hex() * 8 not in repr(HANDLE)


@pytest.mark.parametrize(
    "change",
    [
        {"device_uuid": "AB" * 16},
        {"device_uuid": 3},
        {"ipc_handle": "00" * 63},
        {"ipc_handle": "0g" * 64},
        {"offset": -1},
        {"num_bytes": True},
        {"num_bytes": 1.5},
        {"generation": 1 << 62},
        {"offset": None},
    ],
)
def test_anything_else_is_no_handle(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        parse_handle(HANDLE.as_fields() | change)


async def test_errors_of_the_handover_tell_no_handle(client: AsyncCacheClient, service: FakeCuda) -> None:
    session = await opened(client)
    for path, _, _ in service.made.values():
        path.rename(path.with_name("gone"))
    with pytest.raises(KvkeeperError) as refused:
        await session.attach()
    assert "cudaErrorInvalidResourceHandle" in str(refused.value)
    assert b"service-0".hex() not in str(refused.value)
    for path, _, _ in service.made.values():
        path.with_name("gone").rename(path)


async def test_a_device_is_found_by_its_uuid_whatever_its_index(service: FakeCuda, engine: FakeCuda) -> None:
    other = "cd" * 16
    service.uuids, engine.uuids = (other, DEVICE), (other, "ef" * 16, DEVICE)  # as under another CUDA_VISIBLE_DEVICES
    async with serving(num_blocks=9, memory=CudaMemory(service, 1)) as api, AsyncCacheClient(api.server.address) as client:
        arena = await (await opened(client)).attach()
        assert arena.device_bytes().device == 2
        arena.close()


async def test_a_start_waits_for_memory_that_an_earlier_run_still_has(
    service: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeeper.cache_service.runtime.arena_supply._LOOK_AGAIN", 0)
    free, looks = service.free_bytes, []

    def free_bytes(device: int) -> int:
        looks.append(device)
        return 0 if len(looks) < 4 else free(device)

    monkeypatch.setattr(FakeCuda, "free_bytes", lambda self, device: free_bytes(device))
    with structlog.testing.capture_logs() as logs:
        async with serving(memory=CudaMemory(service, 0), pool_memory=8 << 20, num_pools=1, device_wait=60.0) as api:
            await api.open()
    assert len(looks) >= 4
    assert [line["seconds"] for line in logs if line["event"] == "waiting_for_device_memory"] == [60.0]


async def test_a_start_does_not_wait_for_memory_of_the_host(service: FakeCuda, tmp_path: Path) -> None:
    config = CacheConfig(
        listen=f"unix:{tmp_path}/s", runtime_dir=tmp_path / "run", pool_memory=8 << 20, host_memory=1 << 46, device_wait=60.0
    )
    with pytest.raises(StartError, match="lower one"):
        await start_server(config, memory=CudaMemory(service, 0))


async def test_blocks_of_a_process_that_ended_on_a_device_stay_out_of_use_for_a_while(
    service: FakeCuda, engine: FakeCuda
) -> None:
    clock = ManualClock()
    async with serving(num_blocks=9, quarantine_quiet=2.0, clock=clock, memory=CudaMemory(service, 0)) as api:
        async with AsyncCacheClient(api.server.address) as client:
            session = await client.open_session(SPEC, executor=pb.EXECUTOR_ENGINE, ttl_ms=500)
            arena = await session.attach()
            await session.create_sequence(1, np.arange(6, dtype=np.int32))
            six = np.array([6], np.int32)
            await session.step(StepItems(start_ids=np.array([1]), start_max_new=six, start_max_hit=six))
            (pool,) = api.server.session_manager.registry.pools
            arena.close()  # and no word more, as of a process that was killed
            await api.until(lambda _: not pool.mappings)
            clock.advance(0.6)
            assert not pool.sessions
            assert pool.manager.queries.stats().num_quarantined_blocks == 2
            clock.advance(1.3)
            assert pool.manager.queries.stats().num_quarantined_blocks == 2
            assert not pool.is_idle
            clock.advance(0.2)
            assert pool.manager.queries.stats().num_quarantined_blocks == 0
            assert pool.is_idle


async def test_copies_on_a_device_run_beside_the_loop(api: Api, service: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    copy = CudaArena.copy

    def note(self: CudaArena, copies: Copies, *args: Any) -> None:
        if len(copies):
            threads.append(threading.current_thread().name)
        copy(self, copies, *args)

    monkeypatch.setattr(CudaArena, "copy", note)
    session = await api.open(engine=False)
    content = await filled(session, 1, 6)
    await session.call("ForkSequence", parent_id=1, child_id=2, num_tokens=6)
    await session.call("ExtendSequence", sequence_id=2, num_tokens=7)
    np.testing.assert_array_equal(await read_all(session, 2), content)
    assert threads
    assert threading.main_thread().name not in threads
