"""WatchEvents over the wire: what is told, under which names, and how a watch ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.index.events import watch as events
from kvkeeper.cache_service.rpc import watch_streams as watches
from tests.support.worlds.cache_api import (
    BLOCK_SIZE,
    DEADLINE,
    Api,
    ManualClock,
    Session,
    le32,
    le64,
    refusal,
    serving,
    spec_of,
)

EXAMPLES = json.loads((Path(__file__).parent / "block_names.json").read_text())
SNAPSHOT, STORED, REMOVED = pb.EVENT_KIND_SNAPSHOT, pb.EVENT_KIND_STORED, pb.EVENT_KIND_REMOVED


class Reader:
    """A watch and what a client makes of it, revisions checked."""

    def __init__(self, session: Session, tenant: str = "", *, include_token_ids: bool = False, **scope: str) -> None:
        request = pb.WatchEventsRequest(**session.ids, tenant=tenant, include_token_ids=include_token_ids, **scope)
        self.call = session.api.stub.WatchEvents(request)
        self.revision = 0
        self.names: set[bytes] = set()
        self.tokens = b""  # of all blocks told of, in their order

    async def next(self) -> pb.WatchEventsResponse:
        event = await asyncio.wait_for(self.call.read(), DEADLINE)
        if event is grpc.aio.EOF:
            await self.call  # raises what the watch ended with
        self.revision += 1
        assert event.revision == self.revision
        if event.kind in (SNAPSHOT, STORED):
            assert len(event.parent_names) == len(event.block_names)
            self.names |= set(event.block_names)
            self.tokens += event.token_ids
        elif event.kind == REMOVED:
            self.names -= set(event.block_names)
        return event

    async def snapshot(self) -> set[bytes]:
        while (await self.next()).kind != pb.EVENT_KIND_SNAPSHOT_END:
            pass
        return self.names

    async def until(self, names: set[bytes]) -> None:
        while self.names != names:
            await self.next()


@asynccontextmanager
async def watching(
    session: Session, tenant: str = "", *, include_token_ids: bool = False, **scope: str
) -> AsyncIterator[Reader]:
    reader = Reader(session, tenant, include_token_ids=include_token_ids, **scope)
    try:
        yield reader
    finally:
        reader.call.cancel()


class Storer:
    """Steps of a session that store prompts, one after the other."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.step_id = self.sequence_id = 0

    async def _step(self, **columns: bytes) -> None:
        self.step_id += 1
        await self.session.step(self.step_id, **columns)

    async def store(self, tokens: list[int], **fields: Any) -> None:
        self.sequence_id += 1
        number, size = le64(self.sequence_id), le32(len(tokens))
        await self.session.call("CreateSequence", sequence_id=self.sequence_id, token_ids=tokens, **fields)
        await self._step(start_sequence_ids=number, start_max_new_tokens=size, start_max_hit_tokens=size)
        await self._step(commit_sequence_ids=number, commit_num_tokens=size, commit_num_new_tokens=le32(0))
        await self._step(release_sequence_ids=number)
        await self._step()


def names_of(session: Session, tokens: list[int], tenant: str = "") -> list[bytes]:
    """As the proto's comment says."""
    spec = session.opened.pool.spec
    return names_behind(sha256(spec.SerializeToString(deterministic=True) + b"\0" + tenant.encode()).digest(), tokens)


def names_behind(name: bytes, tokens: list[int]) -> list[bytes]:
    """Of blocks behind a name."""
    names = []
    for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
        name = sha256(name + le32(*tokens[start : start + BLOCK_SIZE])).digest()
        names.append(name)
    return names


