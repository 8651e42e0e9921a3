"""Steps that run ahead, and steps that wait: every request gets the same, on a device that is behind the host, too."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from kvkeeper.client import AsyncEngineClient, BeamSearch, GenerateOptions, Retention, Sampling
from kvkeeper.engine_service.compute import step_compute
from kvkeeper.engine_service.loop.engine import Engine
from kvkeeper.engine_service.scheduler.plan import StepWait
from tests.support.processes.service_pair import GREEDY, Services, generate, services, toy_output
from tests.support.stand_ins.late_queue import LateQueue

DRAWN = Sampling(max_tokens=25, temperature=9.0, top_k=300, repetition_penalty=1.2, presence_penalty=0.3, seed=7)
SHORT = Sampling(max_tokens=12, temperature=0, repetition_penalty=1.0)
ENDING = [1, 2, 3]
STOP = toy_output(ENDING, 9)[-1]


class Counts:
    def __init__(self) -> None:
        self.ahead = 0
        self.queues: list[LateQueue] = []


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    found, find_wait = Counts(), Engine._wait_before_start

    def count(engine: Engine, *args: object) -> StepWait | None:
        wait: StepWait | None = find_wait(engine, *args)  # type: ignore[arg-type]
        found.ahead += wait is None
        return wait

    monkeypatch.setattr(Engine, "_wait_before_start", count)
    return found


async def served(client: AsyncEngineClient) -> dict[str, object]:
    """A mix of requests, all at once, what each got; and one that is cancelled on the way."""
    requests = {
        "ends by itself": generate(client, ENDING, 30, sampling=replace(GREEDY, stop_token_ids=(STOP,))),
        "to its length": generate(client, [4, 5, 6, 7, 8], 31),
        "forks": generate(client, [9] * 6, 20, sampling=replace(DRAWN, num_logprobs=2), n=3),
        "ends among forks": generate(client, ENDING, 30, sampling=replace(GREEDY, stop_token_ids=(STOP,)), n=2),
        "penalised": generate(client, [3, 1, 2], 25, sampling=replace(DRAWN, seed=11)),
        "keeps a window": generate(client, [5, 6], 30, retention=Retention(2, 9)),
        "the best": generate(client, [8, 8], 10, sampling=replace(DRAWN, seed=3), n=1, best_of=3),
    }

    async def cancelled() -> None:
        stream = client.generate([2] * 5, GenerateOptions(sampling=replace(SHORT, max_tokens=150)))
        await anext(stream)
        stream.close()

    *outputs, _ = await asyncio.gather(*requests.values(), cancelled())
    found: dict[str, object] = dict(zip(requests, outputs, strict=True))
    search = GenerateOptions(sampling=SHORT, beam_search=BeamSearch(num_beams=3))
    found["search"] = [(chunk.index, chunk.token_ids) async for chunk in client.generate([6, 5, 4], search)]
    return {
        name: [output.token_ids, output.reasons] if hasattr(output, "reasons") else output for name, output in found.items()
    }


async def run(*, overlap: bool, **options: object) -> dict[str, object]:
    async with services() as world:
        client = await world.serve(overlap=overlap, cache=options)
        found = await served(client)
        await check_end(world)
        return found


async def check_end(world: Services) -> None:
    pool = await world.wait_idle()
    assert pool.num_referenced_blocks == 0


@pytest.mark.parametrize("num_blocks", [128, 40], ids=["room", "short of blocks"])
async def test_all_requests_get_what_they_get_without_it(
    counts: Counts, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    expected = await run(overlap=False, num_blocks=num_blocks)
    assert not counts.ahead
    assert expected["ends by itself"] == [[toy_output(ENDING, 8)], ["stop"]]
    assert expected["ends among forks"] == [[toy_output(ENDING, 8)] * 2, ["stop"] * 2]
    assert await run(overlap=True, num_blocks=num_blocks) == expected
    assert counts.ahead > 10
    ahead = counts.ahead

    def late() -> LateQueue:
        counts.queues.append(LateQueue())
        return counts.queues[-1]

    monkeypatch.setattr(step_compute, "HostQueue", late)
    assert await run(overlap=True, num_blocks=num_blocks) == expected
    assert counts.ahead > ahead + 10
    assert [queue.num_begun == queue.num_submitted for queue in counts.queues] == [True]


async def test_a_session_that_is_lost_with_two_steps_on_their_way(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_compute, "HostQueue", LateQueue)
    async with services() as world:
        client = await world.serve(overlap=True)
        stream = client.generate([1, 2, 3], GenerateOptions(sampling=replace(SHORT, max_tokens=120)))
        tokens = list((await anext(stream)).token_ids)
        while counts.ahead < 5:
            tokens += (await anext(stream)).token_ids
        await world.stop_cache()
        await world.start_cache()
        with contextlib.suppress(StopAsyncIteration):
            while True:
                tokens += (await anext(stream)).token_ids
        assert tokens == toy_output([1, 2, 3], 120)
