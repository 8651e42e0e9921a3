"""Both Python clients against a real cache service: a sequence's life, shared memory, and answers lost on the way."""

import asyncio
import inspect
from typing import Any

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.server import RunningServer
from kvkeeper.client import AsyncCacheClient, AsyncCacheSession, CacheClient, CallOptions, KvkeeperError, KvTokens, StepItems
from tests.support.processes.cut_proxy import cutting
from tests.support.worlds.cache_api import failure

PROMPT = [5, 6, 7, 8, 9, 10]


def kv(num_tokens: int, first: int = 0) -> KvTokens:
    """K and V that differ at every place: [2 layers, num_tokens, 2 heads, 4]."""
    keys = np.arange(2 * 64 * 2 * 4, dtype=np.float32).reshape(2, 64, 2, 4)[:, first : first + num_tokens]
    return KvTokens(keys, -keys)


def assert_equal(ours: KvTokens, theirs: KvTokens) -> None:
    np.testing.assert_array_equal(ours.keys, theirs.keys)
    np.testing.assert_array_equal(ours.values, theirs.values)


async def settle(value: Any) -> Any:
    """The result of a call of either client."""
    return await value if inspect.isawaitable(value) else value


async def live(client: Any, spec: pb.KvSpec) -> None:
    """The life of a sequence and its fork, call by call; the synchronous client's calls run in this thread."""
    session = await settle(client.open_session(spec, client_name="test"))
    assert session.pool.block_size == 4
    created = await settle(session.create_sequence(1, PROMPT, max_tokens=20, priority=3))
    assert (created.num_matched_tokens, created.start_number) == (0, 1)
    extended = await settle(session.extend(1, 6))
    assert (extended.num_reserved_tokens, len(extended.block_table), extended.priority) == (6, 2, 3)
    assert (await settle(session.write_kv(1, 0, kv(6)))).num_bytes == 2 * kv(6).keys.nbytes
    assert (await settle(session.commit(1, 6))).num_committed_tokens == 6
    assert_equal(await settle(session.read_kv(1)), kv(6))
    assert_equal(await settle(session.read_kv(1, 2, 3, layers=[1])), KvTokens(kv(3, 2).keys[1:], kv(3, 2).values[1:]))

    child = await settle(session.fork(1, 2))
    assert list(child.block_table) == list(extended.block_table)
    await settle(session.extend(2, 7))
    await settle(session.write_kv(2, 6, kv(1, 6)))
    assert (await settle(session.commit(2, 7, 6, [11]))).num_tokens == 7
    assert_equal(await settle(session.read_kv(2)), kv(7))
    assert_equal(await settle(session.read_kv(1)), kv(6))
    assert list((await settle(session.get(2, include_tokens=True))).token_ids) == [*PROMPT, 11]

    assert [row.sequence_id for row in await settle(session.list())] == [1, 2]
    assert [row.sequence_id for row in await settle(client.list_sequences())] == [1, 2]
    assert (await settle(session.match_prefix(PROMPT))).num_matched_tokens == 4
    admission = await settle(session.check_admission(PROMPT, num_new_tokens=5))
    assert (admission.verdict, admission.num_hit_tokens) == (pb.ADMISSION_VERDICT_NOW, 4)
    assert (await settle(session.truncate(2, 4))).num_tokens == 4
    await settle(session.release(2))
    await settle(session.release(1))
    assert (await settle(session.renew())).ttl_ms > 0
    assert (await settle(session.explain_match(PROMPT))).end == pb.MATCH_END_PARTIAL_BLOCK
    assert (await settle(session.get_block(1))).state != pb.BLOCK_STATE_NULL
    num_blocks = session.pool.num_blocks
    assert (await settle(session.evict_blocks(num_blocks))).num_free_blocks == num_blocks - 1
    assert (await settle(session.clear_prefix_cache())).num_forgotten_blocks == 0
    assert (await settle(client.stats())).pools[0].num_forks == 1
    assert not (await settle(client.check_invariants())).violations
    assert (await settle(session.close())).num_released_sequences == 0
    with pytest.raises(KvkeeperError) as caught:
        await settle(session.get(1))
    assert caught.value.reason == "UNKNOWN_SESSION"