@pytest.mark.parametrize("example", EXAMPLES["examples"], ids=lambda example: f"{example['tenant']}-{len(example['blocks'])}")
async def test_names_are_those_of_the_examples(api: Api, example: dict[str, Any]) -> None:
    spec = json_format.ParseDict(EXAMPLES["spec"], pb.KvSpec())
    session = await api.open(spec=spec)
    assert session.opened.pool.spec.SerializeToString(deterministic=True).hex() == EXAMPLES["spec_bytes"]
    tokens = [token for block in example["blocks"] for token in block["token_ids"]]
    scope = {name: example.get(name, "") for name in ("tenant", "adapter", "cache_salt")}
    await Storer(session).store(tokens, **scope)
    async with watching(session, **scope) as reader:
        event = await reader.next()
        names = [block["name"] for block in example["blocks"]]
        assert (event.kind, event.tier) == (SNAPSHOT, pb.TIER_DEVICE)
        assert [name.hex() for name in event.block_names] == names
        assert [name.hex() for name in event.parent_names] == [example["first_parent"], *names[:-1]]


async def test_a_snapshot_comes_first_and_then_every_change(api: Api) -> None:
    session = await api.open()
    storer = Storer(session)
    await storer.store([*range(9)])
    first = names_of(session, [*range(9)])
    async with watching(session) as reader:
        assert await reader.snapshot() == set(first)
        await storer.store([*range(4), *range(50, 54)])
        event = await reader.next()
        second = names_of(session, [*range(4), *range(50, 54)])
        assert (event.kind, list(event.block_names), list(event.parent_names)) == (STORED, second[1:], first[:1])
        await session.call("ClearPrefixCache")
        event = await reader.next()
        assert (event.kind, set(event.block_names)) == (REMOVED, {*first, *second})
        await reader.until(set())


async def test_a_watch_tells_one_tenant_and_the_same_blocks_have_other_names_for_another(api: Api) -> None:
    session = await api.open()
    storer = Storer(session)
    await storer.store([*range(5)], tenant="a")
    async with watching(session, "a") as ours, watching(session, "b") as theirs:
        assert await ours.snapshot() == set(names_of(session, [*range(5)], "a"))
        assert await theirs.snapshot() == set()
        assert (await api.stats()).pools[0].num_tenants == 1  # to be watched does not make a tenant
        await storer.store([*range(5)], tenant="b")
        await theirs.until(set(names_of(session, [*range(5)], "b")))
        await storer.store([*range(9)], tenant="a")
        await ours.until(set(names_of(session, [*range(9)], "a")))
        assert not ours.names & theirs.names


async def test_token_ids_are_told_to_those_who_ask_and_to_each_those_of_its_tenant(api: Api) -> None:
    session = await api.open()
    storer = Storer(session)
    await storer.store([*range(9)], tenant="a")
    await storer.store([*range(20, 25)])
    async with (
        watching(session, "a", include_token_ids=True) as asking,
        watching(session, "a") as plain,
        watching(session, include_token_ids=True) as default,
    ):
        for reader in (asking, plain, default):
            await reader.snapshot()
        await storer.store([*range(13)], tenant="a")
        await storer.store([*range(20, 28), 1])
        for reader in (asking, plain):
            await reader.until(set(names_of(session, [*range(13)], "a")))
        await default.until(set(names_of(session, [*range(20, 28)])))
        assert asking.tokens == le32(*range(12))
        assert default.tokens == le32(*range(20, 28))
        assert plain.tokens == b""


async def test_watches_of_two_pools_do_not_meet(api: Api) -> None:
    session = await api.open()
    other = await api.open(spec=spec_of(revision="2"))
    async with watching(session) as one, watching(other) as two:
        assert (await one.snapshot(), await two.snapshot()) == (set(), set())
        await Storer(other).store([*range(5)])
        await Storer(session).store([*range(5)])
        await one.until(set(names_of(session, [*range(5)])))
        await two.until(set(names_of(other, [*range(5)])))
        assert not one.names & two.names


