"""The real gateway and the clients that people have, on `kvkeeper serve --gateway` with the demo model.

What the gateway gives is held against what our own client gets from the same engine, with the model's own defaults. Everything
is greedy or seeded.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import transformers

from kvkeeper.client import CallOptions, EngineClient, GenerateOptions, Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.serve import END_S, MODEL, Served, serving
from tests.support.processes.services import environment, free_ports

pytestmark = pytest.mark.in_turn

PROMPT = "def fibonacci(n):"
LONG_PROMPT = "\n".join(f"def number_{n}(x):\n    return x + {n}" for n in range(12))
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "decide", "description": "decides", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--gateway") as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.ready["http"], api_key="none", max_retries=0, timeout=END_S) as client:
        yield client


@pytest.fixture
def own(served: Served) -> Iterator[EngineClient]:
    with EngineClient(served.ready["engine"], CallOptions(retry_s=0)) as client:
        yield client


def text_of(own: EngineClient, prompt: Any, **sampling: Any) -> str:
    options = GenerateOptions(sampling=Sampling(**{"temperature": 0, "max_tokens": 16, **sampling}))
    return "".join(chunk.text for chunk in own.generate(prompt, options))


# -- completions and chat


def test_the_ready_text_names_what_works(served: Served) -> None:
    assert served.model == MODEL
    assert served.ready["http"].startswith("http://127.0.0.1:")
    command = ["bash", "-c", served.ready["curl"] + " -s"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=True)
    assert json.loads(said.stdout)["choices"][0]["text"]
    assert served.ready["openai"].startswith("OpenAI(base_url=")


def test_what_is_told_before_ready_is_the_services_own(served: Served) -> None:
    """Not the gateway's drawing, colours, remarks on what it is not, nor what waiting for it makes it say."""
    lines = served.told.splitlines()
    others = [line for line in lines if not line.startswith("kvkeeper: ")]  # they come from processes of their own, at any time
    assert [line for line in lines if line not in others][-1] == "kvkeeper: starting the gateway service"
    assert {json.loads(line)["service"] for line in others} == {"cache", "engine"}


def test_a_warning_of_the_gateway_is_told_as_json(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=served.model, prompt=PROMPT, max_tokens=100_000)
    deadline = time.monotonic() + END_S
    while not _warnings_of(told := served.log.read_text().removeprefix(served.told)):  # it comes over a pipe
        assert time.monotonic() < deadline, told
    assert "\x1b" not in told


def _warnings_of(told: str) -> list[str]:
    """The gateway's own warnings of requests that failed."""
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{") and line.endswith("}")]
    warnings = [line["message"] for line in lines if "service" not in line and line["level"] == "WARN"]
    return [message for message in warnings if "failed" in message]


def test_the_model_has_the_name_of_its_repository_everywhere(served: Served, client: openai.OpenAI, own: EngineClient) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert own.model().model_id == MODEL


def test_nothing_is_looked_up_on_a_hub_and_tokens_are_those_of_the_folder(served: Served, client: openai.OpenAI) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(served.folder)
    found = client.post("/tokenize", body={"model": served.model, "prompt": LONG_PROMPT}, cast_to=dict[str, Any])
    assert found["tokens"] == tokenizer(LONG_PROMPT)["input_ids"]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(openai.BadRequestError, match="image"):
        client.chat.completions.create(model=served.model, messages=[{"role": "user", "content": [picture]}])  # type: ignore[list-item]
    assert served.hub.asked == []


def test_the_models_own_defaults_shape_what_is_drawn(served: Served, client: openai.OpenAI, own: EngineClient) -> None:
    options = GenerateOptions(sampling=Sampling(seed=5, max_tokens=16))
    expected = "".join(chunk.text for chunk in own.generate(PROMPT, options))
    found = client.completions.create(model=served.model, prompt=PROMPT, seed=5, max_tokens=16)
    assert found.choices[0].text == expected
    neutral = Sampling(seed=5, max_tokens=16, temperature=1, top_k=0, repetition_penalty=1, typical_p=1)
    assert expected != "".join(chunk.text for chunk in own.generate(PROMPT, GenerateOptions(sampling=neutral)))


