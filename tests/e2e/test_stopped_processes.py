"""A cache service with a process that stops for longer than a lease: a live engine goes on as if nothing had happened."""

import grpc

from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions, GenerateOptions, Sampling
from tests.support.processes.fleet import DEADLINE_S, fleet
from tests.support.processes.service_pair import toy_output
from tests.support.worlds.cache_api import failure

LEASE_S = 0.5
PROMPT = list(range(3, 16))


async def test_no_lease_ends_while_the_cache_service_is_stopped() -> None:
    options = GenerateOptions(n=2, sampling=Sampling(max_tokens=400, temperature=0, repetition_penalty=1.0))
    async with (
        fleet(1, {"num_blocks": 256}, lease_ms=int(1000 * LEASE_S)) as services,
        AsyncEngineClient(services.engine_addresses[0], CallOptions(timeout_s=DEADLINE_S, retry_s=0)) as client,
        AsyncCacheClient(services.cache_address, CallOptions(timeout_s=2 * LEASE_S, retry_s=0)) as cache,
    ):
        before = (await cache.stats()).uptime_seconds
        tokens: list[list[int]] = [[], []]
        num_stops = 0
        async for chunk in client.generate(PROMPT, options):
            tokens[chunk.index] += chunk.token_ids
            if num_stops < 2 and len(tokens[0]) >= 100 * (num_stops + 1):
                num_stops += 1
                await services.cache.stop()
                late = await failure(cache.stats())
                assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED, "it said nothing for two leases"
                services.cache.resume()
        assert tokens == [toy_output(PROMPT, 400)] * 2
        assert num_stops == 2
        assert services.cache.events["session_ended"] == services.engines[0].events["session_lost"] == 0
        assert (await cache.stats()).uptime_seconds - before > 4 * LEASE_S, "uptime counts all of it"
