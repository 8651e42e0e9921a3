"""Shares: one caller cannot hold all sessions, or all sequences of a pool, so that another one that comes finds some.

A caller is a tenant, or a connection where there are no credentials, or, on a Unix socket, what a client calls itself.
"""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common.trust.caller import Caller, Role
from tests.support.trust.guarded_server import TokenFile, bearer
from tests.support.worlds.cache_api import DEADLINE, SPEC, Api, Session, commit_columns, int32s, le32, le64, refusal, serving

LISTEN = "127.0.0.1:0"


@asynccontextmanager
async def another_connection(api: Api) -> AsyncIterator[Api]:
    """The same service, by a channel that shares no connection with others."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(api.server.address, options=options) as channel:
        yield Api(api.server, channel)


async def test_one_connection_leaves_a_tenth_of_the_sessions_to_others() -> None:
    async with serving(listen=LISTEN) as api, another_connection(api) as engine:
        sessions = [await api.open(engine=False, ttl_ms=3_600_000) for _ in range(58)]
        for engine_too in (False, True):
            error = await refusal(api.open(engine=engine_too))
            assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_SESSIONS")
            assert error.metadata == {"limit": "58"}
        await engine.open()
        await sessions[0].call("CloseSession")
        await api.open()


async def test_all_sessions_can_be_in_use() -> None:
    async with serving(listen=LISTEN) as api, contextlib.AsyncExitStack() as stack:
        for _ in range(58):
            await api.open()
        other = await stack.enter_async_context(another_connection(api))
        for _ in range(6):
            await other.open()
        assert (await refusal(other.open())).metadata == {"limit": "64"}


async def test_on_a_unix_socket_a_client_is_what_it_calls_itself() -> None:
    async with serving(max_sessions=10) as api:
        for _ in range(9):
            await api.open(client_name="leaks")
        assert (await refusal(api.open(client_name="leaks"))).metadata == {"limit": "9"}
        await api.open(client_name="engine")


async def fill(session: Session, num: int) -> None:
    for sequence_id in range(1, num + 1):
        await session.create(sequence_id, 1)


async def test_one_connection_leaves_a_tenth_of_the_sequences_to_others() -> None:
    async with serving(listen=LISTEN, max_sequences=20) as api, another_connection(api) as other:
        first, second = await api.open(engine=False), await api.open(engine=False)
        await fill(first, 10)
        await fill(second, 8)
        error = await refusal(second.create(9, 1))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_SEQUENCES")
        assert error.metadata == {"limit": "18"}
        asked = {"num_prompt_tokens": 1}
        assert (await second.call("CheckAdmission", **asked)).verdict == pb.ADMISSION_VERDICT_LATER
        engine = await other.open()
        assert (await engine.call("CheckAdmission", **asked)).verdict == pb.ADMISSION_VERDICT_NOW
        await fill(engine, 2)
        assert (await refusal(engine.create(3, 1))).metadata == {"limit": "20"}
        await first.call("ReleaseSequence", sequence_id=1)
        await second.create(9, 1)


async def test_forks_count_for_the_share() -> None:
    async with serving(listen=LISTEN, max_sequences=10) as api:
        one_item, steps = await api.open(engine=False), await api.open(engine=False)
        await fill(one_item, 4)
        await fill(steps, 4)
        await steps.step(1, start_sequence_ids=le64(1), start_max_new_tokens=le32(1), start_max_hit_tokens=le32(0))
        forks = {"fork_parent_ids": le64(1, 1), "fork_child_ids": le64(8, 9), "fork_num_tokens": le32(1, 1)}
        answer = await steps.step(2, **commit_columns(1, 1), **forks)
        assert int32s(answer.fork_results) == [pb.ITEM_RESULT_OK, pb.ITEM_RESULT_NO_ROOM]
        await one_item.call("ExtendSequence", sequence_id=1, num_tokens=1)
        await one_item.call("CommitSequence", sequence_id=1, num_tokens=1)
        error = await refusal(one_item.call("ForkSequence", parent_id=1, child_id=9))
        assert (error.reason, error.metadata) == ("OUT_OF_SEQUENCES", {"limit": "9"})


async def test_an_engine_alone_may_have_all_sequences() -> None:
    async with serving(listen=LISTEN, max_sequences=20) as api:
        await fill(await api.open(), 20)


async def test_a_tenant_leaves_a_tenth_to_others_however_many_connections_it_has(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.toml")
    tokens = {tenant: file.add(Caller(tenant, tenant, Role.ENGINE)) for tenant in ("a", "b")}
    async with serving(listen=LISTEN, max_sessions=10, auth_tokens=file.path) as api, another_connection(api) as second:

        async def open_one(over: Api, tenant: str) -> pb.OpenSessionResponse:
            request = pb.OpenSessionRequest(spec=SPEC, executor=pb.EXECUTOR_CACHE)
            return await over.stub.OpenSession(request, timeout=DEADLINE, metadata=bearer(tokens[tenant]))

        for number in range(9):
            await open_one((api, second)[number % 2], "a")
        assert (await refusal(open_one(second, "a"))).metadata == {"limit": "9"}
        await open_one(second, "b")