def test_a_completion_is_what_the_engine_gives(served: Served, client: openai.OpenAI, own: EngineClient) -> None:
    found = client.completions.create(model=served.model, prompt=PROMPT, max_tokens=16, temperature=0)
    assert found.choices[0].text == text_of(own, PROMPT)
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.completion_tokens == 16


def test_a_streamed_completion_is_the_same_and_tells_cached_tokens(
    served: Served, client: openai.OpenAI, own: EngineClient
) -> None:
    for is_cached in (False, True):
        stream = client.completions.create(
            model=served.model,
            prompt=LONG_PROMPT,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert len(chunks) > 3
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text_of(own, LONG_PROMPT)
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens == 16
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == is_cached


def test_a_chat_is_the_template_of_transformers_continued(served: Served, client: openai.OpenAI, own: EngineClient) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    found = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=16, temperature=0)
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(ids)
    assert (found.choices[0].message.content or "").strip() == text_of(own, ids).strip()
    stream = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=16, temperature=0, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts).strip() == text_of(own, ids).strip()


def test_seeded_continuations_are_the_same_again_and_differ_from_each_other(served: Served, client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        found = client.completions.create(model=served.model, prompt=PROMPT, max_tokens=12, n=2, seed=3, temperature=1)
        return [choice.text for choice in sorted(found.choices, key=lambda choice: choice.index)]

    first = ask()
    assert first == ask()
    assert first[0] != first[1]


def test_a_stop_string_ends_the_text_before_it(served: Served, client: openai.OpenAI, own: EngineClient) -> None:
    whole = text_of(own, PROMPT, max_tokens=30)
    stop = whole.split()[3]
    found = client.completions.create(model=served.model, prompt=PROMPT, max_tokens=30, temperature=0, stop=[stop])
    assert found.choices[0].text == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    kept = client.completions.create(
        model=served.model, prompt=PROMPT, max_tokens=30, temperature=0, stop=[stop], extra_body={"no_stop_trim": True}
    )
    assert kept.choices[0].text == whole[: whole.index(stop) + len(stop)]


def test_log_probabilities_are_the_engines(served: Served, client: openai.OpenAI, own: EngineClient) -> None:
    found = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    told = found.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    options = GenerateOptions(sampling=Sampling(max_tokens=4, temperature=0, num_logprobs=2))
    ids = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL_DIR).apply_chat_template(CHAT, return_dict=False)
    expected = [each for chunk in own.generate(ids, options) for each in chunk.logprobs]
    assert [token.logprob for token in told.content] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert [len(token.top_logprobs) for token in told.content] == [2] * 4


def test_an_absent_limit_is_as_many_tokens_as_fit(served: Served, client: openai.OpenAI) -> None:
    found = client.completions.create(model=served.model, prompt=PROMPT * 250, temperature=0, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.total_tokens == 2048
    assert found.usage.completion_tokens != 256, "the default of our own protocol"


# -- forms and tools


def test_a_json_schema_is_kept(served: Served, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=40, temperature=0, response_format=form
    )
    assert set(json.loads(found.choices[0].message.content or "")) == {"yes"}
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "decide"}}], ids=["required", "named"]
)
def test_a_tool_that_has_to_be_called_is_called_with_its_arguments(served: Served, client: openai.OpenAI, choice: Any) -> None:
    found = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=60, temperature=0, tools=[TOOL], tool_choice=choice
    )
    (call,) = found.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "decide"
    assert set(json.loads(call.function.arguments)) == {"yes"}
    assert found.choices[0].finish_reason == "tool_calls"


def test_a_tool_that_may_be_called_leaves_the_model_its_text(served: Served, client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=8, temperature=0, tools=[TOOL], tool_choice="auto"
    )
    assert found.choices[0].message.content
    assert not found.choices[0].message.tool_calls


# -- other interfaces


