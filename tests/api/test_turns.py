"""Long calls let others pass: what they do in slices is whole at each turn, and what changed meanwhile is no error."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.rpc import eviction_calls, prefix_calls
from kvkeeper.cache_service.runtime import turns
from tests.support.worlds.cache_api import DEADLINE, Api, Session, commit_columns, le64, refusal, serving

NUM_BLOCKS, NUM_CACHED, NUM_CREATED = 65, 40, 200


@pytest.fixture(autouse=True)
def _a_turn_for_each_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_MOST_SECONDS", 0.0)
    monkeypatch.setattr(eviction_calls, "_SLICE_BLOCKS", 1)


@pytest.fixture
async def wide() -> AsyncIterator[Api]:
    async with serving(num_blocks=NUM_BLOCKS) as api:
        yield api


async def _stepped_while(
    wide: Api, other: Session, running: "asyncio.Future[object]", count: str, step_id: int = 0
) -> set[int]:
    """What stats count at each turn of the loop until the call ends, while another session steps.

    A step's bytes pass through gRPC's threads, so that one step may take longer than all turns of the call together.
    """
    (pool,) = wide.server.session_manager.registry.pools
    seen = set[int]()

    async def look() -> None:
        while not running.done():
            seen.add(getattr(pool.manager.queries.stats(), count))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    while not running.done():
        step_id += 1
        await other.step(step_id)
        assert pool.manager.queries.check_invariants() == []
    await looking
    return seen


async def _cached(session: Session) -> None:
    """40 blocks that nothing holds, by the session's first four steps."""
    await session.prefill(1, 4 * NUM_CACHED + 1, num_committed=4 * NUM_CACHED)
    await session.step(3, release_sequence_ids=le64(1))
    await session.step(4)


async def test_others_step_while_blocks_are_evicted(wide: Api) -> None:
    session, other = await wide.open(), await wide.open()
    await _cached(session)
    evicting = asyncio.ensure_future(session.call("EvictBlocks", num_blocks=30))
    auditing = asyncio.ensure_future(wide.audit())
    seen = await _stepped_while(wide, other, evicting, "num_cached_blocks")
    await auditing
    answer = await evicting
    assert (answer.num_evicted_blocks, answer.num_free_blocks) == (30, NUM_BLOCKS - 1 - NUM_CACHED + 30)
    assert any(10 < num_cached < NUM_CACHED for num_cached in seen), "no turn came between"


async def test_targets_are_met_in_slices_as_in_one_go(wide: Api) -> None:
    session = await wide.open()
    await _cached(session)
    assert (await session.call("EvictBlocks", num_free_blocks=30)).num_evicted_blocks == 6
    assert (await session.call("EvictBlocks", max_utilization=0.25)).num_evicted_blocks == 18
    assert (await session.call("EvictBlocks", num_blocks=1000)).num_evicted_blocks == 16
    assert (await session.call("EvictBlocks", num_blocks=1)).num_evicted_blocks == 0


async def test_an_eviction_ends_with_its_session(wide: Api) -> None:
    session, other = await wide.open(), await wide.open()
    await _cached(session)
    evicting = asyncio.ensure_future(refusal(session.call("EvictBlocks", num_blocks=NUM_CACHED)))
    (pool,) = wide.server.session_manager.registry.pools
    async with asyncio.timeout(DEADLINE):
        while pool.manager.queries.stats().num_cached_blocks == NUM_CACHED:  # noqa: ASYNC110  it has no event for a test
            await asyncio.sleep(0)
    await session.call("CloseSession")
    assert (await evicting).reason == "UNKNOWN_SESSION"
    assert 0 < pool.manager.queries.stats().num_cached_blocks < NUM_CACHED
    await other.step(1)
    await wide.audit()


async def test_others_step_while_many_sequences_are_created(wide: Api) -> None:
    session, other = await wide.open(), await wide.open()
    new = [{"sequence_id": place, "token_ids": [place, 2, 3]} for place in range(1, NUM_CREATED + 1)]
    creating = asyncio.ensure_future(session.call("CreateSequences", sequences=new))
    seen = await _stepped_while(wide, other, creating, "num_waiting_sequences")
    created = [result.response.start_number for result in (await creating).results]
    assert created == sorted(set(created)), "they arrived in the order of the request"
    assert any(0 < num_waiting < NUM_CREATED for num_waiting in seen), "no turn came between"


