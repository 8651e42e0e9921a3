"""Clients and services of different times: they speak what both know, or one says which side to upgrade."""

import re
from pathlib import Path

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.errors import InvalidField, ProtocolVersionUnsupported
from kvkeeper.cache_service.rpc import session_calls
from kvkeeper.cache_service.rpc.convert.versions import SPOKEN, Versions
from kvkeeper.client import AsyncCacheClient, KvkeeperError
from kvkeeper.client import cache as client_cache
from kvkeeper.engine_service.server import StartError
from tests.support.processes.service_pair import Services, generate, services, toy_output
from tests.support.worlds.cache_api import SPEC, Api

ROOT = Path(__file__).resolve().parents[2]
OF_LATER = Versions(oldest=4, newest=5)


@pytest.mark.parametrize(("named", "spoken"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 3), (1000, 3)])
def test_a_session_speaks_the_older_version(named: int, spoken: int) -> None:
    assert Versions(oldest=1, newest=3).of_session(named) == spoken


@pytest.mark.parametrize("named", [0, 1, 2, 3])
def test_a_client_that_is_too_old_is_told_what_to_upgrade(named: int) -> None:
    with pytest.raises(ProtocolVersionUnsupported, match="4 to 5: upgrade the client") as refused:
        OF_LATER.of_session(named)
    assert refused.value.metadata == {
        "protocol_version": str(named or 1), "oldest_protocol_version": "4", "newest_protocol_version": "5",
    }  # fmt: skip


def test_a_number_below_0_is_no_version() -> None:
    with pytest.raises(InvalidField):
        SPOKEN.of_session(-1)


async def test_the_service_tells_its_versions(api: Api) -> None:
    async with AsyncCacheClient(api.server.address) as client:
        told = await client.capabilities()
        assert (told.oldest_protocol_version, told.newest_protocol_version) == (SPOKEN.oldest, SPOKEN.newest)
        async with await client.open_session(SPEC) as session:
            assert session.pool.num_blocks


async def test_a_message_of_before_there_were_versions_is_served(api: Api) -> None:
    async with grpc.aio.insecure_channel(api.server.address) as channel:
        open_session = channel.unary_unary("/kvkeeper.cache.v1.CacheService/OpenSession")
        old = pb.OpenSessionRequest(spec=SPEC)
        assert b"protocol" not in old.SerializeToString() and not old.protocol_version
        opened = pb.OpenSessionResponse.FromString(await open_session(old.SerializeToString()))
    assert opened.protocol_version == 1


async def test_a_client_refuses_a_service_that_is_too_old(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_cache, "PROTOCOL_VERSION", SPOKEN.newest + 2)
    monkeypatch.setattr(client_cache, "OLDEST_PROTOCOL_VERSION", SPOKEN.newest + 1)
    async with AsyncCacheClient(api.server.address) as client:
        with pytest.raises(KvkeeperError, match=r"version 3 .* 4 to 5: upgrade the cache service") as refused:
            await client.open_session(SPEC)
    assert refused.value.reason == "PROTOCOL_VERSION_UNSUPPORTED"


async def test_an_engine_goes_on_with_a_newer_service_and_stops_at_one_that_is_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    async with services() as world:
        await world.start_cache()
        monkeypatch.setattr(session_calls, "SPOKEN", Versions(oldest=1, newest=SPOKEN.newest + 1))
        client = await world.client(await world.start_engine())
        assert (await generate(client, [1, 2, 3], 4)).token_ids == [toy_output([1, 2, 3], 4)]
        await _is_refused(world, monkeypatch)


async def _is_refused(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_calls, "SPOKEN", OF_LATER)
    with pytest.raises(StartError, match=r"PROTOCOL_VERSION_UNSUPPORTED: .*: upgrade the client"):
        await world.start_engine()


async def test_an_engine_says_that_the_service_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_cache, "PROTOCOL_VERSION", SPOKEN.newest + 2)
    monkeypatch.setattr(client_cache, "OLDEST_PROTOCOL_VERSION", SPOKEN.newest + 1)
    async with services() as world:
        await world.start_cache()
        with pytest.raises(StartError, match=r"PROTOCOL_VERSION_UNSUPPORTED: .*: upgrade the cache service"):
            await world.start_engine()


def test_all_clients_and_the_service_are_of_one_time() -> None:
    node = (ROOT / "clients" / "node" / "lib" / "cache.js").read_text()
    found = re.search(r"PROTOCOL_VERSION = (\d+);", node)
    assert found is not None
    assert SPOKEN.oldest <= int(found[1]) <= SPOKEN.newest
    assert SPOKEN.oldest <= client_cache.PROTOCOL_VERSION == SPOKEN.newest
