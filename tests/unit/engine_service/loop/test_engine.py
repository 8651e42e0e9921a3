"""The loop's edges that no good cache service shows: refused steps, broken text, and what the scheduler may import."""

import asyncio
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from kvkeeper.client import AsyncCacheSession, AsyncEngineClient, KvkeeperError, NewSequence, StepItems, StepResult
from kvkeeper.common.service.process import ServiceLost
from kvkeeper.engine_service.cache_session.failures import rank_lost
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory
from kvkeeper.engine_service.loop import sequence_creator
from kvkeeper.engine_service.loop.open_requests import OpenRequests
from kvkeeper.engine_service.loop.step_worker import StepWorker
from kvkeeper.engine_service.scheduler.plan import Work
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.engine_service.values.output_chunk import OutputChunk, Usage, coalesce
from kvkeeper.engine_service.values.request import FinishReason
from tests.support.models.odd_models import LOST_TOKEN, FaultyRunner, faulty_model, odd_model
from tests.support.processes.service_pair import Services, generate, services, toy_output, until
from tests.support.worlds.cache_api import refusal


@pytest.mark.parametrize("module", ["scheduler.scheduler", "values.batch"])
def test_the_scheduler_is_pure(module: str) -> None:
    check = f"import kvkeeper.engine_service.{module}, sys; print({{'grpc', 'asyncio', 'torch', 'google'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=".")
    assert found.stdout == "set()\n"


async def test_a_refused_step_ends_its_requests_and_the_next_ones_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [KvkeeperError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "a bug of ours")]
    step = KvMemory.step

    async def refuse_once(memory: KvMemory, *args: Any) -> StepResult:
        if refusals and memory.session.step_id == 3:
            raise refusals.pop()
        return await step(memory, *args)

    monkeypatch.setattr(KvMemory, "step", refuse_once)
    async with services() as world:
        client = await world.serve()
        assert (await refusal(generate(client, [1, 2, 3], 20))).reason == "REQUEST_FAILED"
        assert not refusals
        await serves_again(world)


async def test_a_refused_sequence_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    create = AsyncCacheSession.create_sequences

    async def refuse_sevens(session: AsyncCacheSession, sequences: list[NewSequence]) -> list[Any]:
        bad = KvkeeperError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "no sevens")
        created = await create(session, sequences)
        return [bad if new.token_ids[0] == 7 else each for new, each in zip(sequences, created, strict=True)]

    monkeypatch.setattr(AsyncCacheSession, "create_sequences", refuse_sevens)
    async with services() as world:
        client = await world.serve()
        good = asyncio.create_task(generate(client, [1, 2, 3], 20))
        assert (await refusal(generate(client, [7, 8]))).reason == "REQUEST_FAILED"
        assert (await good).token_ids == [toy_output([1, 2, 3], 20)]


async def test_a_prompt_that_takes_long_to_be_sent_holds_up_no_other_and_few_calls_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence_creator, "_MOST_CALLS", 2)
    monkeypatch.setattr(sequence_creator, "_MOST_TOKENS_IN_CALL", 1)  # the prompts are long
    create, gate, num_held, most_held = AsyncCacheSession.create_sequences, asyncio.Event(), 0, 0

    async def hold_sevens(session: AsyncCacheSession, sequences: list[NewSequence]) -> list[Any]:
        nonlocal num_held, most_held
        if any(new.token_ids[0] == 7 for new in sequences):
            num_held += 1
            most_held = max(most_held, num_held)
            await gate.wait()
            num_held -= 1
        return await create(session, sequences)

    monkeypatch.setattr(AsyncCacheSession, "create_sequences", hold_sevens)
    async with services() as world:
        client = await world.serve()
        held = [asyncio.create_task(generate(client, [7, 8], 20))]
        await until_true(lambda: num_held == 1)
        assert (await generate(client, [1, 2, 3], 20)).token_ids == [toy_output([1, 2, 3], 20)]
        held += [asyncio.create_task(generate(client, [7, place], 20)) for place in range(9, 15)]
        await until_true(lambda: num_held == 2)
        await until_told(client, num_requests=7)
        gate.set()
        assert [one.token_ids for one in await asyncio.gather(*held)] == [[toy_output([7, at], 20)] for at in range(8, 15)]
        assert most_held == 2
        assert (await world.wait_idle()).num_referenced_blocks == 0


async def until_told(client: AsyncEngineClient, *, num_requests: int) -> None:
    async def check() -> bool:
        return len(await client.list_requests()) == num_requests

    await until(check)


async def until_true(condition: Callable[[], bool]) -> None:
    async def check() -> bool:
        return condition()

    await until(check)


async def test_text_that_fails_ends_its_request_alone() -> None:
    model = odd_model()
    good_text = model.text

    class Broken:
        has_text = True

        def push(self, token_id: int) -> tuple[str, bool]:
            raise ValueError("no such token")

        def flush(self) -> str:
            return ""

    class Text:
        tokenizer = None
        no_output = staticmethod(good_text.no_output)

        def output(self, prompt: list[int], stops: tuple[str, ...], min_tokens: int, keep_special_tokens: bool = False) -> Any:
            return Broken() if prompt[0] == 7 else good_text.output(prompt, stops, min_tokens)

    async with services() as world:
        client = await world.serve(dataclasses.replace(model, text=Text()))
        good = asyncio.create_task(generate(client, [1, 2, 3], 20))
        failed = await refusal(generate(client, [7, 8], n=2))
        assert (failed.reason, "such" in failed.message) == ("REQUEST_FAILED", False)
        assert (await good).token_ids == [toy_output([1, 2, 3], 20)]
        assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_health_follows_the_session() -> None:
    async with services() as world:
        await world.start_cache()
        engine = await world.start_engine(lease_ms=500)
        async with grpc.aio.insecure_channel(engine.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service="kvkeeper.engine.v1.EngineService"), timeout=20
            )
            seen = []
            async for answer in watch:
                seen.append(answer.status)
                if len(seen) == 1:
                    await world.stop_cache()
                if len(seen) == 2:
                    await world.start_cache()
                if len(seen) == 3:
                    watch.cancel()
                    break
        assert seen == [1, 2, 1], "serving, not serving, serving"


