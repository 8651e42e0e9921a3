"""A sequence changes its session over the wire: offered, taken, withdrawn, and none of it twice."""

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import Api, Session, kv_of, le32, le64, read_all, refusal, refused


async def running(api: Api, num_tokens: int = 6) -> Session:
    """A one-item session with sequence 1, whose first tokens are written and committed."""
    session = await api.open(engine=False)
    await session.compute(1, num_tokens, kv_of(range(num_tokens)), num_reserved=num_tokens + 1)
    return session


async def test_a_sequence_changes_its_session_and_keeps_its_blocks(api: Api) -> None:
    giver, taker = await running(api), await api.open(engine=False)
    before = (await giver.call("GetSequence", sequence_id=1, include_tokens=True)).sequence
    offer = (await giver.call("HandOffSequence", sequence_id=1)).offer
    assert len(offer) == 16
    assert (await giver.call("HandOffSequence", sequence_id=1)).offer == offer, "it holds"
    taken = (await taker.call("TakeSequence", offer=offer, sequence_id=7)).sequence
    assert list(taken.block_table) == list(before.block_table)
    counters = ("num_tokens", "num_committed_tokens", "num_reserved_tokens", "start_number")
    assert [getattr(taken, name) for name in counters] == [getattr(before, name) for name in counters]
    await refused(giver.call("GetSequence", sequence_id=1), "UNKNOWN_SEQUENCE")
    np.testing.assert_array_equal(await read_all(taker, 7), kv_of(range(6)))
    await taker.write_kv(7, 6, kv_of(range(6, 7)))
    shown = await taker.call("CommitSequence", sequence_id=7, num_tokens=7, first_token_idx=6, token_ids=[70])
    assert shown.sequence.num_committed_tokens == 7
    again = (await taker.call("TakeSequence", offer=offer, sequence_id=7)).sequence
    assert again.num_committed_tokens == 7, "a repeat tells how it is now"
    (pool,) = (await api.stats()).pools
    assert (pool.num_hand_offs, pool.num_copies_on_write) == (1, 0)
    await api.audit()


async def test_an_offer_is_taken_once(api: Api) -> None:
    giver, taker, third = await running(api), await api.open(engine=False), await api.open(engine=False)
    offer = (await giver.call("HandOffSequence", sequence_id=1)).offer
    error = await refusal(giver.call("TakeSequence", offer=offer, sequence_id=2))
    assert error.reason == "UNKNOWN_OFFER", "not by its giver"
    await taker.create(7, 3)
    await refused(taker.call("TakeSequence", offer=offer, sequence_id=7), "DUPLICATE_SEQUENCE")
    await taker.call("TakeSequence", offer=offer, sequence_id=8)
    for session, sequence_id in ((third, 8), (taker, 9), (giver, 1)):
        error = await refusal(session.call("TakeSequence", offer=offer, sequence_id=sequence_id))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_OFFER")
        assert offer.hex() not in str(error)
    error = await refusal(giver.call("WithdrawHandOff", sequence_id=1))
    assert error.reason == "UNKNOWN_SEQUENCE", "so the giver learns that it was taken"
    await taker.call("ReleaseSequence", sequence_id=8)
    await refused(taker.call("TakeSequence", offer=offer, sequence_id=8), "UNKNOWN_OFFER")


@pytest.mark.parametrize("ending", ["WithdrawHandOff", "ExtendSequence", "TruncateSequence", "ReleaseSequence", "CloseSession"])
async def test_an_offer_ends_with_what_its_giver_does(api: Api, ending: str) -> None:
    giver, taker = await running(api), await api.open(engine=False)
    offer = (await giver.call("HandOffSequence", sequence_id=1)).offer
    fields = {"ExtendSequence": {"num_tokens": 20}, "TruncateSequence": {"num_tokens": 5}}.get(ending, {})
    await giver.call(ending, **({} if ending == "CloseSession" else {"sequence_id": 1}), **fields)
    await refused(taker.call("TakeSequence", offer=offer, sequence_id=7), "UNKNOWN_OFFER")
    if ending in ("WithdrawHandOff", "ExtendSequence", "TruncateSequence"):
        await giver.call("WithdrawHandOff", sequence_id=1)
        fresh = (await giver.call("HandOffSequence", sequence_id=1)).offer
        assert fresh != offer
        await taker.call("TakeSequence", offer=fresh, sequence_id=7)
    await api.audit()


async def test_what_does_not_run_is_not_offered(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 6)
    await refused(session.call("HandOffSequence", sequence_id=1), "WRONG_STATE", state="WAITING")
    assert (await refusal(session.call("HandOffSequence", sequence_id=2))).reason == "UNKNOWN_SEQUENCE"


async def test_an_engine_gives_once_its_step_is_completed_and_another_one_goes_on(api: Api) -> None:
    giver, taker = await api.open(), await api.open()
    await giver.create(1, 6)
    await api.raw_step(giver.start_bytes(1, 1))
    error = await refusal(giver.call("HandOffSequence", sequence_id=1))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_NOT_COMPLETED")
    assert error.metadata == {"sequence_id": "1", "completed_step_id": "0"}
    commits = {"commit_sequence_ids": le64(1), "commit_num_tokens": le32(6), "commit_num_new_tokens": le32(1)}
    await giver.step(2, **commits, commit_token_ids=le32(50))
    offer = (await giver.call("HandOffSequence", sequence_id=1)).offer
    await taker.create(3, 6, first=100)
    await api.raw_step(taker.start_bytes(1, 3))
    taken = (await taker.call("TakeSequence", offer=offer, sequence_id=1)).sequence
    assert (taken.num_tokens, taken.num_committed_tokens) == (7, 6)
    both = {"reserve_sequence_ids": le64(1, 3), "reserve_min_tokens": le32(7, 7), "reserve_max_tokens": le32(7, 7)}
    await taker.step(2, commit_sequence_ids=le64(3), commit_num_tokens=le32(6), commit_num_new_tokens=le32(1),
                     commit_token_ids=le32(51), **both)  # fmt: skip
    await taker.step(3, commit_sequence_ids=le64(1, 3), commit_num_tokens=le32(7, 7), commit_num_new_tokens=le32(1, 1),
                     commit_token_ids=le32(52, 53))  # fmt: skip
    shown = (await taker.call("GetSequence", sequence_id=1, include_tokens=True)).sequence
    assert list(shown.token_ids) == [0, 1, 2, 3, 4, 5, 50, 52]
    await refused(giver.step(3, release_sequence_ids=le64(1)), "UNKNOWN_SEQUENCE")
    await giver.call("CloseSession", drained=True)
    await api.audit()


async def test_the_end_of_a_giver_leaves_what_was_taken(api: Api) -> None:
    giver, taker = await running(api), await api.open(engine=False)
    offer = (await giver.call("HandOffSequence", sequence_id=1)).offer
    await taker.call("TakeSequence", offer=offer, sequence_id=1)
    await giver.call("CloseSession", drained=True)
    np.testing.assert_array_equal(await read_all(taker, 1), kv_of(range(6)))
    assert isinstance((await taker.call("ReleaseSequence", sequence_id=1)), pb.ReleaseSequenceResponse)
    await api.audit()
    (pool,) = (await api.stats()).pools
    assert pool.num_referenced_blocks == 0
