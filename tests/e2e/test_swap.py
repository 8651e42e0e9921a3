"""Preemption by swap through both services: a pool too small for the load, and a host tier for swapped sequences."""

import asyncio
from typing import Any

import pytest

from kvkeeper.client import KvkeeperError
from kvkeeper.client.steps import StepResult
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory
from kvkeeper.engine_service.cache_session.transfer_runner import TransferRunner
from kvkeeper.engine_service.rpc.encode_response import iteration_plan
from kvkeeper.engine_service.values.errors import TimedOut
from kvkeeper.engine_service.values.request import SequenceState
from tests.support.processes.service_pair import BLOCK_SIZE, Output, Services, generate, toy_output, until

PROMPTS = [[place + 1, *range(40, 40 + 2 * BLOCK_SIZE)] for place in range(6)]
NUM_NEW = 24


async def crowd(world: Services, **options: object) -> list[Output]:
    """All prompts at once on one engine, none of them cached for another; every token is right."""
    client = await world.client(await world.start_engine(**options))
    outputs = await asyncio.gather(*(generate(client, prompt, NUM_NEW, skip_look_up=True) for prompt in PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == [toy_output(prompt, NUM_NEW)]
    return list(outputs)


@pytest.mark.parametrize("way", ["swap", "auto", "recompute"])
async def test_what_the_host_tier_keeps_is_not_computed_again(world: Services, way: str) -> None:
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    outputs = await crowd(world, preemption=way)
    stats = await (await world.client(world.engines[0])).stats()
    pool = await world.pool()
    assert stats.num_preemptions == sum(output.usage.num_preemptions for output in outputs) > 0
    num_computed = stats.num_prefill_tokens
    if way == "recompute":
        assert (stats.num_swapped_out, pool.num_swap_outs) == (0, 0)
        assert num_computed > sum(map(len, PROMPTS)), "the load is such that swapping makes a difference"
    if way == "swap":
        assert 0 < stats.num_swapped_out == pool.num_swap_outs == pool.num_swap_ins <= stats.num_preemptions
        assert pool.num_transfers >= 2 * stats.num_swapped_out
        assert num_computed == sum(map(len, PROMPTS)), "each prompt once"
    assert pool.num_failed_transfers == 0
    idle = await world.wait_idle()
    assert (idle.num_held_host_blocks, idle.num_swapped_sequences, idle.num_transfer_blocks) == (0, 0, 0)


async def test_without_a_host_tier_it_is_computed_again(world: Services) -> None:
    await world.start_cache(num_blocks=17)
    outputs = await crowd(world, preemption="swap")
    assert sum(output.usage.num_preemptions for output in outputs) > 0
    assert (await world.pool()).num_swap_outs == 0


async def test_the_iterations_name_the_sequences_swapped_out_and_in(world: Services) -> None:
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    engine = (await world.start_engine(preemption="swap")).engine
    client = await world.client(world.engines[0])
    finish, plans = engine._finish, []

    async def note(memory: KvMemory, *step: Any) -> None:
        before = engine.last_iteration
        await finish(memory, *step)
        if engine.last_iteration is not before and engine.last_iteration is not None:
            plans.append(iteration_plan(engine.last_iteration))

    engine._finish = note  # type: ignore[method-assign]
    await asyncio.gather(*(generate(client, prompt, NUM_NEW) for prompt in PROMPTS))
    out = [(item.request_id, item.num_context_tokens) for plan in plans for item in plan.swapped_out]
    back = [(item.request_id, item.num_context_tokens) for plan in plans for item in plan.swapped_in]
    assert len(out) == (await client.stats()).num_swapped_out > 0
    assert sorted(out) == sorted(back)
    assert all(num_tokens > 0 for _, num_tokens in out)
    assert any(f"swapped out {out[0][0]}[0] with {out[0][1]} tokens" in plan.plan for plan in plans)


async def test_orders_that_move_nothing_would_show(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(transfers: TransferRunner, answer: StepResult, ended: Any) -> None:
        ended.done = answer.transfer_ids.tolist()

    monkeypatch.setattr(TransferRunner, "_run", idle)
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    with pytest.raises(AssertionError):
        await crowd(world, preemption="swap")


@pytest.mark.parametrize("kind", [1, 2])
async def test_transfers_that_fail_end_in_computing_again(world: Services, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    run = TransferRunner._run

    def failing(transfers: TransferRunner, answer: StepResult, ended: Any) -> None:
        """Every second order of a kind is aimed past the end of a tier."""
        sources = answer.transfer_sources.copy()
        sources[(answer.transfer_kinds == kind) & (answer.transfer_ids % 2 == 0)] = 10**6
        run(transfers, answer._replace(transfer_sources=sources), ended)

    monkeypatch.setattr(TransferRunner, "_run", failing)
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    outputs = await crowd(world, preemption="swap")
    assert sum(output.usage.num_preemptions for output in outputs) > 0
    assert (await world.pool()).num_failed_transfers > 0


@pytest.mark.parametrize("end", ["cancelled", "timed out"])
async def test_a_request_that_ends_while_it_is_swapped_out_holds_nothing(world: Services, end: str) -> None:
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    engine = (await world.start_engine(preemption="swap")).engine
    client = await world.client(world.engines[0])
    finish, ended = engine._finish, []

    async def end_one(memory: KvMemory, *step: Any) -> None:
        await finish(memory, *step)
        for sequence in engine.scheduler.waiting.sequences:
            if sequence.state is SequenceState.SWAPPED and not ended:
                ended.append(sequence.request.prompt.tolist())
                generation = engine.requests.generations[sequence.request.request_id]
                generation.cancel() if end == "cancelled" else generation.fail(TimedOut("it took too long"))

    engine._finish = end_one  # type: ignore[method-assign]
    tasks = [asyncio.create_task(generate(client, prompt, NUM_NEW)) for prompt in PROMPTS]
    outputs = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(ended) == 1
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if prompt not in ended:
            assert isinstance(output, Output)
            assert output.token_ids == [toy_output(prompt, NUM_NEW)]
        elif end == "cancelled":
            assert isinstance(output, Output)
            assert output.reasons == ["cancelled"]
        else:
            assert isinstance(output, KvkeeperError)
            assert output.reason == "TIMED_OUT"
    idle = await world.wait_idle()
    assert (idle.num_held_host_blocks, idle.num_swapped_sequences, idle.num_referenced_blocks) == (0, 0, 0)


async def test_a_cache_service_that_starts_anew_computes_again_what_was_swapped_out(world: Services) -> None:
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    engine = (await world.start_engine(preemption="swap")).engine
    client = await world.client(world.engines[0])
    tasks = [asyncio.create_task(generate(client, prompt, NUM_NEW)) for prompt in PROMPTS]

    async def is_swapped() -> bool:
        return any(item.state is SequenceState.SWAPPED for item in engine.scheduler.waiting.sequences)

    await until(is_swapped)
    await world.stop_cache()
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    outputs = await asyncio.gather(*tasks)
    assert [output.token_ids[0] for output in outputs] == [toy_output(prompt, NUM_NEW) for prompt in PROMPTS]
