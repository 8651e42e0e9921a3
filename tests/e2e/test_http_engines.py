"""The HTTP front before engines that know keys, that die under it, and that have no tokenizer."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.common.trust.caller import Role
from kvkeeper.http.engines import Engines
from tests.support.processes.fleet import DEADLINE_S, fleet
from tests.support.processes.service_pair import Services
from tests.support.stand_ins.asgi import Answer, post
from tests.support.trust.trusting_services import Trusting, trusting

pytestmark = pytest.mark.in_turn

PROMPT = list(range(1, 34))
BODY = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}


@pytest.fixture
async def trusted(tmp_path: Path) -> AsyncIterator[Trusting]:
    async with trusting(tmp_path) as made:
        yield made


def headers(world: Trusting, role: Role, tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {world.token_file(role, tenant).read_text().strip()}"}


async def test_a_key_is_a_credential_of_the_engine(trusted: Trusting, monkeypatch: pytest.MonkeyPatch) -> None:
    await trusted.start_cache()
    engine = await trusted.start_engine()
    await engine.wait_ready()
    monkeypatch.setenv("KVKEEPER_TLS_CA", str(trusted.ca_path))
    monkeypatch.setenv("KVKEEPER_TOKEN_FILE", str(trusted.token_file(Role.OPERATOR)))  # which is not the callers'
    engines = Engines(engine.address)
    try:

        async def ask(given: dict[str, str]) -> Answer:
            return await post(engines, "/v1/completions", BODY, given)

        async def num_cached(given: dict[str, str]) -> int:
            answer = await ask(given)
            assert answer.status == 200, answer.parts
            return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        a, b = headers(trusted, Role.CLIENT, "a"), headers(trusted, Role.CLIENT, "b")
        assert await num_cached(a) == 0
        assert await num_cached(a) == 32, "the same tenant's"
        assert await num_cached(b) == 0, "another's"
        for given in ({}, {"authorization": "Bearer wrong"}):
            answer = await ask(given)
            assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
        assert (await ask(headers(trusted, Role.READER, "a"))).status == 403
        assert (await post(engines, "/health", b"")).status == 200
        assert (await post(engines, "/v1/models", b"", a)).json["data"][0]["id"] == "hash-toy"
    finally:
        await engines.close()


async def test_an_engine_without_credentials_takes_any_key(world: Services) -> None:
    await world.start_cache()
    engines = Engines((await world.start_engine()).address)
    try:
        for key in ("none", "sk-1234", ""):
            assert (await post(engines, "/v1/completions", BODY, {"authorization": f"Bearer {key}"})).status == 200
    finally:
        await engines.close()


async def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(world: Services) -> None:
    await world.start_cache()
    engines = Engines((await world.start_engine()).address)
    try:
        found = await post(engines, "/v1/completions", {**BODY, "return_token_ids": True})
        assert len(found.json["choices"][0]["token_ids"]) == 2
        for path, fields in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [{"role": "user"}]})):
            refused = await post(engines, f"/v1/{path}", {"max_tokens": 2, **fields})
            assert (refused.status, "error" in refused.json) == (400, True)
    finally:
        await engines.close()


async def test_cache_salts_share_nothing(world: Services) -> None:
    await world.start_cache()
    engines = Engines((await world.start_engine()).address)
    try:

        async def num_cached(**fields: Any) -> int:
            found = (await post(engines, "/v1/completions", {**BODY, **fields})).json
            return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await num_cached(cache_salt="x"), await num_cached(cache_salt="y"), await num_cached()] == [0, 0, 0]
        assert await num_cached(cache_salt="x") == 32
    finally:
        await engines.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_engine_that_dies_ends_its_requests_with_an_error_and_the_next_one_serves(is_stream: bool) -> None:
    async with fleet(1, {"num_blocks": 1000}) as services:
        engines = Engines(services.engine_addresses[0])
        try:
            body = {**BODY, "max_tokens": 3000, "ignore_eos": True}
            streamed, answer = Answer(), Answer()
            asking = [asyncio.create_task(post(engines, "/v1/completions", {**body, "stream": True}, answer=streamed))]
            if not is_stream:
                asking.append(asyncio.create_task(post(engines, "/v1/completions", body, answer=answer)))
            async with asyncio.timeout(DEADLINE_S):
                await streamed.has_begun.wait()
            await services.engines[0].kill()
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*asking)
            assert streamed.status == 200
            assert "error" in streamed.events[-1]
            if not is_stream:
                assert (answer.status, "retry-after" in answer.headers) == (503, True)
            await services.start_engine(0)
            assert (await post(engines, "/v1/completions", BODY)).status == 200
        finally:
            await engines.close()
