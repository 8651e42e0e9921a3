"""What falls due while the cache service itself stands still: it could read no message then, so no client's time has passed.

With virtual time, of which the service sees nothing while it stalls; tests/e2e/test_stopped_processes.py stops a real one.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.memory.timeouts import within
from kvkeeper.cache_service.runtime.clock import MOST_S, StallFreeClock
from tests.support.worlds.cache_api import BLOCK_SIZE, Api, ManualClock, Session, int32s, serving

STALL_S = 15.7  # longer than the usual lease
NUM_BLOCKS = 9


@pytest.fixture
async def stalling(clock: ManualClock) -> AsyncIterator[Api]:
    stall_free = StallFreeClock(clock)
    async with serving(clock=stall_free, num_blocks=NUM_BLOCKS) as served:
        yield served
        await served.audit()
        stall_free.close()


def test_a_stall_counts_for_a_moment_and_nothing_else_is_left_out(clock: ManualClock) -> None:
    stall_free = StallFreeClock(clock)
    first = stall_free.time()
    clock.advance(30.0)
    assert stall_free.time() == pytest.approx(first + 30.0)
    clock.stall(3600.0)
    assert first + 30.0 < stall_free.time() <= first + 30.0 + MOST_S + 1e-6
    clock.advance(-5.0)  # a clock below that stumbles
    assert stall_free.time() <= first + 30.0 + MOST_S + 1e-6
    stall_free.close()


def test_a_callback_comes_at_its_time(clock: ManualClock) -> None:
    stall_free, ran = StallFreeClock(clock), []
    clock.advance(1.0)
    clock.stall(7.0)
    stall_free.call_at(stall_free.time() + 10.0, lambda: ran.append(clock.time()))
    before = clock.time()
    clock.advance(9.9)
    assert not ran
    clock.advance(0.2)
    assert ran == [pytest.approx(before + 10.0)]
    stall_free.close()


@pytest.mark.parametrize("ttl_ms", [500, 10_000])
async def test_a_lease_does_not_end_across_a_stall(stalling: Api, clock: ManualClock, ttl_ms: int) -> None:
    session = await stalling.open(ttl_ms=ttl_ms)
    clock.advance(ttl_ms / 3000)  # the engine is about to renew it
    for _ in range(2):
        clock.stall(STALL_S)
    assert (await session.call("RenewSession")).expected_step_id == 1
    clock.advance(ttl_ms / 1000 - 0.01)
    assert len((await stalling.stats()).sessions) == 1, "a lease has its whole time again"
    clock.advance(0.02)
    stats = await stalling.stats()
    assert (len(stats.sessions), stats.num_reaped_sessions) == (0, 1), "and ends when that is over"


async def test_a_grace_does_not_end_across_a_stall(stalling: Api, clock: ManualClock) -> None:
    session = await stalling.open(ttl_ms=60_000)
    manager = stalling.server.session_manager
    (live,) = manager.sessions
    await _lose_stream(stalling, session)
    assert live.core.grace_deadline is not None
    clock.stall(STALL_S)
    assert (await session.call("RenewSession")).expected_step_id == 2
    await _lose_stream(stalling, session, step_id=2)
    clock.advance(0.6)
    assert manager.num_reaped == 1, "without a stall it ends"


async def _lose_stream(api: Api, session: Session, step_id: int = 1) -> None:
    """Its client goes away."""
    (live,) = api.server.session_manager.sessions
    stream = api.raw_stream()
    await stream.write(session.step_bytes(step_id))
    await stream.read()
    stream.cancel()
    await api.until(lambda _: live.core.grace_deadline is not None)


async def test_a_claim_is_not_forgotten_across_a_stall(stalling: Api, clock: ManualClock) -> None:
    """A sequence that was refused could not be asked for again meanwhile, and keeps its place."""
    session = await stalling.open(ttl_ms=60_000)
    await session.create(1, BLOCK_SIZE * (NUM_BLOCKS - 1))
    first = pb.StepResponse.FromString(await stalling.raw_step(session.start_bytes(1, 1)))
    assert len(int32s(first.start_block_ids)) == NUM_BLOCKS - 1
    await session.create(2, BLOCK_SIZE)
    await stalling.raw_step(session.start_bytes(2, 2))
    assert (await stalling.stats()).pools[0].num_claimed_blocks == 1
    clock.stall(STALL_S)
    clock.advance(1.1)  # a look at what falls due
    assert (await stalling.stats()).pools[0].num_claimed_blocks == 1
    clock.advance(11)
    assert (await stalling.stats()).pools[0].num_claimed_blocks == 0, "no step asks for it any more"


async def test_a_handshake_is_not_too_slow_because_the_service_is(clock: ManualClock) -> None:
    stall_free = StallFreeClock(clock)
    passed: list[float] = []

    async def wait() -> None:
        async with within(stall_free, 5.0):
            clock.stall(STALL_S)
            for seconds in (4.8, 0.3):
                await _turn()
                passed.append(seconds)
                clock.advance(seconds)
            await _turn()
            passed.append(0.0)

    with pytest.raises(TimeoutError):
        await wait()
    assert passed == [4.8, 0.3]
    stall_free.close()


async def _turn() -> None:
    """What is due in the loop runs."""
    for _ in range(3):
        await asyncio.sleep(0)
