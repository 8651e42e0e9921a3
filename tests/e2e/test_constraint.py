"""Constrained output, with the demo model, which writes nothing of the kind without constraints."""

import json
import re

import grpc
import pytest

from kvkeeper.client import AsyncEngineClient, Sampling, Thought
from kvkeeper.engine_service.compute.served_model import ServedModel
from tests.support.processes.service_pair import Output, Services, generate
from tests.support.worlds.cache_api import failure

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "year": {"type": "integer", "minimum": 1990, "maximum": 2030},
        },
        "required": ["name", "year"],
        "additionalProperties": False,
    }
)
PROMPT = "def main():\n    "


@pytest.fixture
async def client(world: Services, demo_model: ServedModel) -> AsyncEngineClient:
    await world.start_cache()
    return await world.client(await world.start_engine(demo_model, block_size=16))


async def run(client: AsyncEngineClient, n: int = 4, max_tokens: int = 100, **sampling: object) -> Output:
    return await generate(client, PROMPT, max_tokens, Sampling(temperature=1.0, seed=3, **sampling), n=n)  # type: ignore[arg-type]


async def test_a_json_schema(client: AsyncEngineClient) -> None:
    free = await run(client)
    assert not any(text.startswith("{") for text in free.texts)
    output = await run(client, json_schema=SCHEMA)
    assert output.reasons == ["stop"] * 4
    values = [json.loads(text) for text in output.texts]
    assert all(set(value) == {"name", "year"} and 1990 <= value["year"] <= 2030 for value in values)
    assert len(set(output.texts)) > 1, "each continuation has its own place in the grammar"


async def test_a_regular_expression(client: AsyncEngineClient) -> None:
    pattern = r"v[0-9]{1,2}\.[0-9]\.(0|rc[1-3])"
    output = await run(client, n=6, regex=pattern)
    assert all(re.fullmatch(pattern, text) for text in output.texts)
    assert set(output.reasons) <= {"stop", "end_of_sequence"}


async def test_choices_are_taken_as_they_are_written(client: AsyncEngineClient) -> None:
    texts = ("a.c", "maybe (not)", "é\n", "[x]")
    output = await run(client, n=16, choices=texts)
    assert set(output.texts) <= set(texts)
    assert len(set(output.texts)) > 1
    assert set(output.reasons) == {"stop"}


async def test_a_thought_before_it_is_free(client: AsyncEngineClient) -> None:
    begun = await run(client, regex="[a-c]{3}", thought=Thought("", ")"))
    ended = [text for text, reason in zip(begun.texts, begun.reasons, strict=True) if reason == "stop"]
    assert ended and all(re.fullmatch(r"(?s)[^)]*\)\s{0,8}[a-c]{3}", text) for text in ended)
    assert all(")" not in text for text, reason in zip(begun.texts, begun.reasons, strict=True) if reason == "length")
    either = await run(client, n=16, regex="[a-c]{3}", thought=Thought("x", ")"))
    assert all(re.match(r"x|[a-c]{3}\Z", text) for text in either.texts)
    assert {text[0] == "x" for text in either.texts} == {True, False}


async def test_max_tokens_comes_first(client: AsyncEngineClient) -> None:
    output = await run(client, n=1, max_tokens=3, regex="[a-z]{500}")
    assert (output.reasons, len(output.token_ids[0])) == (["length"], 3)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"regex": "(abc"}, "sampling.regex"),
        ({"regex": "a{3,2}"}, "sampling.regex"),
        ({"regex": ""}, "sampling.regex"),
        ({"regex": "a" * 65537}, "sampling.regex"),
        ({"json_schema": "{"}, "sampling.json_schema"),
        ({"json_schema": "[1]"}, "sampling.json_schema"),
        ({"json_schema": '{"type": "nothing"}'}, "sampling.json_schema"),
        ({"choices": ()}, "sampling.choices"),
        ({"choices": ("a", "")}, "sampling.choices"),
    ],
)
async def test_a_bad_grammar_is_refused(client: AsyncEngineClient, sampling: dict[str, object], field: str) -> None:
    refused = await failure(run(client, **sampling))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refused.metadata["field"] == field
    assert not refused.message.endswith((":", "error", "(")), "a reason, not where a longer text was cut"
    assert (await run(client, n=1, max_tokens=2)).reasons == ["length"], "the engine serves on"


async def test_a_model_without_text_takes_no_constraint(world: Services) -> None:
    client = await world.serve()
    assert (await failure(generate(client, [1], 4, Sampling(regex="a")))).reason == "INVALID_FIELD"
