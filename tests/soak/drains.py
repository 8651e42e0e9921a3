"""Row 25: services are asked to stop under load, in turn, and lose nothing that was acknowledged.

A request is acknowledged by the first message of its stream, or by the answer to its SubmitRequest. An engine that was asked
to stop ends what it has acknowledged, lets submitted results be fetched, refuses everything new with DRAINING and a time to
come again, and exits with 0. A cache service refuses new sessions in the same way; what its engines have acknowledged goes on
when it is started again.
"""

import random

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, CallOptions, KvkeeperError
from tests.soak.cache_kills import check_nothing_is_left
from tests.soak.row import Counts
from tests.support.processes.fleet import Fleet, fleet
from tests.support.processes.fleet_load import Load, load_on
from tests.support.worlds.cache_api import SPEC

_REFUSALS = frozenset({"CACHE_SERVICE_DOWN", "DRAINING"})
_WORKERS = {"plain": 2, "resubmitting": 1, "submitting": 1, "late": 1}


async def run(seed: int, num_engines: int, num_rounds: int) -> Counts:
    """Counts drains; faults are requests that were under way in one and ended well."""
    rng = random.Random(seed)
    async with fleet(num_engines, {"num_blocks": 24 * num_engines, "drain_timeout": 0.5}) as services:
        async with load_on(services, rng, _REFUSALS) as load:
            load.start(**_WORKERS)
            for _ in range(num_rounds):
                for number in range(num_engines):
                    await load.until_chunks(1, *range(num_engines))
                    await load.until_chunks(rng.choice([1, 10, 100, 300]))
                    await _drain_engine(services, load, number)
                await load.until_chunks(1, *range(num_engines))
                await _drain_cache(services, load)
            await load.until_chunks(1, *range(num_engines))
            await load.stop()
        await check_nothing_is_left(services)
    num_drains = num_rounds * (num_engines + 1)
    assert load.num_ended["late"] >= num_engines * num_rounds
    return Counts(num_drains, load.num_survived)


async def _drain_engine(services: Fleet, load: Load, number: int) -> None:
    await load.until(lambda: all(load.acknowledged(number, kind) for kind in _WORKERS))
    num_refused = load.refused["DRAINING"]
    load.note_drain(number)
    services.engines[number].terminate()
    await load.until(lambda: load.refused["DRAINING"] > num_refused)
    code = await services.engines[number].end()
    assert (code, services.engines[number].events["drain_timeout"]) == (0, 0), services.engines[number].tail
    await load.until(lambda: not load.resumed(number) or all(a.kind == "resubmitting" for a in load.resumed(number)))
    await services.start_engine(number)
    load.note_start(number)


async def _drain_cache(services: Fleet, load: Load) -> None:
    async with AsyncCacheClient(services.cache_address, CallOptions(retry_s=0)) as client:
        load.note_fault(*range(len(services.engines)))
        services.cache.terminate()
        while True:
            try:
                await (await client.open_session(SPEC, pb.EXECUTOR_ENGINE)).close()
            except KvkeeperError as error:
                refusal = error
                break
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING"), refusal
    assert refusal.retry_after
    assert await services.cache.end() == 0, services.cache.tail
    await services.start_cache()
