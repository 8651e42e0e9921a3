"""Hints of cached prefixes over the API: what they move in the eviction order, and that a wrong one moves nothing."""

from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import Api, ManualClock, Session, refused

FIRST, SECOND, OTHER = range(8), range(100, 108), range(200, 208)  # two blocks each
ALL = (FIRST, SECOND, OTHER)


async def _cached(api: Api) -> Session:
    """A session that has cached these prompts, one after the other."""
    session = await api.open(engine=False, ttl_ms=3_600_000)
    for sequence_id, tokens in enumerate(ALL, 1):
        await _use(session, sequence_id, tokens)
    return session


async def _use(session: Session, sequence_id: int, tokens: range) -> None:
    await session.call("CreateSequence", sequence_id=sequence_id, token_ids=tokens)
    await session.call("ExtendSequence", sequence_id=sequence_id, num_tokens=len(tokens))
    await session.call("CommitSequence", sequence_id=sequence_id, num_tokens=len(tokens), first_token_idx=len(tokens))
    await session.call("ReleaseSequence", sequence_id=sequence_id)


async def _hint(session: Session, *hints: tuple[range, "pb.ReuseHint"], **more: Any) -> list[int]:
    messages = [pb.PrefixHint(token_ids=tokens, reuse_hint=hint, **more) for tokens, hint in hints]
    return list((await session.call("HintPrefix", hints=messages)).num_hinted_tokens)


async def _left(session: Session, num_evicted: int) -> list[range]:
    """Those of the prompts that are cached whole when so many blocks are evicted."""
    assert (await session.call("EvictBlocks", num_blocks=num_evicted)).num_evicted_blocks == num_evicted
    return [each for each in ALL if (await session.call("MatchPrefix", token_ids=each)).num_matched_tokens == 8]


async def test_without_a_hint_the_oldest_goes_first(api: Api) -> None:
    assert await _left(await _cached(api), 2) == [SECOND, OTHER]


async def test_what_is_retained_goes_last_but_goes(api: Api) -> None:
    session = await _cached(api)
    assert await _hint(session, (FIRST, pb.REUSE_HINT_SOON)) == [8]
    stats = (await api.stats()).pools[0]
    assert (stats.num_soon_blocks, stats.num_referenced_blocks) == (2, 0)
    assert await _left(session, 4) == [FIRST]
    assert await _left(session, 2) == []
    await api.audit()


async def test_what_is_demoted_goes_first(api: Api) -> None:
    session = await _cached(api)
    assert await _hint(session, (OTHER, pb.REUSE_HINT_NONE)) == [8]
    assert await _left(session, 2) == [FIRST, SECOND]
    await api.audit()


@pytest.mark.parametrize("first", [pb.REUSE_HINT_SOON, pb.REUSE_HINT_NONE])
async def test_what_is_released_waits_as_what_was_used_last(api: Api, first: "pb.ReuseHint") -> None:
    session = await _cached(api)
    await _hint(session, (FIRST, first), (FIRST, pb.REUSE_HINT_UNSPECIFIED))
    stats = (await api.stats()).pools[0]
    assert (stats.num_soon_blocks, stats.num_no_reuse_blocks) == (0, 0)
    assert await _left(session, 2) == [FIRST, OTHER]


async def test_a_minute_ends_it_and_a_repeat_begins_the_time_anew(api: Api, clock: ManualClock) -> None:
    session = await _cached(api)
    await _hint(session, (FIRST, pb.REUSE_HINT_SOON), (SECOND, pb.REUSE_HINT_SOON))
    clock.advance(45.0)
    await _hint(session, (SECOND, pb.REUSE_HINT_SOON))
    clock.advance(45.0)
    assert (await api.stats()).pools[0].num_soon_blocks == 2
    assert await _left(session, 4) == [SECOND]


async def test_what_is_retained_for_long_waits_as_long(api: Api, clock: ManualClock) -> None:
    session = await _cached(api)
    await _hint(session, (FIRST, pb.REUSE_HINT_SOON), retain_ms=300_000)
    await _hint(session, (SECOND, pb.REUSE_HINT_SOON), retain_ms=601_000)
    for seconds, num_blocks in ((590.0, 4), (20.0, 2), (2980.0, 2), (20.0, 0)):
        clock.advance(seconds)
        assert (await api.stats()).pools[0].num_soon_blocks == num_blocks
        await session.call("RenewSession")


@pytest.mark.parametrize("call", ["CreateSequence", "CreateSequences"])
async def test_a_sequence_whose_next_turn_is_awaited_is_retained_for_that_time(api: Api, clock: ManualClock, call: str) -> None:
    session = await _cached(api)
    fields = {"sequence_id": 9, "token_ids": [*FIRST, 99], "retain_ms": 601_000}
    for _ in range(2):  # idempotent
        await session.call(call, **({"sequences": [pb.NewSequence(**fields)]} if call == "CreateSequences" else fields))
    await refused(session.call("CreateSequence", **fields | {"retain_ms": 600_000}), "DUPLICATE_SEQUENCE")
    await session.call("ExtendSequence", sequence_id=9, num_tokens=9)
    await session.call("ReleaseSequence", sequence_id=9)
    clock.advance(3590.0)
    await session.call("RenewSession")
    assert (await api.stats()).pools[0].num_soon_blocks == 2
    assert await _left(session, 4) == [FIRST]
    await api.audit()


async def test_what_is_not_used_again_is_not_retained(api: Api) -> None:
    session = await _cached(api)
    none = {"sequence_id": 9, "token_ids": FIRST, "retain_ms": 1, "reuse_hint": pb.REUSE_HINT_NONE}
    await refused(session.call("CreateSequence", **none), "INVALID_FIELD", field="retain_ms", limit="0")


async def test_a_hint_reaches_what_is_cached_for_its_tenant(api: Api) -> None:
    session = await _cached(api)
    assert await _hint(session, (range(12), pb.REUSE_HINT_SOON), (range(7), pb.REUSE_HINT_SOON)) == [8, 4]
    assert await _hint(session, (FIRST, pb.REUSE_HINT_SOON), (range(300, 308), pb.REUSE_HINT_NONE), tenant="b") == [0, 0]


async def test_of_a_call_that_is_refused_no_hint_is_noted(api: Api) -> None:
    session = await _cached(api)
    nothing = (range(0), pb.REUSE_HINT_SOON)
    await refused(_hint(session, (FIRST, pb.REUSE_HINT_SOON), nothing), "INVALID_FIELD", field="token_ids")
    await refused(session.call("HintPrefix"), "INVALID_FIELD", field="hints", limit="1")
    await refused(_hint(session, *[(FIRST, pb.REUSE_HINT_SOON)] * 257), "INVALID_FIELD", field="hints", limit="256")
    assert (await api.stats()).pools[0].num_soon_blocks == 0
    assert await _left(session, 2) == [SECOND, OTHER]
