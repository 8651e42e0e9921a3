"""`kvkeeper serve` with a model whose checkpoint holds towers, too: its text is served, and a picture is refused by number."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from kvkeeper.client import CallOptions, Chat, EngineClient, GenerateOptions, Sampling
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.models.wrapped import wrap
from tests.support.processes.serve import END_S, MODEL, Served, serving

TURNS: list[Any] = [{"role": "user", "content": "def fibonacci(n):"}]
PICTURE = "data:image/png;base64,iVBORw0KGgo="
SAID = "this engine reads the text part of qwen3_vl, and the request has "


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(change=lambda folder: wrap(folder, wrapper="qwen3_vl")) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.ready["http"], api_key="none", max_retries=0, timeout=END_S) as client:
        yield client


def test_the_text_is_that_of_the_model_alone(served: Served, client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=MODEL, messages=TURNS, temperature=0, max_tokens=16)
    alone = load_served_model(EngineConfig(model=str(DEMO_MODEL_DIR), progress=False))
    with EngineClient(served.ready["engine"], CallOptions(retry_s=0)) as own:
        model = own.model()
        assert (model.text_part_of, model.num_parameters) == ("qwen3_vl", alone.num_parameters)
        chunks = own.generate(Chat(TURNS), GenerateOptions(sampling=Sampling(max_tokens=16, temperature=0)))
        assert found.choices[0].message.content == "".join(chunk.text for chunk in chunks)
    lines = [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]
    told = {line["reason"]: line["num_tensors"] for line in lines if line.get("event") == "tensors_left_out"}
    assert told == {
        "is of model.visual, and the text part of qwen3_vl is served": 2,
        "is of multi_modal_projector, and the text part of qwen3_vl is served": 1,
    }


def test_a_chat_with_pictures_is_refused_with_their_number(client: openai.OpenAI) -> None:
    for number, words in ((1, "1 picture"), (3, "3 pictures")):
        parts: list[Any] = [{"type": "text", "text": "x"}, *[{"type": "image_url", "image_url": {"url": PICTURE}}] * number]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=[*TURNS, {"role": "user", "content": parts}])
        assert (refused.value.param, refused.value.body["message"]) == ("messages", f"messages: {SAID}{words}")  # type: ignore[index]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE, "detail": "auto"}]}]
    with pytest.raises(openai.BadRequestError, match=f"input: {SAID}1 picture"):
        client.responses.create(model=MODEL, input=items)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]}
    with pytest.raises(openai.BadRequestError, match=f"messages: {SAID}1 picture"):
        client.post(f"{str(client.base_url).removesuffix('v1/')}tokenize", body=asked, cast_to=dict[str, Any])


def test_a_message_with_pictures_is_refused_with_their_number(served: Served) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    picture: Any = {"type": "image", "source": source}
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": [picture]}
    messages: list[Any] = [{"role": "user", "content": [picture, {"type": "text", "text": "x"}, result]}]
    with anthropic.Anthropic(base_url=served.ready["http"].removesuffix("/v1"), api_key="none", max_retries=0) as client:
        for call in (client.messages.create, client.messages.count_tokens):
            fields = {"max_tokens": 4} if call == client.messages.create else {}
            with pytest.raises(anthropic.BadRequestError, match=f"messages: {SAID}2 pictures"):
                call(model=MODEL, messages=messages, **fields)  # type: ignore[operator]
