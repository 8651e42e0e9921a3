"""The calls that make room, the order of arrivals, and the blocks reserved for the oldest claim, over the wire."""

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import Api, ManualClock, int32s, le32, le64, refusal, refused, serving


async def test_a_place_in_the_order_of_arrivals_is_told_and_kept(api: Api) -> None:
    session, other = await api.open(), await api.open()
    first = await session.call("CreateSequence", sequence_id=1, token_ids=[1])
    second = await other.call("CreateSequence", sequence_id=1, token_ids=[1])
    assert (first.start_number, second.start_number) == (1, 2)
    again = await other.call("CreateSequence", sequence_id=2, token_ids=[1], start_number=1)
    assert again.start_number == 1
    assert (await other.call("GetSequence", sequence_id=2)).sequence.start_number == 1
    error = await refusal(other.call("CreateSequence", sequence_id=3, token_ids=[1], start_number=3))
    assert (error.reason, error.metadata["field"], error.metadata["limit"]) == ("INVALID_FIELD", "start_number", "2")


async def test_blocks_are_asked_back_in_steps_and_renewals() -> None:
    async with serving(num_blocks=5, clock=ManualClock()) as api:
        earlier, later = await api.open(), await api.open()
        await earlier.create(1, 8)
        await later.create(1, 8, first=100)
        for session in (earlier, later):
            assert int32s((await session.step(1, **starts(1, may_wait=0))).start_results) == [pb.START_RESULT_STARTED]
        grow = {"reserve_sequence_ids": le64(1), "reserve_min_tokens": le32(9), "reserve_max_tokens": le32(9)}
        assert (await earlier.step(2, **grow)).num_reclaim_hint_blocks == 0
        assert (await later.step(2)).num_reclaim_hint_blocks == 1
        assert (await later.call("RenewSession")).num_reclaim_hint_blocks == 1
        assert (await earlier.call("RenewSession")).num_reclaim_hint_blocks == 0
        (pool,) = (await api.stats()).pools
        assert (pool.num_claimed_blocks, pool.pressure, pool.num_pressure_changes) == (1, pb.PRESSURE_LEVEL_CRITICAL, 1)
        await later.step(3, release_sequence_ids=le64(1))
        assert int32s((await earlier.step(3, **grow)).reserve_num_reserved_tokens) == [9]
        await api.audit()


def starts(sequence_id: int, may_wait: int) -> dict[str, bytes]:
    return {
        "start_sequence_ids": le64(sequence_id),
        "start_max_new_tokens": le32(1 << 20),
        "start_max_hit_tokens": le32(1 << 20),
        "start_may_wait": le32(may_wait),
    }


async def test_a_start_that_may_wait_is_told_that_its_prefix_is_being_computed(api: Api) -> None:
    session, other = await api.open(), await api.open()
    await session.create(1, 12)
    await session.step(1, **starts(1, may_wait=1))
    await other.create(1, 14)
    answer = await other.step(1, **starts(1, may_wait=1))
    assert int32s(answer.start_results) == [pb.START_RESULT_COMPUTING]
    assert int32s(answer.start_num_hit_tokens) == [12]
    assert (await api.stats()).pools[0].num_computing_answers == 1
    await refused(other.step(2, **starts(1, may_wait=2)), "INVALID_FIELD", field="start_may_wait")


async def test_victims_are_named_with_what_comes_free(api: Api) -> None:
    session = await api.open(engine=False)
    for sequence_id, num_tokens in ((1, 12), (2, 4)):
        await session.create(sequence_id, num_tokens, first=100 * sequence_id)
        await session.call("ExtendSequence", sequence_id=sequence_id, num_tokens=num_tokens)
    answer = await session.call("SelectVictims")
    assert (list(answer.sequence_ids), list(answer.num_freed_blocks)) == ([2], [1])  # the youngest
    answer = await session.call("SelectVictims", policy=pb.VICTIM_POLICY_LONGEST_FIRST, num_blocks=4)
    assert (list(answer.sequence_ids), list(answer.num_freed_blocks)) == ([1, 2], [3, 4])
    assert not (await session.call("SelectVictims", max_utilization=1.0)).sequence_ids
    for fields in ({"policy": 99}, {"num_blocks": -1}, {"max_utilization": 1.5}, {"num_blocks": 1, "max_utilization": 0.5}):
        assert (await refusal(session.call("SelectVictims", **fields))).reason == "INVALID_FIELD"


@pytest.mark.parametrize(
    "fields",
    [{"num_free_blocks": 1, "num_blocks": 1}, {"num_blocks": 1, "max_utilization": 0.1}, {"max_utilization": -0.1},
     {"num_free_blocks": -1}, {"max_utilization": float("nan")}],
)  # fmt: skip
async def test_eviction_takes_one_target(api: Api, fields: dict[str, float]) -> None:
    assert (await refusal((await api.open()).call("EvictBlocks", **fields))).reason == "INVALID_FIELD"


async def test_blocks_are_evicted_by_number_and_by_share() -> None:
    async with serving(num_blocks=11, evict_above=0.8, clock=ManualClock()) as api:
        session = await api.open(engine=False)
        await session.compute(1, 40)
        await session.call("ReleaseSequence", sequence_id=1)
        await api.until(lambda stats: stats.pools[0].num_free_blocks == 2)  # above the threshold: it went by itself
        answer = await session.call("EvictBlocks", num_blocks=3)
        assert (answer.num_evicted_blocks, answer.num_free_blocks) == (3, 5)
        assert (await session.call("EvictBlocks", max_utilization=0.2)).num_free_blocks == 8
        assert (await session.call("EvictBlocks", num_free_blocks=9)).num_evicted_blocks == 1
        await api.audit()


async def test_garbage_is_collected_once(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 4)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=12)
    answer = await session.call("CollectGarbage")
    assert (answer.num_trimmed_blocks, answer.num_freed_blocks) == (2, 2)
    shown = (await session.call("GetSequence", sequence_id=1)).sequence
    assert (shown.num_tokens, shown.num_reserved_tokens, len(shown.block_table)) == (4, 4, 1)
    assert (await api.stats()).pools[0].num_free_blocks == session.opened.pool.num_blocks - 2
    assert (await session.call("CollectGarbage")) == pb.CollectGarbageResponse()
    assert (await api.stats()).pools[0].num_collected_blocks == 2
    again = (await session.call("ExtendSequence", sequence_id=1, num_tokens=12)).sequence
    assert len(again.block_table) == 3
