"""The metrics of both services over HTTP, and that their numbers are right."""

import asyncio
import itertools
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvkeeper.common.service.process import StartError
from kvkeeper.engine_service.loop.stats import EngineStats, Timings
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.unread_tokens import Added, Slots, UnreadTokens
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import Services, generate, toy_output, until

ANY_PORT = "127.0.0.1:0"
Samples = dict[str, float]


async def scrape(address: str) -> Samples:
    """Value by name, and for buckets by name and bound."""
    return {
        sample.name + (f"|{sample.labels['le']}" if "le" in sample.labels else ""): sample.value
        for sample in await fetch(address)
    }


async def scrape_labels(address: str, name: str, label: str) -> Samples:
    """Value by a label, of one metric."""
    return {sample.labels[label]: sample.value for sample in await fetch(address) if sample.name == name}


async def fetch(address: str) -> list[Sample]:
    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return answer.read().decode()

    return [sample for family in text_string_to_metric_families(await asyncio.to_thread(read)) for sample in family.samples]


async def test_both_services_tell_what_happened(world: Services) -> None:
    cache = await world.start_cache(metrics_listen=ANY_PORT)
    engine = await world.start_engine(metrics_listen=ANY_PORT)
    client = await world.client(engine)
    assert cache.metrics is not None
    assert engine.metrics is not None
    prompt = list(range(1, 10))
    for _ in range(2):
        assert (await generate(client, prompt, 8)).token_ids == [toy_output(prompt, 8)]
    await world.wait_idle()
    told = await scrape(engine.metrics.address)
    assert told["kvkeeper_engine_completed_requests_total"] == 2
    assert told["kvkeeper_engine_new_tokens_total"] == 16
    assert told["kvkeeper_engine_cached_tokens_total"] == 8
    assert told["kvkeeper_engine_prefill_tokens_total"] == 10
    assert told["kvkeeper_engine_time_to_first_token_seconds_count"] == 2
    assert told["gen_ai_server_time_per_output_token_seconds_count"] == 14
    assert told["kvkeeper_engine_time_between_tokens_seconds_bucket|+Inf"] == 14
    assert told["kvkeeper_engine_request_duration_seconds_count"] == 2
    assert 0 < told["kvkeeper_engine_cache_wait_share"] < 1
    assert 0 < told["kvkeeper_engine_batch_utilization"] <= 1 / 256 + 1e-9
    assert 0 < told["kvkeeper_engine_token_budget_utilization"] < 0.01
    stats = await client.stats()
    assert told["kvkeeper_engine_time_to_first_token_p50_seconds"] == pytest.approx(stats.time_to_first_token_p50_ms / 1000)
    pool = await scrape(cache.metrics.address)
    counts = await world.pool()
    assert pool["kvkeeper_cache_free_blocks"] == counts.num_free_blocks
    assert pool["kvkeeper_cache_hit_tokens_total"] == counts.num_hit_tokens == 8
    assert pool["kvkeeper_cache_live_sessions"] == 1


async def test_utilization_is_of_the_blocks_held(world: Services) -> None:
    await world.start_cache(num_blocks=33)
    engine, gate = await world.start_gated_engine()
    client = await world.client(engine)
    await client.submit([GATE_TOKEN] + [1] * 31)

    async def holds_blocks() -> bool:
        return engine.engine.memory is not None and engine.engine.memory.kv_utilization > 0

    await until(holds_blocks)
    held = (await world.pool()).num_referenced_blocks  # those of the next step, which is asked for meanwhile, among them
    assert held >= 8
    assert (await client.stats()).kv_utilization == pytest.approx(held / 32)
    gate.set()


@pytest.mark.parametrize("sizes", [[1], [3, 0, 5], [5000, 10]])
def test_percentiles_are_exact_over_what_was_lately(sizes: list[int]) -> None:
    random = np.random.default_rng(0)
    timings, seen = Timings(), np.zeros(0)
    for size in sizes:
        values = random.exponential(0.05, size)
        timings.add(values)
        seen = np.concatenate([seen, values])
    for percentile in (50, 99):
        assert timings.percentile_ms(percentile) == pytest.approx(float(np.percentile(seen[-4096:], percentile)) * 1000)
    assert timings.num == len(seen)
    assert timings.histogram.total == pytest.approx(seen.sum())
    assert timings.histogram.counts[0] == np.count_nonzero(seen <= 0.001)


async def test_times_told_are_those_of_the_tokens(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed again from the time of each token, and compared with both ways to ask."""
    tokens: dict[tuple[Generation, int], list[float]] = {}
    time_token, add = EngineStats.time_token, UnreadTokens.add

    def noted(stats: EngineStats, generation: Generation, index: int) -> None:
        time_token(stats, generation, index)
        tokens.setdefault((generation, index), []).append(generation.last_token_at[index])

    def add_noted(unread: UnreadTokens, slots: Slots, token_ids: Slots, now: float) -> Added:
        added = add(unread, slots, token_ids, now)
        owners = {generation.request.slot: generation for generation in engine.engine.requests._by_request.values()}
        for slot in slots[added.is_added].tolist():
            tokens[owners[slot], 0].append(now)
        return added

    monkeypatch.setattr(EngineStats, "time_token", noted)
    monkeypatch.setattr(UnreadTokens, "add", add_noted)
    await world.start_cache()
    engine = await world.start_engine(metrics_listen=ANY_PORT)
    client = await world.client(engine)
    prompts = [[place + 1, 5, 6] * 3 for place in range(8)]
    await asyncio.gather(*(generate(client, prompt, 12, n=1 + place % 2) for place, prompt in enumerate(prompts)))
    first = [min(came[0] for (one, _), came in tokens.items() if one is each) - each.started_at for each, _ in tokens]
    first = list(dict(zip((each for each, _ in tokens), first, strict=True)).values())
    between = [later - earlier for came in tokens.values() for earlier, later in itertools.pairwise(came)]
    assert (len(first), len(between)) == (8, 12 * 11)
    stats, told = await client.stats(), await scrape(engine.metrics.address if engine.metrics else "")
    for name, values in (("time_to_first_token", first), ("time_between_tokens", between)):
        for percentile in (50, 99):
            expected = float(np.percentile(values, percentile))
            assert getattr(stats, f"{name}_p{percentile}_ms") / 1000 == pytest.approx(expected, rel=1e-6)
            assert told[f"kvkeeper_engine_{name}_p{percentile}_seconds"] == pytest.approx(expected, rel=1e-6)
    assert stats.time_to_first_token_p50_ms != stats.time_between_tokens_p50_ms


async def test_a_metrics_address_that_is_taken_is_told_and_nothing_stays(world: Services) -> None:
    cache = await world.start_cache(metrics_listen=ANY_PORT)
    assert cache.metrics is not None
    with pytest.raises(StartError, match="--metrics-listen"):
        await world.start_engine(metrics_listen=cache.metrics.address)
    assert await scrape(cache.metrics.address)
