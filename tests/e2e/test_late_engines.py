"""Engines that go on after their lease has ended: what they computed meanwhile never reaches a client.

The blocks of a session that has ended are others' to overwrite, so a step that was under way then may have read anything. Rules
of these tests: the session really ends in the middle of a step, its blocks really change hands and content, and each token that
a client gets is the right one.
"""

import asyncio
import threading

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.cache_service.rpc.convert.kv_spec import kv_spec_message
from kvkeeper.cache_service.server import RunningServer as RunningCache
from kvkeeper.client import AsyncCacheSession
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory
from kvkeeper.engine_service.cache_session.lease import GRACE_S, Lease
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.server import RunningServer as RunningEngine
from kvkeeper.engine_service.server import call_options
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import BLOCK_SIZE, Output, Services, generate, toy_output, until
from tests.support.worlds.cache_api import ManualClock, blocks_of

LEASE_S = 60.0  # renewed every 20 s, so that no renewal is sent while a test lasts
PREFIX = list(range(20, 20 + 3 * BLOCK_SIZE))  # cached by a first request, so that the second one reads it
PROMPT = [*PREFIX, GATE_TOKEN, 7]


def test_a_lease_is_certain_from_the_time_a_message_was_sent() -> None:
    clock = ManualClock()
    lease = Lease(10.0, clock.time)
    assert not lease.is_certain
    sent_at = lease.now()
    clock.advance(GRACE_S / 2)
    lease.renewed(sent_at)
    assert lease.is_certain
    clock.advance(GRACE_S / 2)
    assert not lease.is_certain, "its stream may have broken just after the message, and the grace is over"


def test_a_short_lease_is_certain_for_no_longer_than_it_lasts() -> None:
    clock = ManualClock()
    lease = Lease(GRACE_S / 2, clock.time)
    lease.renewed(lease.now())
    clock.advance(GRACE_S / 4)
    assert lease.is_certain
    clock.advance(GRACE_S / 4)
    assert not lease.is_certain


def test_an_answer_is_waited_for_as_long_as_the_cache_service_itself() -> None:
    """By default longer than a lease: a cache service that stands still ends no lease, so it is worth the wait."""
    assert call_options(EngineConfig(model=HASH_TOY)).timeout_s == EngineConfig(model=HASH_TOY).reconnect_timeout == 20
    assert call_options(EngineConfig(model=HASH_TOY, reconnect_timeout=0.0)).timeout_s == 10
    assert call_options(EngineConfig(model=HASH_TOY, reconnect_timeout=3600.0)).timeout_s == 60
    assert call_options(EngineConfig(model=HASH_TOY)).longest_pause_s == 0.05  # streams stand still until it is found again


class _Late:
    """A cache service and an engine. Time can pass in the middle of a step, for either of them or for both."""

    def __init__(self, world: Services, cache: RunningCache, engine: RunningEngine, gate: threading.Event) -> None:
        self.world, self.cache, self.engine, self.gate = world, cache, engine, gate
        self.engine_clock = ManualClock()
        self.cache_clock = ManualClock()

    @property
    def memory(self) -> KvMemory:
        assert self.engine.engine.memory is not None
        return self.engine.engine.memory


async def _under_way(world: Services) -> tuple[_Late, "asyncio.Task[Output]"]:
    """A request with its first two steps granted, that does not end before the gate opens."""
    cache_clock = ManualClock()
    cache = await world.start_cache(clock=cache_clock, num_blocks=12)
    engine, gate = await world.start_gated_engine(lease_ms=int(1000 * LEASE_S))
    late = _Late(world, cache, engine, gate)
    late.cache_clock = cache_clock
    client = await world.client(engine)
    await generate(client, PREFIX, 1)
    await world.wait_idle()
    late.memory.lease = Lease(LEASE_S, late.engine_clock.time)
    first = late.memory.session.step_id
    request = asyncio.create_task(generate(client, PROMPT))

    async def waits() -> bool:
        return late.memory.session.step_id == first + 2

    await until(waits)
    return late, request


async def _give_to_others(late: _Late) -> None:
    """The session ends, and another one writes into every block that it can get."""
    late.cache_clock.advance(LEASE_S + 1)
    assert not late.cache.session_manager.sessions, "its lease has ended"
    (pool,) = late.cache.session_manager.registry.pools
    other = await (await late.world.cache_client()).open_session(kv_spec_message(pool.info.spec))
    stats = await late.world.pool()
    num_blocks = stats.num_free_blocks + stats.num_cached_blocks
    await other.create_sequence(1, range(1000, 1000 + BLOCK_SIZE * num_blocks))
    granted = (await other.extend(1, BLOCK_SIZE * num_blocks)).block_table
    assert len(granted) == num_blocks > len(PREFIX) // BLOCK_SIZE
    blocks_of(pool)[np.array(granted)] ^= 0x5A
    await other.close()


async def test_a_step_that_outlived_its_lease_is_computed_again(world: Services) -> None:
    late, request = await _under_way(world)
    await _give_to_others(late)
    late.engine_clock.advance(LEASE_S + 1)
    late.gate.set()
    assert (await request).token_ids == [toy_output(PROMPT, 8)]
    assert late.cache.session_manager.num_opened == 3, "the engine's two sessions and the other's"
    await world.wait_idle()


async def test_a_step_that_took_long_counts_where_its_session_lives(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine cannot be certain by its clock, and asks once."""
    late, request = await _under_way(world)
    renewals: list[str] = []
    renew = AsyncCacheSession.renew

    async def counted(session: AsyncCacheSession, *args: int) -> cache_pb.RenewSessionResponse:
        renewals.append(session.session_id)
        return await renew(session, *args)

    monkeypatch.setattr(AsyncCacheSession, "renew", counted)
    late.engine_clock.advance(LEASE_S + 1)
    late.gate.set()
    assert (await request).token_ids == [toy_output(PROMPT, 8)]
    assert late.cache.session_manager.num_opened == 1
    assert len(renewals) <= 2, "one for the late step, one when it has nothing to do"
