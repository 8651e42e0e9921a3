"""Mistakes that earlier systems made, which show only with both services: admission in two steps, and numbers made up."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kvkeeper.client import AsyncEngineClient, GenerateOptions, KvkeeperError
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service import server
from tests.support.models.odd_models import GATE_TOKEN, NAN_TOKEN, odd_model
from tests.support.processes.service_pair import GREEDY, Services, generate, toy_output, until, until_stats

MAX_WAITING = 3


async def outcome(client: AsyncEngineClient, **options: Any) -> str:
    try:
        return (await generate(client, [1, 2], 4, **options)).reasons[0] or "none"
    except KvkeeperError as error:
        return error.reason


async def test_of_many_that_come_at_once_as_many_are_taken_as_may_wait(world: Services) -> None:
    """A check of the limit and the queueing behind it are one step: no other request slips in between."""
    client, gate = await world.serve_gated(max_waiting=MAX_WAITING)
    first = asyncio.create_task(generate(client, [GATE_TOKEN]))

    await until_stats(client, lambda stats: stats.num_running_requests == 1)
    crowd = asyncio.gather(*(outcome(client) for _ in range(20)))

    async def is_full() -> bool:
        return len(await client.list_requests()) >= 1 + MAX_WAITING

    await until(is_full)
    gate.set()
    found = await crowd
    assert (found.count("length"), found.count("QUEUE_FULL")) == (MAX_WAITING, 20 - MAX_WAITING)
    await first


async def test_of_twins_that_come_at_once_one_is_taken(world: Services) -> None:
    client, gate = await world.serve_gated()
    first = asyncio.create_task(generate(client, [GATE_TOKEN]))

    await until_stats(client, lambda stats: stats.num_running_requests == 1)
    twins = [asyncio.create_task(outcome(client, request_id="one")) for _ in range(8)]

    async def are_refused() -> bool:
        return sum(twin.done() for twin in twins) == 7

    await until(are_refused)
    gate.set()
    assert sorted(await asyncio.gather(*twins)) == ["DUPLICATE_REQUEST"] * 7 + ["length"]
    await first


class HalfRight:
    """Guesses what the toy says, and something else every other time."""

    is_slow = False
    num_asked = 0

    def propose(self, histories: Mapping[int, np.ndarray], most: Mapping[int, int]) -> dict[int, np.ndarray]:
        self.num_asked += 1
        wrong = self.num_asked % 2
        return {
            row: (np.array(toy_output(history.tolist(), most[row]), np.int32) + wrong) % 400
            for row, history in histories.items()
            if most[row]
        }


# Fields that need a world of their own: test_policies.py, test_take_over.py, test_unread_log.py
ELSEWHERE = {
    "num_policy_switches",
    "num_handed_over_requests",
    "num_taken_over_requests",
    "num_remote_prefills",
    "num_failed_remote_prefills",
    "num_dropped_log_lines",
}


async def test_no_number_is_a_placeholder(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field of GetStats has a value after a while in which everything happened."""
    monkeypatch.setattr(server, "PromptLookUp", HalfRight)
    plain = await world.serve(odd_model(), preemption="swap", cache={"num_blocks": 13, "num_host_blocks": 65})
    seen: dict[str, Any] = {}

    async def look() -> pb.GetStatsResponse:
        stats = await plain.stats()
        seen.update({field.name: value for field, value in stats.ListFields()})
        return stats

    async def crowd_out() -> bool:
        """More than the pool holds at once; whether what lasts only for a while was seen."""
        prompts = [[place + 1, *range(3, 16)] for place in range(6)]
        crowd = [asyncio.create_task(generate(plain, prompt, 24, n=1 + place % 2)) for place, prompt in enumerate(prompts)]
        while not all(request.done() for request in crowd):
            await look()
        await asyncio.gather(*crowd)
        return passing <= seen.keys()

    passing = {"num_running_requests", "num_waiting_requests", "num_preempted_requests", "num_swapped_out", "kv_utilization"}
    await until(crowd_out)
    for _ in range(2):
        await generate(plain, list(range(1, 10)), 4)
    with pytest.raises(KvkeeperError):
        await generate(plain, [NAN_TOKEN])
    long = GenerateOptions(request_id="mine", sampling=dataclasses.replace(GREEDY, max_tokens=30))
    await plain.submit([7], long)
    await plain.cancel("mine")
    await plain.result("mine", wait_s=20)
    await look()
    guessing = await world.client(await world.start_engine(speculation="prompt-look-up"))
    await generate(guessing, [1, 2, 3], 30)
    seen.update({field.name: value for field, value in (await guessing.stats()).ListFields()})
    named = {field.name for field in pb.GetStatsResponse.DESCRIPTOR.fields}
    assert named - seen.keys() <= ELSEWHERE


async def test_the_share_of_what_was_cached_knows_what_was_not(world: Services) -> None:
    """Cached and computed prompt tokens add up to all that came, hits or not."""
    client = await world.serve()
    prompt = list(range(1, 10))
    for number in range(1, 4):
        await generate(client, prompt)
        await generate(client, [100 + number, *prompt])
        stats = await client.stats()
        assert stats.num_cached_tokens == 8 * (number - 1)
        assert stats.num_cached_tokens + stats.num_prefill_tokens == (9 + 10) * number
