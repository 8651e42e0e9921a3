"""Requests that outlive their client's connection, and the other ways to get a result."""

import asyncio
import threading

import grpc
import pytest

from kvkeeper.client import (
    AsyncEngineClient,
    CallOptions,
    EngineClient,
    GenerateOptions,
    KvkeeperError,
    OutputChunk,
    Sampling,
    Usage,
)
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.rpc.submissions import Submissions
from tests.support.models.odd_models import GATE_TOKEN, NAN_TOKEN, odd_model
from tests.support.processes.service_pair import Services, toy_output, until
from tests.support.worlds.cache_api import failure

PROMPT = [1, 2, 3]


def options(request_id: str = "", max_tokens: int = 8, **more: object) -> GenerateOptions:
    sampling = Sampling(temperature=0, repetition_penalty=1.0, max_tokens=max_tokens)
    return GenerateOptions(request_id=request_id, sampling=sampling, **more)  # type: ignore[arg-type]


async def test_a_submitted_request_survives_its_client(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    async with AsyncEngineClient(engine.address, CallOptions(retry_s=0)) as first:
        request_id = await first.submit([GATE_TOKEN, 1], options(n=2))
        early = await first.result(request_id)
    assert (early.has_ended, early.outputs, early.usage) == (False, (), None)
    gate.set()
    client = await world.client(engine)
    found = await client.result(request_id, wait_s=20)
    assert found.state == "completed"
    assert [list(output.token_ids) for output in found.outputs] == [toy_output([GATE_TOKEN, 1], 8)] * 2
    assert [output.finish_reason for output in found.outputs] == ["length", "length"]
    assert found.usage is not None
    assert found.usage.new_tokens == 16
    assert await client.result(request_id) == found, "asking twice changes nothing"
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_the_same_submission_again_is_the_same_request(world: Services) -> None:
    client = await world.serve()
    ids = await asyncio.gather(*(client.submit(PROMPT, options("mine")) for _ in range(5)))
    assert ids == ["mine"] * 5
    await client.result("mine", wait_s=20)
    assert await client.submit(PROMPT, options("mine")) == "mine", "also after its end"
    assert (await client.stats()).num_completed_requests == 1
    refused = await failure(client.submit(PROMPT, options("mine", max_tokens=9)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")


async def test_a_refused_submission_leaves_its_id_free(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 9})
    assert (await failure(client.submit([1] * 30, options("mine")))).reason == "NEVER_FITS"
    assert (await failure(client.result("mine"))).reason == "UNKNOWN_REQUEST"
    await client.submit(PROMPT, options("mine"))
    assert (await client.result("mine", wait_s=20)).state == "completed"


async def test_a_failure_is_told_with_its_reason(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    gate.set()
    client = await world.client(await world.start_engine(odd_model()))
    await client.submit([NAN_TOKEN], options("bad"))
    failed = await client.result("bad", wait_s=20)
    assert failed.state == "failed"
    assert failed.error == ("REQUEST_FAILED", "the logits are not finite")
    gate.clear()
    client = await world.client(engine)
    await client.submit([GATE_TOKEN], options("late", timeout_ms=30))
    assert (await client.result("late", wait_s=20)).error == (
        "TIMED_OUT",
        "no token came within timeout_ms (--timeout-ms), 30 ms",
    )
    await client.submit([GATE_TOKEN], options("cancelled"))
    await client.cancel("cancelled")
    cancelled = await client.result("cancelled", wait_s=20)
    assert (cancelled.state, cancelled.outputs[0].finish_reason) == ("cancelled", "cancelled")
    gate.set()


async def test_results_are_kept_for_a_bounded_time_and_number(world: Services) -> None:
    client = await world.serve(max_results=2)
    for place in range(4):
        await client.submit([place + 1], options(f"r{place}"))
        await client.result(f"r{place}", wait_s=20)
    await client.submit([9], options("last"))
    await client.result("last", wait_s=20)
    assert (await client.result("r3")).state == "completed"
    for place in range(3):
        assert (await failure(client.result(f"r{place}"))).reason == "UNKNOWN_REQUEST"
    client = await world.client(await world.start_engine(result_ttl=0.0))
    await client.submit(PROMPT, options("brief"))
    found = await client.result("brief", wait_s=20)
    assert found.state == "completed"
    with pytest.raises(KvkeeperError):
        await client.result("brief")


async def test_results_are_forgotten_in_the_order_in_which_their_requests_ended(world: Services) -> None:
    """The request that was submitted first ends last, so its results are the newest."""
    client = await world.serve(max_results=2, cache={"num_blocks": 512})
    await client.submit(PROMPT, options("long", max_tokens=400))
    for name in ("first", "second"):
        await client.submit([1], options(name, max_tokens=1))
        assert (await client.result(name, wait_s=20)).state == "completed"
    assert (await client.result("long")).state == "running", "the long one has not ended before the others"
    assert (await client.result("long", wait_s=20)).state == "completed"
    assert (await client.result("long")).outputs[0].token_ids == tuple(toy_output(PROMPT, 400))
    assert (await client.result("second")).state == "completed"
    assert (await failure(client.result("first"))).reason == "UNKNOWN_REQUEST"


async def test_a_submission_that_is_never_admitted_has_no_request() -> None:
    submissions = Submissions(10, 600, 1 << 20)
    started = asyncio.Event()

    async def never(_: object) -> object:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    first = asyncio.create_task(submissions.submit("a", b"1", never))  # type: ignore[arg-type]
    await started.wait()
    second = asyncio.create_task(submissions.submit("a", b"1", never))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    first.cancel()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["CancelledError", "UnknownRequest"]


async def test_callbacks_hear_every_chunk_and_the_end_once(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    for call_back in ("async", "threads"):
        chunks: list[OutputChunk] = []
        ends: list[Usage | KvkeeperError] = []
        if call_back == "async":
            client.call_back(PROMPT, chunks.append, ends.append, options())
        else:
            threaded = EngineClient(engine.address)
            threaded.call_back(PROMPT, chunks.append, ends.append, options())

        async def has_ended(ends: list[Usage | KvkeeperError] = ends) -> bool:
            return bool(ends)

        await until(has_ended)
        assert [token for chunk in chunks for token in chunk.token_ids] == toy_output(PROMPT, 8)
        (usage,) = ends
        assert isinstance(usage, Usage)
        assert usage.new_tokens == 8
    threaded.close()


async def test_a_callback_may_call_the_client(world: Services) -> None:
    """No lock is held while it runs."""
    await world.start_cache()
    engine = await world.start_engine()
    done = threading.Event()
    results: list[list[int]] = []

    def run() -> None:
        with EngineClient(engine.address) as client:

            def on_end(_: object) -> None:
                with client.generate([5], options()) as again:
                    results.append([token for chunk in again for token in chunk.token_ids])
                done.set()

            client.call_back(PROMPT, lambda chunk: None, on_end, options())
            done.wait(20)

    await asyncio.to_thread(run)
    assert results == [toy_output([5], 8)]


async def test_the_iteration_plan_tells_what_was_computed(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(chunk_size=4)
    gate.set()
    client = await world.client(engine)
    assert await client.iteration_plan() == pb.GetIterationPlanResponse()
    await client.submit([1, 2, 3, 4, 5, 6], options("mine", max_tokens=3))
    await client.result("mine", wait_s=20)
    plan = await client.iteration_plan()
    assert not plan.prefills
    (decode,) = plan.decodes
    assert (decode.request_id, decode.index, decode.num_context_tokens, decode.num_query_tokens) == ("mine", 0, 7, 1)
    assert "decode mine[0]: 1 tokens behind 7" in plan.plan
    assert 0 <= plan.cache_wait_ms < plan.duration_ms


async def test_results_are_kept_in_a_bounded_number_of_bytes(world: Services) -> None:
    client = await world.serve()
    await client.submit(PROMPT, options("measured"))
    await client.result("measured", wait_s=20)
    submissions = world.engines[-1].service._submissions
    num_bytes = submissions._by_id["measured"].num_bytes
    assert num_bytes >= 4096
    submissions._max_bytes = 2 * num_bytes
    for place in range(3):
        await client.submit(PROMPT, options(f"r{place}"))
        await client.result(f"r{place}", wait_s=20)
    assert (await client.result("r2")).state == (await client.result("r1")).state == "completed"
    for gone in ("measured", "r0"):
        assert (await failure(client.result(gone))).reason == "UNKNOWN_REQUEST"
    submissions._max_bytes = 0
    assert (await client.result("r2")).state == "completed", "the last one is kept in any case"
