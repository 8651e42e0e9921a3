"""Adapters and salts of sequences: one pool for all of them, and nothing shared."""

import hashlib
from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, KvkeeperError
from kvkeeper.client import cache as client_cache
from kvkeeper.client.new_sequence import root_name
from tests.api.test_watch_events import Storer, names_behind, watching
from tests.support.worlds.cache_api import BLOCK_SIZE, SPEC, Api, Session, failure, kv_of, read_all, refusal, serving
from tests.support.worlds.scopes import ADAPTER, SALT

PROMPT = [*range(9)]
SHARED = 2 * BLOCK_SIZE  # tokens of it that may be found
SCOPES: list[dict[str, Any]] = [
    {},
    {"adapter": ADAPTER},
    {"cache_salt": SALT},
    {"adapter": ADAPTER, "cache_salt": SALT},
    {"tenant": "a"},
    {"tenant": "a", "adapter": ADAPTER},
]


async def use(session: Session, sequence_id: int, content: int, **scope: str) -> int:
    """Writes what of a prompt was not found, and reads all of it. Returns the tokens found."""
    await session.call("CreateSequence", sequence_id=sequence_id, token_ids=PROMPT, **scope)
    await session.call("ExtendSequence", sequence_id=sequence_id, num_tokens=len(PROMPT))
    found = (await session.call("GetSequence", sequence_id=sequence_id)).sequence.num_hit_tokens
    wanted = kv_of(range(len(PROMPT)), salt=content)
    await session.write_kv(sequence_id, found, wanted[:, :, found:])
    await session.call("CommitSequence", sequence_id=sequence_id, num_tokens=len(PROMPT), first_token_idx=len(PROMPT))
    np.testing.assert_array_equal(await read_all(session, sequence_id), wanted)
    await session.call("ReleaseSequence", sequence_id=sequence_id)
    return int(found)


async def test_fifty_adapters_share_one_pool_and_nothing_in_it() -> None:
    adapters = ["", *(hashlib.sha256(bytes([number])).hexdigest() for number in range(50))]
    async with serving(num_pools=1, num_blocks=256) as api:
        session = await api.open(engine=False)
        for number, adapter in enumerate(adapters, 1):
            assert await use(session, number, number, adapter=adapter) == 0, "of another adapter, or of the base model"
        for number, adapter in enumerate(adapters, 1):
            assert await use(session, 100 + number, number, adapter=adapter) == SHARED
        (pool,) = (await api.stats()).pools
        assert (pool.num_cached_blocks, pool.num_tenants) == (51 * 2, 1)
        await api.audit()


@pytest.mark.parametrize("stored", SCOPES, ids=str)
async def test_every_call_looks_in_its_own_scope(api: Api, stored: dict[str, str]) -> None:
    session = await api.open(engine=False)
    await use(session, 1, 7, **stored)
    for asked in SCOPES:
        wanted = SHARED if asked == stored else 0
        assert (await session.call("MatchPrefix", token_ids=PROMPT, **asked)).num_matched_tokens == wanted
        assert (await session.call("ExplainMatch", token_ids=PROMPT, **asked)).num_matched_tokens == wanted
        assert (await session.call("CheckAdmission", token_ids=PROMPT, **asked)).num_hit_tokens == wanted
        hints = [pb.PrefixHint(token_ids=PROMPT, **asked)]
        assert list((await session.call("HintPrefix", hints=hints)).num_hinted_tokens) == [wanted]
        pinned = await session.call("PinPrefix", token_ids=PROMPT, ttl_ms=1000, **asked)
        assert pinned.num_pinned_tokens == wanted
        new = pb.NewSequence(sequence_id=2, token_ids=PROMPT, **asked)
        (created,) = (await session.call("CreateSequences", sequences=[new])).results
        assert created.response.num_matched_tokens == wanted
        await session.call("ReleaseSequence", sequence_id=2)
        async with watching(session, **asked) as reader:
            root = root_name(session.opened.pool.spec, **asked)
            assert await reader.snapshot() == (set(names_behind(root, PROMPT)) if wanted else set())


async def test_a_fork_and_a_taken_sequence_stay_with_their_adapter(api: Api) -> None:
    giver, taker = await api.open(engine=False), await api.open(engine=False)
    await giver.call("CreateSequence", sequence_id=1, token_ids=PROMPT, adapter=ADAPTER, cache_salt=SALT)
    await giver.call("ExtendSequence", sequence_id=1, num_tokens=9)
    await giver.call("CommitSequence", sequence_id=1, num_tokens=9, first_token_idx=9)
    await giver.call("ForkSequence", parent_id=1, child_id=2, num_tokens=9)
    more = [*range(50, 54)]
    for session, number in ((giver, 2), (taker, 1)):
        if session is taker:
            offer = (await giver.call("HandOffSequence", sequence_id=1)).offer
            await taker.call("TakeSequence", offer=offer, sequence_id=1)
        await session.call("ExtendSequence", sequence_id=number, num_tokens=13)
        await session.call("CommitSequence", sequence_id=number, num_tokens=13, first_token_idx=9, token_ids=more)
        more = [token + 10 for token in more]
    for tail in ([*range(50, 53)], [*range(60, 63)]):
        prompt = [*PROMPT, *tail]
        own = await giver.call("MatchPrefix", token_ids=prompt, adapter=ADAPTER, cache_salt=SALT)
        assert own.num_matched_tokens == 12
        for others in ({}, {"adapter": ADAPTER}, {"cache_salt": SALT}):
            assert (await giver.call("MatchPrefix", token_ids=prompt, **others)).num_matched_tokens == 0


