"""Real processes that map the arena: their death, their silence, and what they may still write meanwhile."""

import asyncio
import signal

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient
from tests.support.processes.child_processes import Processes
from tests.support.worlds.cache_api import (
    BLOCK_BYTES,
    DEADLINE,
    SPEC,
    Api,
    ManualClock,
    blocks_of,
    int32s,
    kv_of,
    refused,
)  # fmt: skip


async def test_the_memory_is_shared(api: Api, processes: Processes) -> None:
    session = await api.open()
    child = await processes.attach(session)
    assert (await api.stats()).sessions[0].num_attached_processes == 1
    await child.tell(f"write {3 * BLOCK_BYTES + 5} 200")
    await child.says("written")
    (pool,) = api.server.session_manager.registry.pools
    assert blocks_of(pool)[3, 5] == 200


async def test_a_killed_process_loses_its_session_and_leaves_a_warm_cache(api: Api, processes: Processes) -> None:
    session = await api.open()
    await session.prefill(1, 10, num_committed=8)
    child = await processes.attach(session)
    child.process.kill()
    stats = await api.until(lambda stats: not stats.sessions)
    assert stats.num_reaped_sessions == 1
    stats = await api.until(lambda stats: stats.pools[0].num_quarantined_blocks == 0)
    (pool,) = stats.pools
    assert (pool.num_running_sequences, pool.num_referenced_blocks, pool.num_cached_blocks) == (0, 0, 2)
    follower = await api.open()
    assert await follower.create(1, 10) == 8


async def test_a_killed_process_ends_its_open_stream(api: Api, processes: Processes) -> None:
    session = await api.open()
    stream = api.raw_stream()
    await stream.write(session.step_bytes(1))
    await stream.read()
    child = await processes.attach(session)
    child.process.kill()
    await asyncio.wait_for(api.server.session_manager.no_session.wait(), DEADLINE)
    stream.cancel()


async def test_a_stopped_process_keeps_its_blocks_in_quarantine(api: Api, processes: Processes, clock: ManualClock) -> None:
    session = await api.open()
    table = await session.prefill(1, 10, num_committed=8)
    child = await processes.attach(session)
    child.process.send_signal(signal.SIGSTOP)
    clock.advance(11)
    stats = await api.stats()
    assert (len(stats.sessions), stats.pools[0].num_quarantined_blocks) == (0, 1)
    # All the rest of the pool is granted to another session; the block that may still be written is not.
    follower = await api.open()
    num_free = stats.pools[0].num_free_blocks + stats.pools[0].num_cached_blocks
    await follower.create(5, 4 * num_free, first=1000)
    raw = await api.raw_step(follower.start_bytes(1, 5))
    granted = int32s(pb.StepResponse.FromString(raw).start_block_ids)
    assert len(granted) == num_free
    assert table[2] not in granted
    child.process.kill()
    stats = await api.until(lambda stats: stats.pools[0].num_quarantined_blocks == 0)
    assert stats.pools[0].num_free_blocks == 1


async def test_a_drained_close_ends_the_quarantine(api: Api, processes: Processes, clock: ManualClock) -> None:
    session = await api.open()
    await session.prefill(1, 10, num_committed=8)
    await processes.attach(session)
    clock.advance(11)
    assert (await api.stats()).pools[0].num_quarantined_blocks == 1
    await session.call("CloseSession", drained=True)
    assert (await api.stats()).pools[0].num_quarantined_blocks == 0
    await session.call("CloseSession", drained=True)


async def test_closing_without_draining_quarantines(api: Api, processes: Processes) -> None:
    session = await api.open()
    await session.prefill(1, 10, num_committed=8)
    child = await processes.attach(session)
    answer = await session.call("CloseSession")
    assert (answer.num_released_sequences, answer.num_quarantined_blocks) == (1, 1)
    await child.tell("unmap")
    await child.says("unmapped")
    await api.until(lambda stats: stats.pools[0].num_quarantined_blocks == 0)
    assert (await api.stats()).num_reaped_sessions == 0


async def test_closing_drained_quarantines_nothing(api: Api, processes: Processes) -> None:
    session = await api.open()
    await session.prefill(1, 10, num_committed=8)
    await processes.attach(session)
    assert (await session.call("CloseSession", drained=True)).num_quarantined_blocks == 0


async def test_a_session_outlives_its_mapping(api: Api, processes: Processes) -> None:
    session = await api.open()
    await session.prefill(1, 10, num_committed=8)
    child = await processes.attach(session)
    await child.tell("unmap")
    await child.says("unmapped")
    await api.until(lambda stats: stats.sessions[0].num_attached_processes == 0)
    await session.step(3)
    child.process.kill()
    await asyncio.wait_for(api.server.session_manager.no_session.wait(), DEADLINE)  # its process is still what drives it
    assert (await api.stats()).pools[0].num_quarantined_blocks == 0


@pytest.mark.parametrize(
    ("why", "reason"), [("spent", "UNKNOWN_TOKEN"), ("over", "UNKNOWN_TOKEN"), ("a long lease", "LEASE_TOO_LONG")]
)
async def test_a_token_is_good_for_one_attach_of_a_live_session_of_a_short_lease(
    api: Api, processes: Processes, why: str, reason: str
) -> None:
    session = await api.open(ttl_ms=60_001 if why == "a long lease" else 60_000)
    if why == "spent":
        await processes.attach(session)
    elif why == "over":
        await session.call("CloseSession")
    child = await processes.start(session.opened.attach_socket_path, session.opened.attach_token)
    _, error = await child.process.communicate()
    assert error.decode().strip() == f'{{"error": "{reason}"}}'


async def test_a_session_with_read_only_memory_reads_in_place_and_writes_nothing(api: Api, processes: Processes) -> None:
    writer = await api.open(engine=False)
    written = kv_of(range(10), salt=3)
    await writer.compute(1, 10, written)
    async with AsyncCacheClient(api.server.address) as client:
        session = await client.open_session(SPEC, read_only_memory=True)
        arena = await session.attach()
        (pool,) = api.server.session_manager.registry.pools
        np.testing.assert_array_equal(arena.array, blocks_of(pool).reshape(-1))
        assert arena.array.any()
        with pytest.raises(ValueError, match="read-only"):
            arena.array[0] = 1
        assert (await api.stats()).sessions[1].num_attached_processes == 1
        assert (await session.close(drained=False)).num_quarantined_blocks == 0, "it wrote nothing, so nothing waits for it"
        arena.close()


async def test_read_only_memory_cannot_be_mapped_to_write(api: Api, processes: Processes) -> None:
    session = await api.open(engine=False, read_only_memory=True)
    child = await processes.start(session.opened.attach_socket_path, session.opened.attach_token)
    _, error = await child.process.communicate()
    assert "Permission denied" in error.decode()
    assert child.process.returncode == 1


async def test_an_engine_has_no_read_only_memory(api: Api) -> None:
    await refused(api.open(read_only_memory=True), "INVALID_FIELD", field="read_only_memory")
    assert (await api.stats()).num_opened_sessions == 0
