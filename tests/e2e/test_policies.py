"""Policies through both services: the order in which requests end, and what the engine reports of it."""

import asyncio
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvkeeper.client import AsyncEngineClient
from kvkeeper.engine_service.server import RunningServer
from kvkeeper.engine_service.values.request import SequenceState
from tests.e2e.test_metrics import ANY_PORT, scrape
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import Services, generate, toy_output, until
from tests.support.worlds.cache_api import failure

# Prompt, priority, tenant. One at a time runs, and the first one holds it until all wait. The shortest job first counts a token
# as two milliseconds of waiting: prompts that differ by hundreds of tokens keep their order also where arrivals are slow.
JOBS: dict[str, tuple[list[int], int, str]] = {
    "long": ([1] * 600, 0, "a"),
    "next": ([2] * 180, 0, "a"),
    "short": ([3] * 3, -100, "a"),
    "high": ([4] * 380, 100, "b"),
}
NUM_BLOCKS = 512


async def order_of(engine: RunningServer, client: AsyncEngineClient, gate: threading.Event) -> list[str]:
    """Names of the jobs as they end."""
    ended: list[str] = []

    async def run(name: str, prompt: list[int], **options: Any) -> None:
        assert (await generate(client, prompt, 2, **options)).token_ids == [toy_output(prompt, 2)]
        ended.append(name)

    def is_waiting(count: int) -> Any:
        async def check() -> bool:
            stats = await client.stats()
            may_start = all(one.state is SequenceState.WAITING for one in engine.engine.scheduler.waiting.sequences)
            return stats.num_waiting_requests == count and may_start and (count > 0 or stats.num_running_requests > 0)

        return check

    tasks = [asyncio.create_task(run("first", [GATE_TOKEN], tenant="a"))]
    await until(is_waiting(0))
    for count, (name, (prompt, priority, tenant)) in enumerate(JOBS.items(), 1):
        tasks.append(asyncio.create_task(run(name, prompt, priority=priority, tenant=tenant)))
        await until(is_waiting(count))
    gate.set()
    await asyncio.gather(*tasks)
    return ended[1:]


@pytest.mark.parametrize(
    ("policy", "fair_share", "expected"),
    [
        ("fcfs", False, ["long", "next", "short", "high"]),
        ("sjf", False, ["short", "next", "high", "long"]),
        ("priority", False, ["high", "long", "next", "short"]),
        ("fcfs", True, ["high", "long", "next", "short"]),
        ("sjf", True, ["high", "short", "next", "long"]),
    ],
)
async def test_requests_end_in_the_order_of_the_policy(
    world: Services, policy: str, fair_share: bool, expected: list[str]
) -> None:
    await world.start_cache(num_blocks=NUM_BLOCKS)
    engine, gate = await world.start_gated_engine(policy=policy, fair_share=fair_share, max_sequences=1)
    client = await world.client(engine)
    assert await order_of(engine, client, gate) == expected
    stats = await client.stats()
    assert (stats.scheduling_policy, stats.num_policy_switches) == (policy, 0)


async def test_the_adaptive_policy_switches_with_the_load_and_says_so(world: Services) -> None:
    await world.start_cache(num_blocks=NUM_BLOCKS)
    engine, gate = await world.start_gated_engine(max_sequences=1, prefill_budget=8, metrics_listen=ANY_PORT)
    client = await world.client(engine)
    assert (await client.stats()).scheduling_policy == "fcfs"
    assert engine.metrics is not None
    metrics = engine.metrics.address

    with capture_logs() as lines:

        async def agreed() -> list[str] | None:
            """The policies that were switched to, when a moment was found without a switch between the answers."""
            num_told = (await scrape(metrics))["kvkeeper_engine_policy_switches_total"]
            switched = [line["policy"] for line in lines if line["event"] == "policy_switched"]
            num_switches = (await client.stats()).num_policy_switches
            return switched if num_told == num_switches == len(switched) else None

        assert await order_of(engine, client, gate) == ["short", "next", "high", "long"]
        assert (await until(agreed))[0] == "sjf"


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority", "adaptive"])
async def test_what_can_never_fit_is_refused_and_blocks_no_other_request(world: Services, policy: str) -> None:
    await world.start_cache(num_blocks=9)
    client = await world.client(await world.start_engine(policy=policy, decode_budget=1))
    never = failure(generate(client, [1] * 40, 8, priority=1000))
    error, ended = await asyncio.gather(never, generate(client, [1, 2, 3]))
    assert error.reason == "NEVER_FITS"
    assert ended.token_ids == [toy_output([1, 2, 3], 8)]
