"""The host tier through both services: prompts that the pool has no room for come back from there, token for token."""

import asyncio
from typing import Any

import pytest

from kvkeeper.client.steps import StepResult
from kvkeeper.engine_service.cache_session.transfer_runner import TransferRunner
from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate, toy_output

PROMPTS = [[place + 1, *range(40, 40 + 5 * BLOCK_SIZE)] for place in range(6)]


async def test_evicted_prompts_are_loaded_instead_of_computed_again(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 17, "num_host_blocks": 65})
    for turn in range(3):
        for prompt in PROMPTS:
            output = await generate(client, prompt)
            assert output.token_ids == [toy_output(prompt, 8)]
            assert output.usage.cached_tokens == (5 * BLOCK_SIZE if turn else 0)
    pool = await world.pool()
    assert pool.num_demoted_blocks > 10
    assert pool.num_promoted_blocks > 10
    assert pool.num_failed_transfers == 0
    idle = await world.wait_idle()
    assert (idle.num_transfer_blocks, idle.num_busy_host_blocks, idle.num_loading_sequences) == (0, 0, 0)


async def test_a_crowd_on_two_engines_changes_no_token(world: Services) -> None:
    await world.start_cache(num_blocks=25, num_host_blocks=33)
    clients = [await world.client(await world.start_engine()) for _ in range(2)]
    for _ in range(3):
        order = [(place, prompt) for place, prompt in enumerate(PROMPTS * 2)]
        outputs = await asyncio.gather(*(generate(clients[place % 2], prompt) for place, prompt in order))
        assert [output.token_ids[0] for output in outputs] == [toy_output(prompt, 8) for _, prompt in order]
    pool = await world.pool()
    assert pool.num_promoted_blocks > 0
    assert pool.num_evicted_host_blocks > 0


async def test_loads_that_fail_are_computed_instead(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await world.serve(cache={"num_blocks": 17, "num_host_blocks": 65})
    for prompt in PROMPTS:
        await generate(client, prompt)
    run = TransferRunner._run

    def failing(transfers: TransferRunner, answer: StepResult, ended: Any) -> None:
        """Every second load is aimed past the end of the host tier."""
        sources = answer.transfer_sources.copy()
        sources[(answer.transfer_kinds == 2) & (answer.transfer_ids % 2 == 0)] = 10**6
        run(transfers, answer._replace(transfer_sources=sources), ended)

    monkeypatch.setattr(TransferRunner, "_run", failing)
    for prompt in PROMPTS:
        assert (await generate(client, prompt)).token_ids == [toy_output(prompt, 8)]
    assert (await world.pool()).num_failed_transfers > 0