def test_messages_of_anthropics_client(served: Served, client: openai.OpenAI) -> None:
    base = served.ready["http"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=END_S) as other:
        found = other.messages.create(model=served.model, max_tokens=12, messages=CHAT, extra_body={"temperature": 0})
        streamed = other.messages.create(
            model=served.model, max_tokens=12, messages=CHAT, stream=True, extra_body={"temperature": 0}
        )
        parts = [
            event.delta.text for event in streamed if event.type == "content_block_delta" and event.delta.type == "text_delta"
        ]
    chat = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=12, temperature=0)
    (block,) = found.content
    assert block.type == "text"
    assert block.text == "".join(parts) == chat.choices[0].message.content
    assert found.usage.output_tokens == 12
    assert found.stop_reason == "max_tokens"


def test_responses_of_openais_client(served: Served, client: openai.OpenAI) -> None:
    found = client.responses.create(model=served.model, input=PROMPT, max_output_tokens=16, temperature=0)
    chat = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=16, temperature=0)
    assert found.output_text == chat.choices[0].message.content
    assert found.status == "incomplete"


# -- errors


def test_errors_have_the_status_that_clients_expect(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=served.model, prompt="x y " * 4000, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="at most 2048 fit"):
        client.completions.create(model=served.model, prompt=PROMPT, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=served.model, prompt=PROMPT, temperature=9)
    for refused, said in (({"ebnf": 'root ::= "a"'}, "not served"), ({"min_tokens": 5}, "min_tokens")):
        with pytest.raises(openai.BadRequestError, match=said):
            client.completions.create(model=served.model, prompt=PROMPT, max_tokens=4, extra_body=refused)
    with pytest.raises(openai.BadRequestError, match="Embed"):
        client.embeddings.create(model=served.model, input=PROMPT)
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt=PROMPT)
    assert client.completions.create(model=served.model, prompt=PROMPT, max_tokens=1).choices, "it serves on"


# -- crowds and clients that go


def test_64_streams_at_once_are_each_the_engines(served: Served, client: openai.OpenAI, own: EngineClient) -> None:
    prompts = [f"def f_{n}(x):" for n in range(64)]
    with ThreadPoolExecutor(64) as pool:

        def stream(prompt: str) -> str:
            chunks = client.completions.create(model=served.model, prompt=prompt, max_tokens=8, temperature=0, stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

        found = list(pool.map(stream, prompts))
    assert found == [text_of(own, prompt, max_tokens=8) for prompt in prompts]


def test_a_connection_that_is_closed_ends_the_request(served: Served, client: openai.OpenAI, own: EngineClient) -> None:
    num_before = own.stats().num_cancelled_requests
    stream = client.completions.create(
        model=served.model, prompt=PROMPT, max_tokens=2000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert len(own.list_requests()) == 1
    stream.close()
    while own.list_requests():  # each look is a call, so others have their turn
        pass
    assert own.stats().num_cancelled_requests == num_before + 1


# -- the command


def test_without_the_gateway_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    hide = tmp_path / "sitecustomize.py"
    hide.write_text("import sys\nsys.modules['smg'] = None\n")
    env = {**environment(tmp_path), "PYTHONPATH": f"{tmp_path}:{environment(tmp_path)['PYTHONPATH']}"}
    found = subprocess.run(
        [sys.executable, "-m", "kvkeeper.cli", "serve", "--gateway"], env=env, capture_output=True, text=True, timeout=END_S
    )
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "[gateway]" in found.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--http", "0.0.0.0:8000"), "loopback"),
        (("--http", "unix:/tmp/x"), "--http"),
        (("--gateway", "--engine-listen", "unix:/tmp/x"), "--engine-listen"),
        (("no/such/model",), "no/such/model"),
        (("--gateway", "--wrong-flag", "3"), "--gateway-..."),
        (("--http", "127.0.0.1:8000", "--wrong-flag", "3"), "--http-..."),
    ],
)
def test_wrong_flags_are_told_before_anything_starts(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    cache, engine = free_ports(2)  # others may have the usual ones
    addresses = ("--cache-listen", cache, "--engine-listen", engine)
    command = [sys.executable, "-m", "kvkeeper.cli", "serve", *addresses, *flags]
    found = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=END_S)
    assert found.returncode in (1, 2)
    assert said in found.stderr
    assert shutil.which("smg") is None or "listening" not in found.stderr
