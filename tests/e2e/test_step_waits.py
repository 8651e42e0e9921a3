"""Why steps wait, as the engine counts it: each cause that the loop sees is provoked.

Those that the scheduler sees are provoked in tests/unit/engine_service/scheduler/test_waits.py, too.
"""

import asyncio
from typing import Any

import pytest

from kvkeeper.client import BeamSearch, Sampling
from kvkeeper.engine_service.cache_session.lease import Lease
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.scheduler.plan import StepWait
from kvkeeper.engine_service.server import RunningServer
from tests.e2e.test_metrics import ANY_PORT, scrape_labels
from tests.e2e.test_take_over import is_closed
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import GREEDY, Services, generate, until

PROMPT = [1, 2, 3, 4, 5]


def waits(engine: RunningServer) -> set[StepWait]:
    return set(engine.engine.stats.num_waits)


async def run(world: Services, *, engine: dict[str, Any] | None = None, **options: Any) -> RunningServer:
    """An engine that has served one request."""
    await world.start_cache()
    running = await world.start_engine(**{"overlap": True, **(engine or {})})
    await generate(await world.client(running), PROMPT, 20, **options)
    return running


async def test_plain_steps_wait_for_nothing_and_the_metric_names_all_causes(world: Services) -> None:
    running = await run(world, engine={"metrics_listen": ANY_PORT})
    assert waits(running) == set()
    client = await world.client(running)
    await generate(client, [1, 2, 3], 20, n=3)
    assert (await client.stats()).num_step_waits == {"copies": 1}
    assert running.metrics is not None
    counts = await scrape_labels(running.metrics.address, "kvkeeper_engine_step_waits_total", "reason")
    assert counts.keys() == {wait.value for wait in StepWait}
    assert counts == {wait.value: running.engine.stats.num_waits[wait] for wait in StepWait}
    assert counts["copies"] == 1, "two of three continuations leave the block in which their prompt ends"


async def test_without_overlap_each_step_waits(world: Services) -> None:
    running = await run(world, engine={"overlap": False})
    assert running.engine.stats.num_waits.keys() == {StepWait.OVERLAP_OFF}
    assert running.engine.stats.num_waits[StepWait.OVERLAP_OFF] >= 19


async def test_beam_searches(world: Services) -> None:
    running = await run(world, beam_search=BeamSearch(num_beams=2))
    assert StepWait.BEAM_SEARCHES in waits(running)


async def test_constraints(world: Services) -> None:
    await world.start_cache()
    model = load_served_model(EngineConfig(model=str(DEMO_MODEL_DIR), progress=False))
    running = await world.start_engine(model, overlap=True, block_size=16)
    await generate(await world.client(running), "def ", 8, Sampling(temperature=0, regex="[0-9]{20}"))
    assert waits(running) == {StepWait.CONSTRAINTS}


async def test_blocks_that_are_demoted_hold_up_no_step(world: Services) -> None:
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    running = await world.start_engine(overlap=True)
    client = await world.client(running)
    for first in range(6):
        await generate(client, [first, *PROMPT], 30)
    assert (await world.pool()).num_demoted_blocks > 0
    assert StepWait.TRANSFERS not in waits(running)


async def test_a_lease_that_may_have_ended(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "is_certain", False)
    running = await run(world)
    assert waits(running) == {StepWait.LEASE}


async def test_requests_that_leave(world: Services) -> None:
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + 6, overlap=True)
    asking = asyncio.create_task(generate(await world.client(giver), PROMPT, 40))
    await gate.reached()
    assert waits(giver) == set()
    starting = asyncio.create_task(world.start_engine(take_over=giver.address))
    await until(lambda: is_closed(giver))
    gate.is_open.set()
    await starting
    await asking
    assert waits(giver) == {StepWait.LEAVING_REQUESTS}


async def test_a_start_without_room(world: Services) -> None:
    await world.start_cache(num_blocks=9)
    holder, gate = await world.start_gated_engine()
    holding = asyncio.create_task(generate(await world.client(holder), [GATE_TOKEN, *range(1, 24)], 6))
    other = await world.start_engine(overlap=True)
    asking = asyncio.create_task(generate(await world.client(other), [7] * 20, 2, GREEDY))

    async def has_waited() -> bool:
        return other.engine.stats.num_waits[StepWait.NOTHING_GRANTED] > 1

    await until(has_waited)
    gate.set()
    await asyncio.gather(holding, asking)
