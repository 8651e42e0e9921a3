"""An idle pool that makes room for another KV spec: what reports it, and how to keep the pool."""

import grpc
from structlog.testing import capture_logs

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.metrics import cache_metrics
from tests.api.test_watch_events import watching
from tests.support.worlds.cache_api import Api, refusal, serving, spec_of


async def use(api: Api, model_id: str) -> None:
    session = await api.open(spec=spec_of(model_id=model_id))
    await session.call("CloseSession")


async def models(api: Api) -> list[str]:
    return [pool.pool.spec.model_id for pool in (await api.stats()).pools]


async def test_the_log_the_stats_the_metrics_and_the_watches_tell(api: Api) -> None:
    await use(api, "old")
    watched = await api.open(spec=spec_of(model_id="other"))
    async with watching(watched) as reader:
        await reader.snapshot()
        assert (await api.stats()).num_replaced_pools == 0
        with capture_logs() as logs:
            await api.open(spec=spec_of(model_id="new"))
        event = await reader.next()
        assert (event.kind, event.replaced_model_id) == (pb.EVENT_KIND_POOL_REPLACED, "old")
    (told,) = [entry for entry in logs if entry["event"] == "pool_replaced"]
    assert (told["log_level"], told["model_id"], told["by_model_id"]) == ("warning", "old", "new")
    assert (told["num_blocks"], told["num_cached_blocks"]) == (watched.opened.pool.num_blocks, 0)
    assert (await api.stats()).num_replaced_pools == 1
    (family,) = [
        each
        for each in cache_metrics(api.server.session_manager, api.server.guard)
        if each.name == "kvkeeper_cache_replaced_pools"
    ]
    assert family.samples[0].value == 1
    assert family.documentation
    assert await models(api) == ["other", "new"]


async def test_a_watch_of_the_pool_itself_has_ended_with_its_session(api: Api) -> None:
    session = await api.open(spec=spec_of(model_id="old"))
    async with watching(session) as reader:
        await reader.snapshot()
        await session.call("CloseSession")
        await use(api, "a")
        await use(api, "b")
        assert "old" not in await models(api)
        assert (await refusal(reader.next())).reason == "UNKNOWN_SESSION"


async def test_idle_pools_can_be_kept() -> None:
    async with serving(keep_idle_pools=True) as api:
        await use(api, "a")
        await use(api, "b")
        error = await refusal(api.open(spec=spec_of(model_id="c")))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_POOLS")
        assert error.metadata["flag"] == "--keep-idle-pools"
        assert "--keep-idle-pools" in error.message
        assert "--num-pools" in error.message
        await use(api, "a")
        assert await models(api) == ["a", "b"]
        assert (await api.stats()).num_replaced_pools == 0


async def test_where_no_pool_is_idle_the_refusal_is_that_of_the_number() -> None:
    for keep in (False, True):
        async with serving(keep_idle_pools=keep) as other:
            for model_id in ("a", "b"):
                await other.open(spec=spec_of(model_id=model_id))
            assert (await refusal(other.open(spec=spec_of(model_id="c")))).metadata["flag"] == "--num-pools"
