"""Conversations and metadata: returned with the request, used to list requests, and logged as far as they may be."""

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from kvkeeper.client import GenerateOptions, KvkeeperError
from tests.clients.test_cli import kvkeeper
from tests.support.models.odd_models import GATE_TOKEN, NAN_TOKEN, odd_model
from tests.support.processes.service_pair import GREEDY, Services, generate, until

TAGS = {"user": "ada", "trace": "é" * 256}


async def test_requests_are_listed_by_conversation(world: Services) -> None:
    client, gate = await world.serve_gated()
    crowd = [
        asyncio.create_task(generate(client, [GATE_TOKEN], request_id=f"r{place}", session_id=talk, metadata=TAGS))
        for place, talk in enumerate(["one", "two", "one", ""])
    ]

    async def all_there() -> bool:
        return len(await client.list_requests()) == 4

    await until(all_there)
    found = await client.list_requests("one")
    assert {row.request_id for row in found} == {"r0", "r2"}
    assert all((row.session_id, dict(row.metadata)) == ("one", TAGS) for row in found)
    assert [row.request_id for row in await client.list_requests("two")] == ["r1"]
    assert await client.list_requests("none") == ()
    gate.set()
    await asyncio.gather(*crowd)


async def test_the_command_line_lists_them(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    flags = ("requests", "--engine", engine.address)
    assert (await kvkeeper(*flags)).out == "no live requests\n"
    client = await world.client(engine)
    for name in ("one", "two"):
        await client.submit([GATE_TOKEN], GenerateOptions(request_id=f"of-{name}", session_id=name, metadata=TAGS, priority=3))
    told = (await kvkeeper(*flags)).out.splitlines()
    assert [line.split()[:2] for line in told[2:]] == [["of-one", "one"], ["of-two", "two"]]
    (found,) = json.loads((await kvkeeper(*flags, "--session-id", "two", "--json")).out)["requests"]
    assert (found["request_id"], found["metadata"], found["priority"]) == ("of-two", TAGS, 3)
    gate.set()


async def test_a_submitted_request_tells_them_back(world: Services) -> None:
    client = await world.serve()
    await client.submit([1, 2, 3], GenerateOptions(request_id="mine", session_id="talk", metadata=TAGS, sampling=GREEDY))
    found = await client.result("mine", wait_s=20)
    assert (found.state, found.session_id, found.metadata) == ("completed", "talk", TAGS)


async def test_the_log_tells_each_end_once_and_never_metadata(world: Services) -> None:
    client = await world.serve(odd_model())
    with capture_logs() as lines:
        good = await generate(client, [1, 2, 3], request_id="good", session_id="talk", metadata=TAGS)
        with pytest.raises(KvkeeperError):
            await generate(client, [NAN_TOKEN], request_id="bad", metadata=TAGS)
    ends = {line["request_id"]: line for line in lines if line["event"] == "request_ended"}
    assert len([line for line in lines if line["event"] == "request_ended"]) == len(ends) == 2
    assert (ends["good"]["session_id"], ends["good"]["state"], ends["good"]["new_tokens"]) == ("talk", "completed", 8)
    assert (ends["good"]["finish_reasons"], ends["bad"]["finish_reasons"]) == (["length"], [])
    assert 0 < ends["good"]["first_token_seconds"] < ends["good"]["seconds"]
    assert not {"text", "token_ids", "prompt", "metadata"} & (ends["good"].keys() | ends["bad"].keys())
    assert ("session_id" in ends["bad"], ends["bad"]["reason"]) == (False, "REQUEST_FAILED")
    assert good.usage.new_tokens == 8
    assert "ada" not in str(lines)
    assert "token_ids" not in str(lines)
