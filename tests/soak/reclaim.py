"""Row 15: a session that is dead or hangs is reclaimed in time, and no other ever is.

Deaths are real: processes that map the arena are killed or stopped at random moments while a lively session beside them keeps
renewing. Patience is virtual: thirty days in which sessions do nothing but renew as late as they may, with a clock that also
stands still and jumps back.
"""

import asyncio
import random
import signal
import time

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.soak.row import Counts
from tests.support.processes.child_processes import Attached, Processes
from tests.support.worlds.cache_api import DEADLINE, Api, ManualClock, Session, le32, le64, serving

TTL = 0.5
DEATH_WITHIN = 1.0
HANG_WITHIN = TTL + 2.0
_NUM_ENGINES = 8
_ROUNDS = 2
DAYS = 30
_DAY = 86_400.0
_LEASE = 60.0


async def deaths(seed: int) -> Counts:
    """Counts killed and stopped engines; each is a fault by itself."""
    rng, processes = random.Random(seed), Processes()
    async with serving() as api:
        lively = await api.open(ttl_ms=30_000)
        try:
            for _ in range(_ROUNDS):
                await _round(api, lively, processes, rng)
        finally:
            await processes.end()
        await api.audit()
    return Counts(_NUM_ENGINES * _ROUNDS, _NUM_ENGINES * _ROUNDS)


async def _round(api: Api, lively: Session, processes: Processes, rng: random.Random) -> None:
    """Engines that hold blocks end in any order; each gives them back in time."""
    sessions = [await api.open(ttl_ms=60_000) for _ in range(_NUM_ENGINES)]
    children = [await processes.attach(session) for session in sessions]
    for session in sessions:
        await session.create(1, 10)
        await session.step(1, start_sequence_ids=le64(1), start_max_new_tokens=le32(64), start_max_hit_tokens=le32(0))
    for session in sessions[::2]:  # committed in part, so that some of what they hold stays cached
        await session.step(2, commit_sequence_ids=le64(1), commit_num_tokens=le32(8), commit_num_new_tokens=le32(0))
    ends = list(zip(sessions, children, strict=True))
    rng.shuffle(ends)
    for session, child in ends:
        if rng.random() < 0.75:
            await _dies(api, lively, session, child)
        else:
            await _hangs(api, lively, session, child)


async def _dies(api: Api, lively: Session, session: Session, child: Attached) -> None:
    child.process.kill()
    await _is_gone(api, lively, session, DEATH_WITHIN)


async def _hangs(api: Api, lively: Session, session: Session, child: Attached) -> None:
    """Stopped; its lease is as short as may be from now on. What it may write stays in quarantine until it is killed."""
    live = next(live for live in api.server.session_manager.sessions if live.core.id == session.opened.session_id)
    live.core.ttl = TTL
    await session.call("RenewSession")
    api.server.session_manager._watch_deadlines()
    child.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    await asyncio.wait_for(live.over.wait(), HANG_WITHIN)
    assert time.monotonic() - started >= TTL / 2, "reaped before its lease ended"
    child.process.kill()
    await _is_gone(api, lively, session, DEATH_WITHIN)


async def _is_gone(api: Api, lively: Session, session: Session, within: float) -> None:
    """Session and blocks are back in time, while the lively one goes on."""
    (pool,) = api.server.session_manager.registry.pools
    async with asyncio.timeout(within):
        while session.opened.session_id in pool.sessions | pool.quarantines:
            await lively.call("RenewSession")


async def idle(seed: int) -> Counts:
    """Counts days that a session only renewed; faults are late renewals and a clock that stumbles.

    Three sessions; one falls silent in the end and is reaped, so reaping was on.
    """
    rng, clock, num_faults = random.Random(seed), ManualClock(), 0
    async with serving(clock=clock) as api:
        sessions = [await api.open(ttl_ms=int(1000 * _LEASE)) for _ in range(3)]
        manager = api.server.session_manager
        ids = [(session.opened.session_id, session.opened.epoch) for session in sessions]
        end = clock.time() + DAYS * _DAY
        while clock.time() < end:
            if rng.random() < 0.01:
                clock.advance(-rng.random() * _LEASE)
                num_faults += 1
            clock.advance(rng.uniform(0.5, 0.999) * _LEASE)
            for session_id, epoch in ids:
                manager.require(session_id, epoch)  # raises where it was reaped
            num_faults += 1
        assert manager.num_reaped == 0
        async with asyncio.timeout(DEADLINE):
            await sessions[0].call("RenewSession")
            clock.advance(_LEASE / 2)
            await sessions[1].call("RenewSession")
            await sessions[0].call("RenewSession")
            clock.advance(_LEASE / 2)
            stats: pb.GetStatsResponse = await api.stats()
        assert [len(stats.sessions), stats.num_reaped_sessions] == [2, 1]
    return Counts(DAYS * len(ids), num_faults)
