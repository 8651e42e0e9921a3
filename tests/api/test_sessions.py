"""Sessions: which calls they may make, until when, and what their end leaves."""

import asyncio

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import DEADLINE, SPEC, Api, ManualClock, le64, refusal, refused, serving, spec_of


async def test_open_tells_the_pool_and_close_reclaims(api: Api) -> None:
    session = await api.open(client_name="tester")
    pool = session.opened.pool
    assert len(session.opened.session_id) == 32
    assert (pool.block_size, pool.block_bytes, pool.num_blocks) == (4, 192, (64 << 10) // 192)
    assert pool.arena_bytes == pool.num_blocks * pool.block_bytes
    await session.create(1, 5)
    assert (await session.call("CloseSession")).num_released_sequences == 1
    assert (await refusal(session.call("CloseSession"))).reason == "UNKNOWN_SESSION"
    stats = await api.stats()
    assert (stats.num_opened_sessions, stats.num_reaped_sessions, len(stats.sessions)) == (1, 0, 0)


async def test_epochs_grow_and_only_the_own_one_is_accepted(api: Api) -> None:
    first, second = await api.open(), await api.open()
    assert second.opened.epoch > first.opened.epoch > 0
    first.ids["epoch"] += 7
    await refused(first.call("RenewSession"), "STALE_EPOCH", current_epoch=str(second.opened.epoch))


async def test_an_unknown_session_is_told_so(api: Api) -> None:
    session = await api.open()
    session.ids["session_id"] = "0" * 32
    await refused(session.call("GetSequence", sequence_id=1), "UNKNOWN_SESSION")


async def test_a_close_with_drained_is_idempotent(api: Api) -> None:
    session = await api.open()
    await session.call("CloseSession", drained=True)
    await session.call("CloseSession", drained=True)
    session.ids["epoch"] += 1
    assert (await refusal(session.call("CloseSession", drained=True))).reason == "STALE_EPOCH"


async def test_a_lease_ends_without_messages(api: Api, clock: ManualClock) -> None:
    session = await api.open(ttl_ms=10_000)
    await session.create(1, 5)
    clock.advance(9.9)
    assert (await session.call("RenewSession")).ttl_ms == 10_000
    clock.advance(9.9)
    assert len((await api.stats()).sessions) == 1
    clock.advance(0.2)
    stats = await api.stats()
    assert (len(stats.sessions), stats.num_reaped_sessions) == (0, 1)
    assert stats.pools[0].num_waiting_sequences == 0
    assert (await refusal(session.call("RenewSession"))).reason == "UNKNOWN_SESSION"


async def test_any_one_item_call_renews_the_lease(api: Api, clock: ManualClock) -> None:
    session = await api.open(engine=False)
    await session.create(1, 5)
    for _ in range(4):
        clock.advance(9)
        await session.call("GetSequence", sequence_id=1)
    assert len((await api.stats()).sessions) == 1


async def test_the_shortest_lease_ends_first(api: Api, clock: ManualClock) -> None:
    await api.open(ttl_ms=60_000)
    await api.open(ttl_ms=500)
    clock.advance(0.6)
    assert len((await api.stats()).sessions) == 1
    clock.advance(60)
    assert len((await api.stats()).sessions) == 0


async def test_an_unknown_executor_is_refused(api: Api) -> None:
    call = api.stub.OpenSession(pb.OpenSessionRequest(spec=SPEC, executor=3), timeout=DEADLINE)
    await refused(call, "INVALID_FIELD", field="executor")


async def test_sessions_are_counted() -> None:
    async with serving(max_sessions=2) as api:
        first = await api.open()
        await api.open()
        await refused(api.open(), "OUT_OF_SESSIONS", limit="2")
        await refused(api.open(spec=spec_of(revision="other")), "OUT_OF_SESSIONS")
        assert len((await api.stats()).pools) == 1
        await first.call("CloseSession")
        await api.open()


async def test_renewing_reports_completions(api: Api) -> None:
    session = await api.open()
    await session.prefill(1, 5)
    await session.step(3, release_sequence_ids=le64(1))
    assert (await api.stats()).pools[0].num_fenced_blocks == 0  # the step before has completed
    answer = await session.call("RenewSession", completed_step_id=3)
    assert answer.expected_step_id == 4
    assert (await api.stats()).sessions[0].completed_step_id == 3
    error = await refusal(session.call("RenewSession", completed_step_id=4))
    assert error.metadata["field"] == "completed_step_id"
    error = await refusal(session.call("RenewSession", completed_transfer_ids=le64(1)))
    assert error.metadata["field"] == "completed_transfer_ids"


async def test_a_stopping_service_refuses_new_sessions_and_ends_streams(clock: ManualClock) -> None:
    async with serving(clock=clock, drain_timeout=30) as api:
        session = await api.open()
        stream = api.raw_stream()
        await stream.write(session.step_bytes(1))
        await stream.read()
        draining = asyncio.create_task(api.server.drain())
        async with asyncio.timeout(DEADLINE):
            while not api.server.session_manager.is_draining:
                await api.stats()
        error = await refusal(api.open())
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert error.retry_after is not None
        assert error.retry_after > 0
        await stream.write(session.step_bytes(2))  # live sessions go on
        await stream.read()
        assert not draining.done()
        await session.call("CloseSession")
        await asyncio.wait_for(draining, DEADLINE)
        assert (await refusal(stream.read())).reason == "UNKNOWN_SESSION"


async def test_capabilities_tell_limits_and_pools(api: Api) -> None:
    await api.open()
    answer = await api.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=DEADLINE)
    assert (answer.min_ttl_ms, answer.max_ttl_ms, answer.max_unattached_ttl_ms) == (500, 60_000, 3_600_000)
    assert (answer.max_message_bytes, answer.max_prompt_message_bytes) == (256 << 10, 4 << 20)
    assert (answer.max_sequences, answer.max_tokens_per_sequence, answer.max_sessions) == (256, 1 << 22, 64)
    assert [pool.spec for pool in answer.pools] == [spec_of(tensor_parallel_size=1)]
    assert answer.version


