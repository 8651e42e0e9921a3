"""Traces: one trace from a client's call through Generate to the cache service's Step, without anything secret in it."""

import asyncio
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.client import EngineClient, GenerateOptions, KvkeeperError
from kvkeeper.client.step_carriers import StepCarriers
from kvkeeper.common import tracing
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from tests.support.models.odd_models import GATE_TOKEN, NAN_TOKEN, odd_model
from tests.support.processes.service_pair import GREEDY, Services, generate, toy_output, until, until_stats
from tests.support.processes.traces import Spans

CALL, RPC = "text_completion", "kvkeeper.engine.v1.EngineService/Generate"
CREATE = "kvkeeper.cache.v1.CacheService/CreateSequences"
REQUEST, STEP = "text_completion hash-toy", "kvkeeper.cache.v1.CacheService/Step"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Traced from here on: client and both services."""
    spans = Spans()
    monkeypatch.setattr(tracing, "tracer", spans.tracer)
    return spans


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == parent.context.span_id


def trace_ids(*spans: ReadableSpan) -> set[int]:
    return {span.context.trace_id for span in spans}


async def test_one_trace_goes_from_the_client_to_the_cache_service(world: Services, spans: Spans) -> None:
    client = await world.serve()
    options = {"tenant": "acme-tenant", "session_id": "talk", "metadata": {"who": "secret-ada"}, "request_id": "mine"}
    for _ in range(2):
        output = await generate(client, list(range(1, 10)), 8, **options)
        assert output.token_ids == [toy_output(list(range(1, 10)), 8)]
    await world.wait_idle()
    call, rpc, request = spans.named(CALL)[1], spans.named(RPC)[1], spans.named(REQUEST)[1]
    step, in_cache = spans.named("step")[1], spans.named(STEP)[1]
    for parent, child in ((call, rpc), (rpc, request), (request, step), (step, in_cache)):
        assert is_child(child, parent), child.name
    assert is_child(spans.named(CREATE)[1], request)
    assert len(trace_ids(call, rpc, request, step, in_cache)) == 1
    assert trace_ids(call) != trace_ids(spans.named(CALL)[0])
    assert [span.kind for span in (call, rpc, in_cache)] == [SpanKind.CLIENT, SpanKind.SERVER, SpanKind.SERVER]
    told = {**call.attributes, **request.attributes}
    assert told["gen_ai.conversation.id"] == "talk"
    assert told["gen_ai.response.id"] == "mine"
    assert told["gen_ai.request.max_tokens"] == 8
    for span in (call, request):
        assert span.attributes["gen_ai.usage.input_tokens"] == 9
        assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 8
        assert span.attributes["gen_ai.usage.output_tokens"] == 8
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert 0 <= told["kvkeeper.queue_seconds"] <= request.attributes["gen_ai.response.time_to_first_chunk"]
    assert [event.name for event in request.events] == ["kvkeeper.started", "kvkeeper.first_token"]
    assert request.start_time <= request.events[0].timestamp <= request.events[1].timestamp <= request.end_time
    assert (step.attributes["kvkeeper.num_sequences"], step.attributes["kvkeeper.num_prompt_tokens"]) == (1, 1)
    assert in_cache.attributes["kvkeeper.num_starts"] == 1
    for hidden in ("acme-tenant", "secret-ada", str(world.folder)):
        assert hidden not in spans.text()


async def test_a_step_of_several_requests_is_in_one_trace_and_links_to_the_others(world: Services, spans: Spans) -> None:
    client, gate = await world.serve_gated()
    first = asyncio.create_task(generate(client, [GATE_TOKEN]))

    await until_stats(client, lambda stats: stats.num_running_requests == 1)
    others = [asyncio.create_task(generate(client, [place, 2])) for place in (1, 2, 3)]

    async def are_there() -> bool:
        return len(await client.list_requests()) == 4

    await until(are_there)
    gate.set()
    await asyncio.gather(first, *others)
    await world.wait_idle()
    shared = max(spans.named("step"), key=lambda step: len(step.links))
    assert len(shared.links) >= 1
    requests = {span.context.span_id for span in spans.named(REQUEST)}
    assert {link.context.span_id for link in shared.links} | {shared.parent.span_id} <= requests  # type: ignore[union-attr]


async def test_few_of_many_steps_have_a_span(world: Services, spans: Spans) -> None:
    client = await world.serve()
    await generate(client, [1, 2, 3], 200)
    assert (await client.stats()).num_steps >= 200
    assert 2 <= len(spans.named("step")) <= 2 + 200 // 64
    assert len(spans.named(STEP)) == len(spans.named("step"))


async def test_an_error_is_told_by_its_reason_alone(world: Services, spans: Spans) -> None:
    client = await world.serve(odd_model())
    with pytest.raises(KvkeeperError):
        await generate(client, [NAN_TOKEN])
    with pytest.raises(KvkeeperError):
        await client.cancel("unknown")
    await world.wait_idle()
    for name in (CALL, RPC, REQUEST):
        span = spans.one(name)
        assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "REQUEST_FAILED")
        assert span.status.description is None
        assert all(event.name != "exception" for event in span.events)
    assert not [span for span in spans.all if "CancelRequest" in span.name], "its caller was not traced"


async def test_a_call_of_an_application_s_span_is_part_of_its_trace(world: Services, spans: Spans) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    with spans.tracer().start_as_current_span("mine") as mine:
        await client.submit([1, 2, 3], GenerateOptions(request_id="sent", sampling=GREEDY))
        await asyncio.to_thread(EngineClient(engine.address).stats)
    await client.result("sent", wait_s=20)
    submitted = spans.one("kvkeeper.engine.v1.EngineService/SubmitRequest")
    request = spans.one(REQUEST)
    assert is_child(submitted, spans.one("mine")) and is_child(request, submitted)
    assert request.end_time > submitted.end_time, "it outlives the call"
    assert trace_ids(spans.one("kvkeeper.engine.v1.EngineService/GetStats")) == {mine.get_span_context().trace_id}


async def test_a_client_that_does_not_trace_has_a_trace_of_the_engine_s(world: Services, spans: Spans) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    async with grpc.aio.insecure_channel(engine.address) as channel:
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), sampling=pb.SamplingParams(max_tokens=2))
        assert [answer async for answer in pb_grpc.EngineServiceStub(channel).Generate(message, timeout=10)]
    await world.wait_idle()
    request = spans.one(REQUEST)
    assert request.parent is None
    assert trace_ids(spans.one(STEP)) == trace_ids(request)
    assert spans.named(RPC) == []


async def test_a_lost_session_ends_its_steps_spans(world: Services, spans: Spans) -> None:
    cache = await world.start_cache()
    engine, gate = await world.start_gated_engine(lease_ms=500)
    client = await world.client(engine)
    stuck = asyncio.create_task(generate(client, [GATE_TOKEN]))

    await until_stats(client, lambda stats: stats.num_running_requests == 1)
    (session,) = cache.session_manager.sessions
    cache.session_manager.close(session.core.id, session.core.epoch, drained=False)

    await until_stats(client, lambda stats: stats.cache_session_id == "")
    gate.set()
    assert (await stuck).token_ids == [toy_output([GATE_TOKEN], 8)]
    assert any(step.attributes.get("error.type") == "SESSION_LOST" for step in spans.named("step"))


async def test_what_is_not_traced_sends_nothing_of_it(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    exchange = StepCarriers.exchange

    async def noted(carriers: StepCarriers, request: bytes) -> bytes:
        sent.append(cache_pb.StepRequest.FromString(request).traceparent)
        return await exchange(carriers, request)

    monkeypatch.setattr(StepCarriers, "exchange", noted)
    untraced = await world.serve()
    await generate(untraced, [1, 2, 3])
    assert len(sent) > 5 and set(sent) == {""}
    sent.clear()
    spans = Spans()
    monkeypatch.setattr(tracing, "tracer", spans.tracer)
    traced = await world.client(await world.start_engine())
    assert (await generate(traced, [1, 2, 3])).token_ids == [toy_output([1, 2, 3], 8)]
    assert any(sent)
    assert all(len(one) in (0, 55) for one in sent)
    assert spans.named(STEP) == [], "the cache service was started without a tracer"


async def test_a_damaged_context_is_ignored(world: Services, spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(span: Any) -> str:
        return "00-nonsense"

    monkeypatch.setattr(tracing, "make_traceparent", damaged)
    client = await world.serve()
    assert (await generate(client, [1, 2, 3])).token_ids == [toy_output([1, 2, 3], 8)]
    assert spans.named("step")
    assert spans.named(STEP) == []