async def test_sequences_end_with_their_session_while_others_are_created(wide: Api) -> None:
    session = await wide.open()
    new = [{"sequence_id": place, "token_ids": [place, 2, 3]} for place in range(1, NUM_CREATED + 1)]
    creating = asyncio.ensure_future(refusal(session.call("CreateSequences", sequences=new)))
    (pool,) = wide.server.session_manager.registry.pools
    async with asyncio.timeout(DEADLINE):
        while not pool.manager.queries.stats().num_waiting_sequences:  # noqa: ASYNC110  it has no event for a test
            await asyncio.sleep(0)
    await session.call("CloseSession")
    assert (await creating).reason == "UNKNOWN_SESSION"
    assert pool.manager.queries.stats().num_waiting_sequences == 0
    await wide.audit()


async def test_a_list_leaves_out_what_ends_meanwhile(wide: Api) -> None:
    session = await wide.open()
    for sequence_id in range(1, 21):
        await session.create(sequence_id, 2)
    listing = asyncio.ensure_future(wide.stub.ListSequences(pb.ListSequencesRequest(page_size=15)))
    await asyncio.sleep(0)
    await session.step(1, release_sequence_ids=le64(15))
    page = await listing
    found = [row.sequence_id for row in page.sequences]
    assert found in ([*range(1, 15)], [*range(1, 16)]), "the last one was released before or after its turn"
    behind = await wide.stub.ListSequences(pb.ListSequencesRequest(page_token=page.next_page_token))
    assert [row.sequence_id for row in behind.sequences] == [*range(16, 21)]
    assert not behind.next_page_token


async def test_an_audit_in_slices_finds_a_wrong_block_and_nothing_else(wide: Api) -> None:
    session = await wide.open()
    await _cached(session)
    (pool,) = wide.server.session_manager.registry.pools
    blocks = pool.manager.state.pool
    blocks.num_shared += 1
    answer = await wide.stub.CheckInvariants(pb.CheckInvariantsRequest())
    assert list(answer.violations) == ["the number of shared blocks is wrong"]
    blocks.num_shared -= 1
    index = pool.manager.state.index
    node = int(index.node_of_block[index.node_of_block > 0][0])
    after = int(index.links.next_sibling[node])
    index.links.next_sibling[node] = node
    answer = await wide.stub.CheckInvariants(pb.CheckInvariantsRequest())
    assert f"siblings of node {node} are not linked both ways" in answer.violations
    index.links.next_sibling[node] = after
    await wide.audit()


async def test_others_step_while_the_cache_is_cleared_and_what_runs_is_shared_anew(
    wide: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_calls, "_SLICE_BLOCKS", 1)
    session, other = await wide.open(), await wide.open()
    await _cached(session)
    await other.prefill(1, 9, num_committed=8, first=500)
    assert (await other.call("MatchPrefix", token_ids=range(500, 509))).num_matched_tokens == 8
    clearing = asyncio.ensure_future(session.call("ClearPrefixCache"))
    auditing = asyncio.ensure_future(wide.audit())
    seen = await _stepped_while(wide, other, clearing, "num_cached_blocks", step_id=2)
    await auditing
    answer = await clearing
    assert (answer.num_freed_blocks, answer.num_forgotten_blocks) == (NUM_CACHED, NUM_CACHED + 2)
    assert any(0 < num_cached < NUM_CACHED for num_cached in seen), "no turn came between"
    await wide.until(lambda stats: stats.pools[0].num_indexed_blocks == 2)
    assert (await other.call("MatchPrefix", token_ids=range(500, 509))).num_matched_tokens == 8
    assert (await other.call("MatchPrefix", token_ids=range(9))).num_matched_tokens == 0
    await wide.audit()


async def test_a_clearing_whose_caller_goes_away_leaves_the_pool_publishing(wide: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_calls, "_SLICE_BLOCKS", 1)
    session = await wide.open()
    await _cached(session)
    (pool,) = wide.server.session_manager.registry.pools
    request = pb.ClearPrefixCacheRequest(**session.ids)
    call = wide.stub.ClearPrefixCache(request)
    async with asyncio.timeout(DEADLINE):
        while pool.manager.queries.stats().num_cached_blocks == NUM_CACHED:  # noqa: ASYNC110  it has no event for a test
            await asyncio.sleep(0)
    call.cancel()
    await wide.until(lambda _: not pool.manager.state.publisher.is_paused)
    assert pool.manager.queries.stats().num_cached_blocks > 0
    await session.create(2, 9, first=900)
    await session.api.raw_step(session.start_bytes(5, 2))
    await session.step(6, **commit_columns(2, 8))
    assert (await session.call("MatchPrefix", token_ids=range(900, 909))).num_matched_tokens == 8