async def test_a_device_that_is_lost_while_the_session_is_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ranks share a model: the first one's loss ends the others, and that ends the session."""
    is_in_flight, may_fail = threading.Event(), threading.Event()
    step, start, forward = KvMemory.step, StepWorker.start, FaultyRunner.forward

    async def lose_session(memory: KvMemory, *args: Any) -> StepResult:
        if is_in_flight.is_set() and not may_fail.is_set():
            may_fail.set()
            raise rank_lost("a test")
        return await step(memory, *args)

    # The loop asks for the next step once it has handed this one over, whether its thread has begun with it or not.
    def note_start(worker: StepWorker, step_id: int, work: Work, *args: Any, **kwargs: Any) -> None:
        if any(LOST_TOKEN in sequence.request.prompt for sequence in work.sequences):
            is_in_flight.set()
        start(worker, step_id, work, *args, **kwargs)

    def fail_late(runner: FaultyRunner, batch: Batch) -> torch.Tensor:
        if (batch.token_ids == LOST_TOKEN).any():
            assert may_fail.wait(30)
        return forward(runner, batch)

    monkeypatch.setattr(KvMemory, "step", lose_session)
    monkeypatch.setattr(StepWorker, "start", note_start)
    monkeypatch.setattr(FaultyRunner, "forward", fail_late)
    with capture_logs() as logs:
        async with services() as world:
            await world.start_cache()
            engine = await world.start_engine(faulty_model())
            client = await world.client(engine)
            going_on = asyncio.create_task(generate(client, [1, 2, 3], 200))
            with pytest.raises(KvkeeperError, match="DEVICE_LOST"):
                await generate(client, [9, LOST_TOKEN])
            with pytest.raises(KvkeeperError, match="DEVICE_LOST"):
                await going_on
            with pytest.raises(ServiceLost):
                await engine.wait_end()
    assert may_fail.is_set()
    assert not [line for line in logs if line["event"] == "session_lost"]


async def serves_again(world: Services) -> None:
    client = await world.client(await world.start_engine())
    assert (await generate(client, [1, 2, 3])).token_ids == [toy_output([1, 2, 3], 8)]


def test_neighbouring_chunks_of_a_continuation_become_one() -> None:
    usage = Usage(1, 0, 4, 0, 0)
    chunks = [
        OutputChunk(0, "a", (1,)),
        OutputChunk(0, "b", (2,)),
        OutputChunk(1, "c", (3,)),
        OutputChunk(0, "", (4,), FinishReason.LENGTH),
        OutputChunk(1, "d", (), FinishReason.STOP, usage),
    ]
    assert coalesce(chunks) == [OutputChunk(0, "ab", (1, 2)), *chunks[2:]]
    assert coalesce([*chunks[:2], chunks[3]]) == [OutputChunk(0, "ab", (1, 2, 4), FinishReason.LENGTH)]
    assert coalesce([]) == []


def test_every_column_of_a_plan_is_sent() -> None:
    from kvkeeper.engine_service.scheduler.plan import Plan

    sent = set(StepItems.__dataclass_fields__) & set(Plan._fields)
    unused = {"truncate_ids", "truncate_lens"}
    added_by_memory = {"completed_transfers", "failed_transfers"}
    assert set(StepItems.__dataclass_fields__) - sent == unused | added_by_memory


@pytest.mark.parametrize("overlap", [True, False])
async def test_text_is_delivered_once_the_next_step_is_started(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams have time while the next step computes: else the device would wait for their tasks."""
    start, emit, deliver = StepWorker.start, OpenRequests.emit, OpenRequests.deliver
    num_started = num_emitted = 0
    num_begun: dict[int, int] = {}  # steps, by those whose tokens are first delivered then

    def note_start(worker: StepWorker, step_id: int, work: Any, *args: Any, **options: Any) -> None:
        nonlocal num_started
        num_started += work.batch is not None
        start(worker, step_id, work, *args, **options)

    def note_emit(requests: OpenRequests, work: Any, *args: Any) -> Any:
        nonlocal num_emitted
        num_emitted += work.batch is not None
        return emit(requests, work, *args)

    def note_deliver(requests: OpenRequests) -> None:
        if requests._undelivered or requests.unread.with_more:
            num_begun.setdefault(num_emitted, num_started)
        deliver(requests)

    monkeypatch.setattr(StepWorker, "start", note_start)
    monkeypatch.setattr(OpenRequests, "emit", note_emit)
    monkeypatch.setattr(OpenRequests, "deliver", note_deliver)
    async with services() as world:
        client = await world.serve(overlap=overlap)
        assert (await generate(client, [1, 2, 3], 6)).token_ids == [toy_output([1, 2, 3], 6)]
    assert num_started == num_emitted == 6
    assert num_begun == {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 6}, "behind the last token there is no step"