async def test_the_level_is_told_with_the_snapshot_and_when_it_changes(api: Api) -> None:
    session = await api.open()
    size = (session.opened.pool.num_blocks - 1) * 4
    await session.call("CreateSequence", sequence_id=1, token_ids=[1] * 8, max_tokens=size)
    await session.step(1, start_sequence_ids=le64(1), start_max_new_tokens=le32(8), start_max_hit_tokens=le32(0))
    level = pb.PRESSURE_LEVEL_LOW
    async with watching(session) as reader:
        event = await reader.next()
        assert (event.kind, event.pressure) == (pb.EVENT_KIND_SNAPSHOT_END, level)
        for step_id, share in ((2, 0.7), (3, 0.85)):
            length = le32(int(share * size))
            reply = await session.step(
                step_id, reserve_sequence_ids=le64(1), reserve_min_tokens=length, reserve_max_tokens=length
            )
            assert reply.pressure > level
            level = reply.pressure
            event = await reader.next()
            assert (event.kind, event.pressure) == (pb.EVENT_KIND_PRESSURE, level)
        async with watching(session) as late:
            assert (await late.next()).pressure == level == pb.PRESSURE_LEVEL_HIGH
        await session.step(4, release_sequence_ids=le64(1))
        assert (await reader.next()).pressure == pb.PRESSURE_LEVEL_LOW


async def test_a_watch_ends_with_its_session_and_leaves_nothing_behind(api: Api) -> None:
    session, other = await api.open(), await api.open()
    async with watching(session) as reader, watching(other) as stays:
        await reader.snapshot()
        await stays.snapshot()
        assert (await api.stats()).pools[0].num_watches == 2
        await session.call("CloseSession")
        assert (await refusal(reader.next())).reason == "UNKNOWN_SESSION"
        await Storer(other).store([*range(5)])
        await stays.until(set(names_of(other, [*range(5)])))
    stats = await api.until(lambda stats: stats.pools[0].num_watches == 0)
    assert stats.pools[0].num_lagged_watches == 0
    assert api.server.session_manager.registry.pools[0].manager.state.index.change_log is None


async def test_a_watch_does_not_renew_the_lease(api: Api, clock: ManualClock) -> None:
    session = await api.open(ttl_ms=1000)
    async with watching(session) as reader:
        await reader.snapshot()
        clock.advance(1.0)
        assert (await refusal(reader.next())).reason == "UNKNOWN_SESSION"


async def test_draining_ends_the_watches_and_lets_the_sessions_close() -> None:
    async with serving(drain_timeout=DEADLINE) as api:
        session = await api.open()
        async with watching(session) as reader:
            await reader.snapshot()
            draining = asyncio.create_task(api.server.drain())
            assert (await refusal(reader.next())).reason == "DRAINING"
        async with watching(session) as late:
            assert (await refusal(late.next())).reason == "DRAINING"
        await session.call("CloseSession")
        await draining


async def test_a_reader_that_never_reads_is_cut_off_and_delays_no_other(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WAITING_NAMES", 100)
    session = await api.open()
    storer = Storer(session)
    async with watching(session) as slow, watching(session) as quick:
        await slow.snapshot()
        await quick.snapshot()
        async with asyncio.timeout(60):
            first = 0
            while not (await api.stats()).pools[0].num_lagged_watches:
                tokens = [*range(first, first + 160)]
                await storer.store(tokens)
                await quick.until(set(names_of(session, tokens)))
                await session.call("ClearPrefixCache")
                await quick.until(set())
                first += 160
        assert (await api.stats()).pools[0].num_watches == 1
        error = None
        while error is None:  # what was on its way comes first
            try:
                await slow.next()
            except grpc.aio.AioRpcError as failure:
                error = failure
        assert error.code() is grpc.StatusCode.ABORTED
        assert (await refusal(slow.next())).reason == "WATCH_LAGGED"
        # A new watch starts again from a snapshot.
        async with watching(session) as again:
            assert await again.snapshot() == quick.names


async def test_watches_are_bounded_and_a_place_comes_free(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "MAX_WATCHES", 2)
    session = await api.open()
    async with watching(session) as one, watching(session) as two:
        await one.snapshot()
        await two.snapshot()
        async with watching(session) as three:
            error = await refusal(three.next())
            assert (error.reason, error.metadata) == ("OUT_OF_WATCHES", {"limit": "2"})
        one.call.cancel()
        await api.until(lambda stats: stats.pools[0].num_watches == 1)
        async with watching(session) as four:
            assert await four.snapshot() == set()