async def test_stats_show_sessions_and_pools(api: Api, clock: ManualClock) -> None:
    session = await api.open(client_name="seen", ttl_ms=5000)
    await session.create(1, 5)
    await api.raw_step(session.start_bytes(1, 1))
    clock.advance(2)
    stats = await api.stats()
    assert stats.uptime_seconds == pytest.approx(2)
    (row,) = stats.sessions
    assert (row.client_name, row.executor, row.step_id, row.num_sequences) == ("seen", pb.EXECUTOR_ENGINE, 1, 1)
    assert (row.lease_left_ms, row.num_attached_processes) == (3000, 0)
    (pool,) = stats.pools
    assert (pool.num_running_sequences, pool.num_referenced_blocks, pool.num_sessions) == (1, 2, 1)
    assert pool.pool == session.opened.pool


async def test_the_core_is_told_the_time_with_each_call_and_each_second(api: Api, clock: ManualClock) -> None:
    session = await api.open(ttl_ms=60_000)
    (pool,) = api.server.session_manager.registry.pools
    ticks: list[float] = []
    pool.manager.maintenance.do_due_work = lambda: ticks.append(pool.manager.state.now) or len(ticks) == 2  # type: ignore[method-assign,func-returns-value]
    clock.advance(0.25)
    await session.call("RenewSession")
    assert (pool.manager.state.now, ticks) == (clock.time(), [])
    clock.advance(3.0)
    assert ticks == [1001.0, 1002.0, 1002.01, 1003.01]  # the second one left something to do
    await session.call("CloseSession", drained=True)
    clock.advance(1.0)
    assert ticks[-1] == 1004.01  # what is cached outlives the session