HOSTILE = [
    ("adapter", "ad" * 31),
    ("adapter", "ad" * 33),
    ("adapter", "AD" * 32),
    ("adapter", "my adapter"),
    ("adapter", "g" * 64),
    ("adapter", "ad" * 32 + "\n"),
    ("cache_salt", "secret" * 50),
    ("cache_salt", "secret\n"),
    ("cache_salt", "secret\0"),
]


@pytest.mark.parametrize(("field", "value"), HOSTILE)
async def test_hostile_values_are_refused_and_not_repeated(api: Api, field: str, value: str) -> None:
    session = await api.open(engine=False)
    calls = {
        "CreateSequence": {"sequence_id": 1, "token_ids": PROMPT},
        "MatchPrefix": {"token_ids": PROMPT},
        "ExplainMatch": {"token_ids": PROMPT},
        "CheckAdmission": {"token_ids": PROMPT},
        "PinPrefix": {"token_ids": PROMPT, "ttl_ms": 1},
    }
    for method, fields in calls.items():
        error = await refusal(session.call(method, **fields, **{field: value}))
        assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", field)
        assert "secret" not in str(error) and "my adapter" not in str(error)
    assert (await api.stats()).pools[0].num_waiting_sequences == 0


async def test_a_sequence_that_is_created_again_has_to_have_the_same_adapter_and_salt(api: Api) -> None:
    session = await api.open(engine=False)
    for _ in range(2):
        await session.call("CreateSequence", sequence_id=1, token_ids=PROMPT, adapter=ADAPTER, cache_salt=SALT)
    for other in ({"adapter": ADAPTER}, {"cache_salt": SALT}, {}):
        again = session.call("CreateSequence", sequence_id=1, token_ids=PROMPT, **other)
        assert (await refusal(again)).reason == "DUPLICATE_SEQUENCE"


async def test_what_another_adapter_has_is_a_cause_of_a_miss(api: Api) -> None:
    session = await api.open()
    storer = Storer(session)
    await storer.store(PROMPT, adapter=ADAPTER)
    await storer.store(PROMPT)
    misses = {miss.cause: miss.num_tokens for miss in (await api.stats()).pools[0].misses}
    assert misses[pb.MATCH_END_OTHER_TENANT] == SHARED


async def test_a_service_of_before_gets_no_adapter_or_salt(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ignore them, and share what must not be shared."""
    monkeypatch.setattr(client_cache, "PROTOCOL_VERSION", 1)
    async with AsyncCacheClient(api.server.address) as client, await client.open_session(SPEC) as session:
        scopes: list[dict[str, Any]] = [{"adapter": ADAPTER}, {"cache_salt": SALT}]
        for scope in scopes:
            hint = pb.PrefixHint(token_ids=PROMPT, **scope)
            for call in (
                lambda scope=scope: session.create_sequence(1, PROMPT, **scope),
                lambda scope=scope: session.match_prefix(PROMPT, **scope),
                lambda scope=scope: session.explain_match(PROMPT, **scope),
                lambda scope=scope: session.pin_prefix(PROMPT, 1000, **scope),
                lambda scope=scope: session.check_admission(PROMPT, **scope),
                lambda hint=hint: session.hint_prefixes(hint),
            ):
                assert (await failure(call())).reason == "PROTOCOL_VERSION_UNSUPPORTED"
            with pytest.raises(KvkeeperError):
                session.watch_events(**scope)
        assert (await session.match_prefix(PROMPT, "a")).num_matched_tokens == 0
    assert (await api.stats()).pools[0].num_tenants == 0


async def test_an_adapter_in_the_spec_of_an_old_client_is_a_pool_of_its_own(api: Api) -> None:
    old = [pb.KvSpec.FromString(SPEC.SerializeToString() + bytes([3 << 3 | 2, 1]) + name) for name in (b"a", b"b")]
    for spec in (SPEC, *old[:1]):
        await use(await api.open(spec=spec, engine=False), 1, 7)
    assert len((await api.stats()).pools) == 2
    session = await api.open(spec=old[0], engine=False)
    assert (await session.call("MatchPrefix", token_ids=PROMPT)).num_matched_tokens == SHARED