async def test_a_sequence_lives_through_the_asyncio_client(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    async with AsyncCacheClient(cache_server.address) as client:
        await live(client, spec)


async def test_a_sequence_lives_through_the_synchronous_client(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    with CacheClient(cache_server.address) as client:
        await asyncio.to_thread(lambda: asyncio.run(live(client, spec)))


async def test_the_arena_is_the_memory_that_the_service_writes(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    async with AsyncCacheClient(cache_server.address) as client, await client.open_session(spec) as session:
        arena = await session.attach()
        assert arena.array.nbytes == session.pool.arena_bytes
        await session.create_sequence(1, PROMPT)
        table = list((await session.extend(1, 6)).block_table)
        await session.write_kv(1, 0, kv(6))
        # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        blocks = arena.array.view(np.float32).reshape(-1, 2, 2, 4, 2, 4)
        for token_idx in range(6):
            block = blocks[table[token_idx // 4]]
            np.testing.assert_array_equal(block[:, 0, token_idx % 4], kv(6).keys[:, token_idx])
            np.testing.assert_array_equal(block[:, 1, token_idx % 4], kv(6).values[:, token_idx])
        assert (await client.stats()).sessions[0].num_attached_processes == 1
        del blocks, block
        with pytest.raises(KvkeeperError):
            await session.attach()  # a token is good for one attach
        arena.close()


async def test_steps_go_through_both_clients(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    async with AsyncCacheClient(cache_server.address) as client, await client.open_session(spec) as session:
        started = await start_one(session)
        assert (started.start_results.tolist(), started.start_reserved.tolist()) == ([pb.START_RESULT_STARTED], [6])
        assert len(started.start_block_ids) == 2
        answer = await session.step(grow(9))
        assert answer.reserve_reserved.tolist() == [9]
        assert (answer.new_block_item_idx.tolist(), len(answer.new_block_ids)) == ([0], 1)

    def steps() -> list[int]:
        with CacheClient(cache_server.address) as client, client.open_session(spec) as session:
            session.create_sequence(1, PROMPT)
            first = session.step(START)
            return [int(first.start_results[0]), *session.step(grow(9)).reserve_reserved.tolist()]

    assert await asyncio.to_thread(steps) == [pb.START_RESULT_STARTED, 9]


START = StepItems(
    start_ids=np.array([1], np.int64), start_max_new=np.array([6], np.int32), start_max_hit=np.array([6], np.int32)
)


async def start_one(session: AsyncCacheSession) -> Any:
    await session.create_sequence(1, PROMPT)
    return await session.step(START)


def grow(num_tokens: int) -> StepItems:
    length = np.array([num_tokens], np.int32)
    return StepItems(reserve_ids=np.array([1], np.int64), reserve_min=length, reserve_max=length)


async def test_a_step_that_lost_its_answer_is_applied_once(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    async with (
        cutting(cache_server.address) as proxy,
        AsyncCacheClient(cache_server.address) as watcher,
        AsyncCacheClient(proxy.address) as client,
        await client.open_session(spec) as session,
    ):
        await start_one(session)
        before = (await watcher.stats()).pools[0]
        proxy.is_holding = True
        step = asyncio.create_task(session.step(grow(9)))
        async with asyncio.timeout(5):
            while (await watcher.stats()).pools[0].num_steps == before.num_steps:
                assert not step.done()
        proxy.is_holding = False
        proxy.cut()
        answer = await step
        assert (answer.step_id, len(answer.new_block_ids)) == (2, 1)
        after = (await watcher.stats()).pools[0]
        assert (after.num_steps, after.num_referenced_blocks) == (before.num_steps + 1, 3)
        assert (await session.step(grow(10))).step_id == 3


async def test_a_step_after_the_session_is_gone_is_one_error(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    async with AsyncCacheClient(cache_server.address, CallOptions(timeout_s=5, retry_s=1)) as client:
        session = await client.open_session(spec)
        await start_one(session)
        await session.close()
        assert (await failure(session.step(grow(9)))).reason == "UNKNOWN_SESSION"


async def test_kv_of_another_shape_or_dtype_never_leaves(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    async with AsyncCacheClient(cache_server.address) as client, await client.open_session(spec) as session:
        for wrong in (kv(2).keys[:1], kv(2).keys.astype(np.float64), kv(2).keys[..., :3]):
            with pytest.raises(ValueError, match="K and V must be"):
                await session.write_kv(1, 0, KvTokens(wrong, wrong))


async def test_many_chunks_read_back_as_they_were_written(
    cache_server: RunningServer, spec: pb.KvSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeeper.client.kv_chunks._CHUNK_BYTES", 3 * 2 * 4 * 4)  # three tokens
    async with AsyncCacheClient(cache_server.address) as client, await client.open_session(spec) as session:
        await session.create_sequence(1, list(range(1, 12)))
        await session.extend(1, 11)
        assert (await session.write_kv(1, 0, kv(11))).num_chunks == 2 * 4
        await session.commit(1, 11)
        assert_equal(await session.read_kv(1), kv(11))


@pytest.mark.parametrize("wrong", [[1.5], [[1]], ["a"]], ids=["float", "nested", "text"])
async def test_token_ids_of_another_kind_never_leave(cache_server: RunningServer, spec: pb.KvSpec, wrong: Any) -> None:
    async with AsyncCacheClient(cache_server.address) as client, await client.open_session(spec) as session:
        with pytest.raises(TypeError, match="token ids"):
            await session.create_sequence(1, wrong)
        for outside in ([-1], [1 << 31]):
            with pytest.raises(ValueError, match="token ids"):
                await session.create_sequence(1, outside)


async def test_events_come_through_both_clients(cache_server: RunningServer, spec: pb.KvSpec) -> None:
    def kinds_until_stored() -> list[int]:
        with CacheClient(cache_server.address) as client, client.open_session(spec) as session:
            stream, kinds = session.watch_events(include_token_ids=True), []
            for event in stream:
                kinds.append(event.kind)
                if event.kind == pb.EVENT_KIND_SNAPSHOT_END:
                    session.create_sequence(1, PROMPT)
                    session.extend(1, 6)
                    session.commit(1, 6)
                elif event.kind == pb.EVENT_KIND_STORED:
                    assert event.token_ids == np.array(PROMPT[:4], "<i4").tobytes()
                    break
            stream.cancel()
            return kinds

    assert await asyncio.to_thread(kinds_until_stored) == [pb.EVENT_KIND_SNAPSHOT_END, pb.EVENT_KIND_STORED]
    async with AsyncCacheClient(cache_server.address) as client, await client.open_session(spec) as session:
        stream = session.watch_events(include_token_ids=True)
        first = await anext(stream)
        assert (first.kind, len(first.block_names), first.revision) == (pb.EVENT_KIND_SNAPSHOT, 1, 1)
        assert first.token_ids == np.array(PROMPT[:4], "<i4").tobytes()
        assert (await anext(stream)).kind == pb.EVENT_KIND_SNAPSHOT_END
        stream.cancel()
        short = session.watch_events(timeout_s=0.05)
        with pytest.raises(KvkeeperError) as caught:
            async for _ in short:
                pass
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
