"""Pools of several ranks: an arena of each, one attach of each rank's process, and the ends of those processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.memory.arena import ByteArray
from kvkeeper.cache_service.memory.device.cuda import CudaMemory
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.client import CallOptions
from kvkeeper.client.arena import Arena, attach_arena
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.common.service.memory_limit import OutOfMemory
from tests.support.processes.child_processes import Attached, Processes
from tests.support.stand_ins.fake_cuda import FakeCuda
from tests.support.worlds.cache_api import (
    BLOCK_BYTES,
    DEADLINE,
    Api,
    ManualClock,
    Session,
    commit_columns,
    int32s,
    le32,
    le64,
    refusal,
    refused,
    serving,
    spec_of,
)
from tests.support.worlds.memory_folder import memory_folder

NUM_RANKS = 2


def ranks(num_ranks: int = NUM_RANKS) -> pb.KvSpec:
    return spec_of(tensor_parallel_size=num_ranks)


def blocks_of(api: Api, rank: int) -> ByteArray:
    (pool,) = api.server.session_manager.registry.pools
    arena = pool.arenas[rank]
    assert isinstance(arena, SharedMemoryArena)
    return arena.blocks(pool.info.num_blocks, pool.info.block_bytes)


async def attach(processes: Processes, session: Session, rank: int) -> Attached:
    opened = session.opened
    child = await processes.start(opened.attach_socket_path, f"{opened.attach_token} memory rank:{rank}")
    await child.says("attached")
    return child


async def denied(processes: Processes, session: Session, words: str) -> str:
    child = await processes.start(session.opened.attach_socket_path, f"{session.opened.attach_token}{words}")
    _, error = await asyncio.wait_for(child.process.communicate(), DEADLINE)
    return error.decode().strip()


async def test_each_rank_has_an_arena_of_its_own(api: Api, processes: Processes) -> None:
    session = await api.open(spec=ranks())
    pool = session.opened.pool
    assert (pool.block_bytes, pool.arena_bytes, pool.spec.tensor_parallel_size) == (
        BLOCK_BYTES,
        pool.num_blocks * BLOCK_BYTES,
        NUM_RANKS,
    )
    for rank in (1, 0):  # in any order
        child = await attach(processes, session, rank)
        await child.tell(f"write {3 * BLOCK_BYTES + 5} {100 + rank}")
        await child.says("written")
    assert [int(blocks_of(api, rank)[3, 5]) for rank in range(NUM_RANKS)] == [100, 101]
    assert (await api.stats()).sessions[0].num_attached_processes == NUM_RANKS


async def test_pools_of_other_numbers_of_ranks_are_other_pools(api: Api) -> None:
    await api.open(spec=ranks(2))
    await api.open(spec=ranks(1))
    assert [pool.num_sessions for pool in (await api.stats()).pools] == [1, 1]


@pytest.mark.parametrize("rank", ["2", "64", "99999", "-1", "x", "", "1 "])
async def test_a_rank_that_is_none_of_the_pool_is_refused(api: Api, processes: Processes, rank: str) -> None:
    session = await api.open(spec=ranks())
    wanted = "UNKNOWN_PART" if rank.endswith(" ") else "UNKNOWN_RANK"
    assert await denied(processes, session, f" memory rank:{rank}") == f'{{"error": "{wanted}"}}'
    await attach(processes, session, 1)  # the token is not spent


async def test_a_token_is_good_once_for_each_rank(api: Api, processes: Processes) -> None:
    session = await api.open(spec=ranks())
    for rank in range(NUM_RANKS):
        await attach(processes, session, rank)
        assert await denied(processes, session, f" memory rank:{rank}") == '{"error": "UNKNOWN_TOKEN"}'


async def test_a_rank_of_a_pool_of_one_is_refused(api: Api, processes: Processes) -> None:
    session = await api.open()
    assert await denied(processes, session, " memory rank:1") == '{"error": "UNKNOWN_RANK"}'
    child = await attach(processes, session, 0)
    await child.tell("unmap")


async def test_the_first_rank_alone_gets_a_step_lane(api: Api, processes: Processes) -> None:
    session = await api.open(spec=ranks())
    assert await denied(processes, session, " memory step-lane rank:1") == '{"error": "UNKNOWN_PART"}'


async def test_a_session_ends_with_its_first_rank_and_its_quarantine_with_the_last(api: Api, processes: Processes) -> None:
    session = await api.open(spec=ranks())
    await session.create(1, 10)
    await api.raw_step(session.start_bytes(1, 1))
    first, second = await attach(processes, session, 0), await attach(processes, session, 1)
    second.process.kill()
    stats = await api.until(lambda stats: not stats.sessions)
    assert stats.num_reaped_sessions == 1
    await second.process.wait()
    assert (await api.stats()).pools[0].num_quarantined_blocks == 3, "the first rank may still write"
    await first.tell("unmap")
    await first.says("unmapped")
    await api.until(lambda stats: stats.pools[0].num_quarantined_blocks == 0)


async def test_a_pool_is_in_use_until_the_last_rank_has_unmapped(api: Api, processes: Processes) -> None:
    session = await api.open(spec=ranks())
    children = [await attach(processes, session, rank) for rank in range(NUM_RANKS)]
    (pool,) = api.server.session_manager.registry.pools
    await session.call("CloseSession", drained=True)
    for child in children:
        assert not pool.is_idle
        await child.tell("unmap")
        await child.says("unmapped")
        await api.stats()  # a turn of the service
    await api.until(lambda stats: pool.is_idle)


async def test_a_drained_close_ends_the_quarantine_of_all_ranks(api: Api, processes: Processes, clock: ManualClock) -> None:
    session = await api.open(spec=ranks())
    await session.create(1, 10)
    await api.raw_step(session.start_bytes(1, 1))
    for rank in range(NUM_RANKS):
        await attach(processes, session, rank)
    clock.advance(11)
    assert (await api.stats()).pools[0].num_quarantined_blocks == 3
    await session.call("CloseSession", drained=True)
    assert (await api.stats()).pools[0].num_quarantined_blocks == 0


async def test_copies_are_made_in_the_arenas_of_all_ranks(api: Api) -> None:
    session = await api.open(spec=ranks(), engine=False)
    await session.create(1, 6)
    answer = pb.StepResponse.FromString(await api.raw_step(session.start_bytes(1, 1)))
    table = int32s(answer.start_block_ids)
    for rank in range(NUM_RANKS):
        blocks_of(api, rank)[table[1]] = 10 + rank
    await session.step(
        2,
        **commit_columns(1, 6),
        fork_parent_ids=le64(1),
        fork_child_ids=le64(2),
        fork_num_tokens=le32(6),
    )
    answer = await session.step(3, reserve_sequence_ids=le64(2), reserve_min_tokens=le32(7), reserve_max_tokens=le32(7))
    (copy,) = set(int32s(answer.table_update_block_ids)) | set(int32s(answer.new_block_ids))
    assert [set(blocks_of(api, rank)[copy].tolist()) for rank in range(NUM_RANKS)] == [{10}, {11}]


@pytest.fixture
async def tiers() -> AsyncIterator[Api]:
    async with serving(num_blocks=9, num_host_blocks=13) as served:
        yield served
        await served.audit()


async def swapped(session: Session, api: Api) -> None:
    """A sequence of 10 tokens, swapped out by the service; its blocks held 10 and 11 on the two ranks.

    They are spoiled where they are free.
    """
    await session.create(1, 10)
    table = list((await session.call("ExtendSequence", sequence_id=1, num_tokens=10)).sequence.block_table)
    for rank in range(NUM_RANKS):
        blocks_of(api, rank)[table] = 10 + rank
    await session.call("CommitSequence", sequence_id=1, num_tokens=10, first_token_idx=10)
    await session.call("SwapOutSequence", sequence_id=1)
    (pool,) = api.server.session_manager.registry.pools
    free = [block for block in range(1, pool.info.num_blocks) if pool.manager.state.pool.state(block).value == "free"]
    for rank in range(NUM_RANKS):
        blocks_of(api, rank)[free] = 255


async def test_a_swap_moves_the_share_of_every_rank(tiers: Api) -> None:
    session = await tiers.open(spec=ranks(), engine=False)
    pool = session.opened.pool
    assert pool.host_arena_bytes == pool.num_host_blocks * NUM_RANKS * BLOCK_BYTES
    await swapped(session, tiers)
    back = list((await session.call("SwapInSequence", sequence_id=1)).sequence.block_table)
    assert [set(blocks_of(tiers, rank)[back].reshape(-1).tolist()) for rank in range(NUM_RANKS)] == [{10}, {11}]


async def test_a_rank_finds_its_share_of_the_host_tier_where_the_protocol_says(tiers: Api) -> None:
    session = await tiers.open(spec=ranks(), engine=False)
    await swapped(session, tiers)
    opened, pool = session.opened, session.opened.pool
    sizes = pool.arena_bytes, CallOptions().timeout_s, pool.host_arena_bytes
    arena = await in_thread(opened.attach_socket_path, opened.attach_token, *sizes, 1)
    shares = arena.host_array.reshape(-1, NUM_RANKS, BLOCK_BYTES)
    used = shares.any(axis=(1, 2))
    assert used.sum() == 3
    assert (shares[used, 0].max(), shares[used, 1].min()) == (10, 11)
    del shares
    arena.close()


async def in_thread(*arguments: object) -> Arena:
    return await asyncio.to_thread(attach_arena, *arguments)  # type: ignore[arg-type]


async def test_an_arena_for_each_device() -> None:
    """Rank r on the device r behind the configured one."""
    made: list[int] = []
    with_two = FakeCuda(Path("/nowhere"), "service", uuids=("ab" * 16, "cd" * 16))

    class Recorded(CudaMemory):
        def allocate(self, num_bytes: int, rank: int = 0) -> SharedMemoryArena:  # type: ignore[override]
            made.append(rank)
            return SharedMemoryArena(num_bytes)

    async with serving(num_blocks=9, memory=Recorded(with_two, 0)) as api:
        await api.open(spec=ranks())
    assert made == [0, 1]


async def test_more_ranks_than_devices_is_a_refusal(tmp_path: Path) -> None:
    async with serving(num_blocks=9, memory=CudaMemory(FakeCuda(tmp_path, "service"), 0)) as api:
        error = await refusal(api.open(spec=ranks()))
        assert error.reason == "OUT_OF_POOLS"
        assert "rank 1 is for device 1" in str(error)
        assert (await api.stats()).pools == []


async def test_no_memory_for_the_second_rank_gives_the_first_ones_back() -> None:
    made: list[SharedMemoryArena] = []

    class Short:
        def available_bytes(self) -> int:
            return 1 << 40

        def require(self, num_bytes: int, num_host_bytes: int) -> None: ...

        def allocate(self, num_bytes: int, rank: int = 0) -> SharedMemoryArena:
            if rank:
                raise OutOfMemory("a test")
            made.append(SharedMemoryArena(num_bytes))
            return made[-1]

        def allocate_host(self, num_bytes: int) -> SharedMemoryArena:
            raise AssertionError("there is none")

    async with serving(num_blocks=9, memory=Short()) as api:
        assert (await refusal(api.open(spec=ranks()))).reason == "OUT_OF_POOLS"
        assert not hasattr(made[0], "array")


async def test_what_is_not_served_for_several_ranks_says_so(api: Api) -> None:
    session = await api.open(spec=ranks(), engine=False)
    await session.create(1, 6)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=6)
    for call in (session.write_kv(1, 0, np.zeros((2, 2, 6, 3), np.float32)), session.read_kv(1)):
        await refused(call, "NOT_IMPLEMENTED", feature="tensor_parallel_size")
    with memory_folder() as folder:
        async with serving(memory_dir=folder, num_blocks=9) as kept:
            await refused(kept.open(spec=ranks()), "NOT_IMPLEMENTED", feature="tensor_parallel_size")


async def test_opaque_pages_are_of_each_rank(api: Api, processes: Processes) -> None:
    page = pb.PageLayout(page_bytes=64, digest="0" * 64)
    spec = pb.KvSpec(model_id="m", block_size=4, layout=pb.KV_LAYOUT_OPAQUE, page=page, tensor_parallel_size=2)
    session = await api.open(spec=spec)
    pool = session.opened.pool
    assert (pool.block_bytes, pool.arena_bytes) == (64, pool.num_blocks * 64)
    for rank in range(2):
        child = await attach(processes, session, rank)
        await child.tell(f"write {3 * 64 + 5} {100 + rank}")
        await child.says("written")
    assert [blocks_of(api, rank)[3, 5] for rank in range(2)] == [100, 101]


async def test_a_client_asks_for_its_rank(api: Api) -> None:
    session = await api.open(spec=ranks())
    opened = session.opened
    arguments = opened.attach_socket_path, opened.attach_token, opened.pool.arena_bytes, DEADLINE, 0
    arena = await in_thread(*arguments, 1)
    arena.array[7] = 9
    assert [int(blocks_of(api, rank).reshape(-1)[7]) for rank in range(NUM_RANKS)] == [0, 9]
    arena.close()
    with pytest.raises(KvkeeperError) as info:
        await in_thread(*arguments, 2)
    assert info.value.reason == "UNKNOWN_RANK"
