"""The host tier of a live service: bytes of swapped sequences and demoted blocks, through the arenas and the wire."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.runtime import pool as running_pool
from kvkeeper.client import AsyncCacheClient
from tests.support.worlds.cache_api import (
    BLOCK_BYTES,
    SPEC,
    Api,
    Session,
    blocks_of,
    commit_columns,
    int32s,
    kv_of,
    le64,
    read_all,
    refusal,
    refused,
    serving,
)


@pytest.fixture
async def tiers() -> AsyncIterator[Api]:
    """8 blocks that can be used on the device, 12 in the host tier."""
    async with serving(num_blocks=9, num_host_blocks=13) as served:
        yield served
        await served.audit()


async def computed(session: Session, sequence_id: int, num_tokens: int, *, salt: int = 0) -> np.ndarray:
    """A sequence of the one-item calls; returns its K and V."""
    content = kv_of(range(num_tokens), salt=salt)
    await session.compute(sequence_id, num_tokens, content, first=100 * sequence_id)
    return content


def spoil(api: Api) -> None:
    """Overwrites every free block on the device."""
    (pool,) = api.server.session_manager.registry.pools
    for block in range(1, pool.info.num_blocks):
        if pool.manager.state.pool.state(block).value == "free":
            blocks_of(pool)[block] = 255


async def test_a_swapped_sequence_comes_back_to_the_byte(tiers: Api) -> None:
    session = await tiers.open(engine=False)
    content = await computed(session, 1, 10, salt=3)
    out = (await session.call("SwapOutSequence", sequence_id=1)).sequence
    assert (out.state, out.num_host_blocks, list(out.block_table)) == (pb.SEQUENCE_STATE_SWAPPED, 3, [])
    again = (await session.call("SwapOutSequence", sequence_id=1)).sequence
    assert (again.state, again.num_host_blocks) == (out.state, 3)
    await session.call("ClearPrefixCache")
    spoil(tiers)
    await refused(read_all(session, 1), "WRONG_STATE", state="SWAPPED")
    assert (await refusal(session.write_kv(1, 9, kv_of(range(1))))).reason == "WRONG_STATE"
    assert (await refusal(session.call("ExtendSequence", sequence_id=1, num_tokens=12))).reason == "WRONG_STATE"
    back = (await session.call("SwapInSequence", sequence_id=1)).sequence
    assert (back.state, back.num_host_blocks, len(back.block_table)) == (pb.SEQUENCE_STATE_RUNNING, 0, 3)
    again = (await session.call("SwapInSequence", sequence_id=1)).sequence
    assert (again.state, again.block_table) == (back.state, back.block_table)
    np.testing.assert_array_equal(await read_all(session, 1), content)
    (stats,) = (await tiers.stats()).pools
    assert (stats.num_swap_outs, stats.num_swap_ins, stats.num_transfers) == (1, 1, 6)
    assert (stats.pool.num_host_blocks, stats.pool.host_arena_bytes) == (13, 13 * BLOCK_BYTES)


async def test_what_is_evicted_serves_a_hit_from_the_host_tier(tiers: Api) -> None:
    session = await tiers.open(engine=False)
    content = await computed(session, 1, 12, salt=5)
    await session.call("ReleaseSequence", sequence_id=1)
    evicted = await session.call("EvictBlocks", num_free_blocks=8)
    assert (evicted.num_evicted_blocks, evicted.num_demoted_blocks, evicted.num_free_blocks) == (3, 3, 8)
    spoil(tiers)
    matched = await session.call("MatchPrefix", token_ids=range(100, 112))
    assert (matched.num_matched_tokens, list(matched.block_ids)) == (12, [])
    answer = await session.call("CheckAdmission", token_ids=range(100, 112))
    assert (answer.verdict, answer.num_hit_tokens, answer.num_required_blocks) == (pb.ADMISSION_VERDICT_NOW, 8, 3)
    await session.create(2, 12, first=100)
    started = (await session.call("ExtendSequence", sequence_id=2, num_tokens=12)).sequence
    assert started.num_hit_tokens == 8
    np.testing.assert_array_equal(await read_all(session, 2), content[:, :, :8])
    (stats,) = (await tiers.stats()).pools
    assert (stats.num_demoted_blocks, stats.num_promoted_blocks) == (3, 2)


async def test_refusals_tell_what_was_needed(tiers: Api) -> None:
    session = await tiers.open(engine=False)
    await computed(session, 1, 28)
    await session.call("SwapOutSequence", sequence_id=1)
    await session.call("ClearPrefixCache")
    await computed(session, 2, 28)
    error = await refusal(session.call("SwapOutSequence", sequence_id=2))
    assert (error.reason, error.metadata) == ("OUT_OF_HOST_BLOCKS", {"requested": "7", "available": "5"})
    error = await refusal(session.call("SwapInSequence", sequence_id=1))
    assert (error.reason, error.metadata) == ("OUT_OF_BLOCKS", {"requested": "7", "available": "1"})
    assert (await refusal(session.call("SwapInSequence", sequence_id=9))).reason == "UNKNOWN_SEQUENCE"


async def test_an_engine_runs_the_orders_in_both_arenas(tiers: Api) -> None:
    async with AsyncCacheClient(tiers.server.address) as client:
        session = await client.open_session(SPEC, executor=pb.EXECUTOR_ENGINE)
        arena = await session.attach()
        blocks = arena.array.reshape(-1, BLOCK_BYTES)
        hosts = arena.host_array.reshape(-1, BLOCK_BYTES)
        assert (len(blocks), len(hosts)) == (9, 13)
        raw = Session(tiers, session._opened)
        await raw.create(1, 6)
        started = pb.StepResponse.FromString(await tiers.raw_step(raw.start_bytes(1, 1)))
        table = int32s(started.start_block_ids)
        blocks[table] = np.arange(2 * BLOCK_BYTES).reshape(2, -1) % 249
        written = blocks[table].copy()
        await raw.step(2, **commit_columns(1, 6))
        out = await raw.step(3, swap_out_sequence_ids=le64(1))
        assert int32s(out.swap_out_results) == [pb.ITEM_RESULT_OK]
        sources, destinations = int32s(out.transfer_source_block_ids), int32s(out.transfer_destination_block_ids)
        assert (sources, int32s(out.transfer_kinds)) == (table, [pb.TRANSFER_KIND_SWAP_OUT] * 2)
        hosts[destinations] = blocks[sources]
        ids = np.frombuffer(out.transfer_ids, "<i8").tolist()
        await session.renew(completed_step_id=3, completed_transfers=ids)
        await raw.call("ClearPrefixCache")
        spoil(tiers)
        back = await raw.step(4, swap_in_sequence_ids=le64(1))
        blocks[int32s(back.transfer_destination_block_ids)] = hosts[int32s(back.transfer_source_block_ids)]
        ready = await raw.step(5, completed_transfer_ids=back.transfer_ids)
        assert ready.ready_sequence_ids == le64(1)
        assert int32s(ready.ready_num_reserved_tokens) == [6]
        np.testing.assert_array_equal(blocks[int32s(ready.ready_block_ids)], written)
        await refused(raw.step(6, failed_transfer_ids=le64(10**6)), "INVALID_FIELD", field="failed_transfer_ids")
        del blocks, hosts
        arena.close()
        await session.close()


async def test_a_step_of_a_cache_executed_session_tells_no_orders(tiers: Api) -> None:
    session = await tiers.open(engine=False)
    await session.prefill(1, 6)
    out = await session.step(3, swap_out_sequence_ids=le64(1))
    assert (int32s(out.swap_out_results), out.transfer_ids) == ([pb.ITEM_RESULT_OK], b"")
    await session.call("ClearPrefixCache")
    back = await session.step(4, swap_in_sequence_ids=le64(1))
    assert (int32s(back.swap_in_results), back.transfer_ids, back.ready_sequence_ids) == ([1], b"", le64(1))
    await asyncio.sleep(0)


async def test_a_long_report_goes_on_by_itself_in_slices(tiers: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """One order with the call and one in each slice: the device blocks of the sequence come free when all have ended."""
    session = await tiers.open()
    await session.create(1, 4 * SPEC.block_size)
    await tiers.raw_step(session.start_bytes(1, 1))
    orders = await session.step(2, swap_out_sequence_ids=le64(1))
    assert len(orders.transfer_ids) == 4 * 8
    (pool,) = tiers.server.session_manager.registry.pools
    assert pool.manager.swapper is not None
    pool.manager.swapper.at_once = 1
    monkeypatch.setattr(running_pool, "_SLICE_ORDERS", 1)
    await session.call("RenewSession", completed_step_id=2, completed_transfer_ids=orders.transfer_ids)
    assert (await tiers.until(lambda stats: not stats.pools[0].num_referenced_blocks)).pools[0].num_held_host_blocks == 4
