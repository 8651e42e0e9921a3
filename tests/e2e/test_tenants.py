"""Requests of an engine belong to the tenant of the credential that they came with, and no other tenant finds them.

Beside each probe stands its control: the tenant itself, and a caller for all tenants.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
import torch

from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, KvkeeperError
from kvkeeper.client.transport import AsyncTransport
from kvkeeper.common.trust.caller import Role
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.model.hash_toy import HashToyRunner
from kvkeeper.engine_service.server import RunningServer
from kvkeeper.engine_service.values.batch import Batch
from tests.support.processes.service_pair import DEADLINE_S, GREEDY, generate, toy_output, until
from tests.support.trust.trusting_services import Trusting, trusting
from tests.support.worlds.cache_api import failure

PROMPT = list(range(1, 14))
SHORT = replace(GREEDY, max_tokens=4)


@dataclass
class World:
    services: Trusting
    engine: RunningServer
    clients: dict[str, AsyncEngineClient]  # by tenant


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with trusting(tmp_path) as services:
        await services.start_cache()
        engine = await services.start_engine()
        await engine.wait_ready()
        clients = {
            tenant: await services.engine_client(engine, services.credentials(Role.CLIENT, tenant))
            for tenant in ("a", "b", "", "*")
        }
        yield World(services, engine, clients)


async def refused(call: object) -> tuple[str, str]:
    error = await failure(call)
    return error.reason, error.message


async def test_two_tenants_may_use_one_id_and_each_finds_its_own(world: World) -> None:
    prompts = {"a": PROMPT, "b": PROMPT[::-1], "": PROMPT[2:]}
    for tenant, prompt in prompts.items():
        options = GenerateOptions(sampling=SHORT, request_id="same")
        assert await world.clients[tenant].submit(prompt, options) == "same"
    for tenant, prompt in prompts.items():
        result = await world.clients[tenant].result("same", wait_s=10.0)
        assert list(result.outputs[0].token_ids) == toy_output(prompt, 4)
    assert await refused(world.clients["*"].result("same")) == await refused(world.clients["*"].result("other"))


async def test_anothers_request_answers_as_one_that_does_not_exist(world: World) -> None:
    owner, other = world.clients["a"], world.clients["b"]
    await owner.submit(PROMPT, GenerateOptions(sampling=replace(GREEDY, max_tokens=200), request_id="mine"))
    assert await refused(other.result("mine")) == await refused(other.result("none"))
    assert await refused(other.cancel("mine")) == await refused(other.cancel("none"))
    assert (await refused(other.cancel("mine")))[0] == "UNKNOWN_REQUEST"
    stream, nothing = other.follow("mine"), other.follow("none")
    assert await refused(anext(aiter(stream))) == await refused(anext(aiter(nothing)))
    known = next(iter(world.engine.engine.requests.generations))
    assert known != "mine" and known != "a"
    assert await refused(other.cancel(known)) == await refused(other.cancel("none"))
    await owner.cancel("mine")  # the control
    assert (await refused(owner.cancel("mine")))[0] == "UNKNOWN_REQUEST"


async def test_lists_show_ones_own(world: World) -> None:
    options = GenerateOptions(sampling=replace(GREEDY, max_tokens=200))
    for tenant in ("a", "b", ""):
        await world.clients[tenant].submit(PROMPT, replace(options, request_id=f"of-{tenant}"))
    reader = await world.services.engine_client(world.engine, world.services.credentials(Role.READER, "b"))
    for tenant in ("a", "b", ""):
        assert [row.request_id for row in await world.clients[tenant].list_requests()] == [f"of-{tenant}"]
    assert [row.request_id for row in await reader.list_requests()] == ["of-b"]
    rows = await world.clients["*"].list_requests()
    assert len(rows) == 3 and all(row.request_id.endswith(("of-a", "of-b", "of-")) for row in rows)
    await world.clients["*"].cancel(rows[0].request_id)  # who acts for all names ids as they are known
    assert len(await world.clients["*"].list_requests()) == 2


@pytest.mark.parametrize("named", ["b", "*", "A"])
async def test_another_tenant_is_refused_and_counted(world: World, named: str) -> None:
    assert (await refused(generate(world.clients["a"], PROMPT, tenant=named)))[0] == "TENANT_NOT_ALLOWED"
    (family,) = world.engine.guard.metrics("")
    counts = {sample.labels["reason"]: sample.value for sample in family.samples}
    assert counts["tenant_not_allowed"] == sum(counts.values()) == 1
    assert (await generate(world.clients["a"], PROMPT, tenant="a")).token_ids == [toy_output(PROMPT, 8)]


async def test_a_tenant_that_is_not_named_is_the_credentials(world: World) -> None:
    first = await generate(world.clients["a"], PROMPT)
    again = await generate(world.clients["a"], PROMPT, tenant="a")
    other = await generate(world.clients["b"], PROMPT)
    of_all = await generate(world.clients["*"], PROMPT, tenant="a")
    default = await generate(world.clients["*"], PROMPT)
    cached = [output.usage.cached_tokens for output in (first, again, other, of_all, default)]
    assert cached == [0, 12, 0, 12, 0]


async def test_long_ids_stay_within_the_protocols_bound(world: World) -> None:
    for request_id in ("x" * 64, "y" * 48, "z" * 47):
        await world.clients["a"].submit(PROMPT, GenerateOptions(sampling=SHORT, request_id=request_id))
        assert (await world.clients["a"].result(request_id, wait_s=10.0)).outputs[0].finish_reason
    assert all(len(known) <= 64 for known in world.engine.service._submissions._by_id)


async def test_requests_keep_their_tenant_when_an_engine_takes_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, forward, first = threading.Event(), HashToyRunner.forward, world.engine.engine

    def gated(runner: HashToyRunner, batch: Batch) -> torch.Tensor:
        gate.wait(DEADLINE_S)
        return forward(runner, batch)

    async def hands_over() -> bool:
        return first.is_handing_over

    monkeypatch.setattr(HashToyRunner, "forward", gated)  # the request must not have ended before it is handed over
    options = GenerateOptions(sampling=replace(GREEDY, max_tokens=40), request_id="moves")
    await world.clients["a"].submit(PROMPT, options)
    starting = asyncio.create_task(world.services.start_engine(take_over=world.engine.address))
    await until(hands_over)
    gate.set()
    second = await starting
    await second.wait_ready()
    await world.engine.wait_end()
    services = world.services
    own = await services.engine_client(second, services.credentials(Role.CLIENT, "a"))
    other = await services.engine_client(second, services.credentials(Role.CLIENT, "b"))
    assert (await refused(other.result("moves")))[0] == "UNKNOWN_REQUEST"
    result = await own.result("moves", wait_s=10.0)
    assert list(result.outputs[0].token_ids) == toy_output(PROMPT, 40)
    (moved,) = second.service._submissions._by_id.values()
    assert moved.generation is not None and moved.generation.request.tenant == "a"  # though its client named none
    assert (await generate(own, PROMPT)).usage.cached_tokens == 12
    assert (await generate(other, PROMPT)).usage.cached_tokens == 0


async def test_an_engine_for_one_tenant_takes_over_nothing_and_gets_no_memory(world: World) -> None:
    shown = world.services.credentials(Role.ENGINE, "a")
    transport = AsyncTransport(world.engine.address, CallOptions(retry_s=0), pb_grpc.EngineServiceStub, shown)
    for call, request in (("HandOver", pb.HandOverRequest()), ("ConfirmHandOver", pb.ConfirmHandOverRequest())):
        method = getattr(transport.stub, call)
        if call == "HandOver":
            asked = anext(aiter(transport.stream(method, request, CallOptions(retry_s=0))))
        else:
            asked = transport.call(method, request)
        assert (await refused(asked))[0] == "TENANT_NOT_ALLOWED"
    await transport.close()
    token = world.services.token_file(Role.ENGINE, "a")
    second = await world.services.start_engine(take_over=world.engine.address, cache_token_file=token)
    with pytest.raises(Exception, match="TENANT_NOT_ALLOWED"):
        await second.wait_ready()
    assert (await generate(world.clients["a"], PROMPT)).token_ids == [toy_output(PROMPT, 8)]


async def test_a_call_of_many_requests_begins_none_once_its_token_was_taken_out(world: World) -> None:
    client = world.clients["a"]
    assert (await generate(client, PROMPT, 4)).token_ids == [toy_output(PROMPT, 4)]
    path = world.services.tokens.path
    entries = path.read_text().split("[[")[1:]
    path.write_text("".join(f"[[{entry}" for entry in entries if 'role = "engine"' in entry))
    texts: dict[str, object] = {}

    async def is_refused() -> bool:
        try:
            await generate(client, PROMPT, 1)
        except KvkeeperError as error:
            texts[error.message] = error.code, error.reason
            return True
        return False

    await until(is_refused)
    assert list(texts) == ["the credential of this call has changed or is no longer known"], "by the call that was open"
    assert await is_refused()
    assert list(texts.values()) == [(grpc.StatusCode.UNAUTHENTICATED, "WRONG_CREDENTIAL")] * 2, "and by the gate"
