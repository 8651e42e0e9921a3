"""ExplainMatch and GetBlock over the wire."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import Api, ManualClock, le64, refusal, refused


async def test_an_explanation_says_the_same_to_people_and_programs(api: Api, clock: ManualClock) -> None:
    session = await api.open()
    await session.prefill(1, 9)
    found = await session.call("ExplainMatch", token_ids=range(12))
    assert (found.num_matched_tokens, found.num_hit_tokens, found.end) == (8, 8, pb.MATCH_END_NEVER_STORED)
    assert found.explanation.startswith("8 of 12 tokens are cached: ")
    await session.step(3, release_sequence_ids=le64(1))
    await session.step(4)
    assert (await session.call("ClearPrefixCache")).num_forgotten_blocks == 2
    clock.advance(1.5)
    found = await session.call("ExplainMatch", token_ids=range(12))
    assert (found.num_matched_tokens, found.end, found.ended_ms_ago) == (0, pb.MATCH_END_CLEARED, 1500)


async def test_another_tenant_is_told_that_nothing_was_stored(api: Api) -> None:
    session = await api.open()
    await session.prefill(1, 9, tenant="ours")
    ours = await session.call("ExplainMatch", token_ids=range(9), tenant="ours")
    theirs = await session.call("ExplainMatch", token_ids=range(9), tenant="theirs")
    assert (ours.num_matched_tokens, ours.end) == (8, pb.MATCH_END_PARTIAL_BLOCK)
    assert (theirs.num_matched_tokens, theirs.num_common_tokens, theirs.end) == (0, 0, pb.MATCH_END_NEVER_STORED)


async def test_tokens_that_are_none_are_refused(api: Api) -> None:
    session = await api.open()
    for tokens in ([], [1 << 31]):
        await refused(session.call("ExplainMatch", token_ids=tokens), "INVALID_FIELD", field="token_ids")


async def test_a_block_is_shown_through_its_life(api: Api) -> None:
    session = await api.open()

    async def shown(block: int) -> tuple[str, int, int, bool]:
        answer = await session.call("GetBlock", block_id=block)
        state = pb.BlockState.Name(answer.state).removeprefix("BLOCK_STATE_")
        return state, answer.num_references, answer.num_fences, answer.indexed

    blocks = await session.prefill(1, 9)
    free = next(block for block in range(1, 10) if block not in blocks)
    assert await shown(free) == ("FREE", 0, 0, False)
    assert await shown(blocks[0]) == ("REFERENCED", 1, 0, True)
    assert await shown(blocks[2]) == ("REFERENCED", 1, 0, False)
    completed_before = session.step_bytes(3, completed=1, release_sequence_ids=le64(1))
    await api.raw_step(completed_before)
    assert await shown(blocks[0]) == ("FENCED", 0, 1, True)
    await session.step(4)
    assert await shown(blocks[0]) == ("CACHED", 0, 0, True)
    assert await shown(blocks[2]) == ("FREE", 0, 0, False)


async def test_a_block_that_is_not_there_is_refused_with_the_largest_id(api: Api) -> None:
    session = await api.open()
    last = session.opened.pool.num_blocks - 1
    assert (await session.call("GetBlock", block_id=last)).state == pb.BLOCK_STATE_FREE
    error = await refusal(session.call("GetBlock", block_id=last + 1))
    assert (error.reason, error.metadata) == ("UNKNOWN_BLOCK", {"limit": str(last)})
    for block in (0, -1):
        await refused(session.call("GetBlock", block_id=block), "INVALID_FIELD", field="block_id")
