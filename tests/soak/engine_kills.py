"""Row 18: one of several engines is killed under load, and it harms its own clients alone.

Those without resubmit_s are told UNAVAILABLE before the engine is started again; those with it, of the asyncio client and
of the blocking one, get the rest of their tokens from the engine that is started again at the address, which finds what its
predecessor had computed in the prefix cache. Clients of other engines notice nothing.
"""

import random

from tests.soak.cache_kills import check_nothing_is_left
from tests.soak.row import Counts
from tests.support.processes.fleet import Fleet, fleet
from tests.support.processes.fleet_load import Load, load_on

TOLD_WITHIN_S = 1.0  # a client of a dead engine; a dead process closes its connections at once
_NUM_BLOCKS = 1024  # so many that nothing is evicted before an engine is back
_MOST_TRIES = 5
_WORKERS = {"plain": 2, "resubmitting": 2, "threaded": 1}


async def run(seed: int, num_engines: int, num_kills: int) -> Counts:
    """Counts kills; faults are streams cut by them and streams resumed after them. Worst: seconds until a client was told."""
    rng = random.Random(seed)
    async with fleet(num_engines, {"num_blocks": _NUM_BLOCKS}) as services:
        async with load_on(services, rng, frozenset()) as load:
            load.start(**_WORKERS)
            await load.until_chunks(1, *range(num_engines))
            kills = 0
            # More of them where one cut no client: a busy machine may have sent every last token before it.
            while kills < num_kills or min(load.num_cut, load.num_survived) < num_kills:
                assert kills < _MOST_TRIES * num_kills, f"{kills} kills cut {load.num_cut} and left {load.num_survived}"
                await load.until_chunks(rng.choice([1, 10, 100, 300]))
                await _kill(services, load, kills % num_engines)
                kills += 1
            await load.stop()
        await check_nothing_is_left(services)
    assert load.longest_cut_s <= TOLD_WITHIN_S
    return Counts(kills, load.num_cut + load.num_survived, load.longest_cut_s)


async def _kill(services: Fleet, load: Load, victim: int) -> None:
    others = [number for number in range(len(services.engines)) if number != victim]
    await load.until(lambda: all(load.acknowledged(victim, kind) for kind in ("plain", "resubmitting")))
    load.note_kill(victim)
    services.engines[victim].process.kill()
    await load.until(lambda: not load.acknowledged(victim, "plain"))
    await services.engines[victim].end()
    await load.until_chunks(1, *others)
    cached = load.num_cached[victim]
    await services.start_engine(victim)
    await load.until_chunks(1, victim)
    load.note_start(victim)
    await load.until(lambda: not load.resumed(victim))
    assert load.num_cached[victim] > cached, "the second start found nothing in the cache"
