"""OpenAI's own client on `kvkeeper serve` with the demo model: what it gets is what our own client gets from the same engine.

Everything is greedy or seeded. Fields that no value of the client's own schema asks for go in `extra_body`.
"""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
import transformers

from kvkeeper.client import CallOptions, Chat, EngineClient, GenerateOptions, Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.serve import END_S, MODEL, Served, serving

PROMPT = "def fibonacci(n):"
LONG_PROMPT = "\n".join(f"def number_{n}(x):\n    return x + {n}" for n in range(12))
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": False}
GREEDY = {"temperature": 0, "max_tokens": 16}
NUM_MOST = 2048


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.ready["http"], api_key="none", max_retries=0, timeout=END_S) as client:
        yield client


@pytest.fixture
def own(served: Served) -> Iterator[EngineClient]:
    with EngineClient(served.ready["engine"], CallOptions(retry_s=0)) as client:
        yield client


def own_texts(own: EngineClient, prompt: Any, n: int | None = None, **sampling: Any) -> list[str]:
    """The texts that our own client gets."""
    options = GenerateOptions(n=n, sampling=Sampling(**{**GREEDY, **sampling}))
    texts = [""] * (n or 1)
    for chunk in own.generate(prompt, options):
        texts[chunk.index] += chunk.text
    return texts


def text_of(own: EngineClient, prompt: Any, **sampling: Any) -> str:
    return own_texts(own, prompt, **sampling)[0]


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, **{**GREEDY, **fields})


def chat(client: openai.OpenAI, messages: Any = CHAT, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **{**GREEDY, **fields})


# -- the command


def test_the_ready_text_names_what_works_and_each_process_logs_as_itself(served: Served, client: openai.OpenAI) -> None:
    assert served.model == MODEL
    assert served.ready["http"].startswith("http://127.0.0.1:")
    *_, last = lines = served.told.splitlines()
    assert last == "kvkeeper: starting the http service"
    assert {json.loads(line)["service"] for line in lines if not line.startswith("kvkeeper: ")} == {"cache", "engine"}
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


# -- completions


def test_a_completion_is_what_the_engine_gives(client: openai.OpenAI, own: EngineClient) -> None:
    found = complete(client)
    assert found.choices[0].text == text_of(own, PROMPT)
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.completion_tokens, found.usage.prompt_tokens) == (16, len(own.tokenize(PROMPT)))
    assert found.object == "text_completion"
    assert client.completions.create(model=MODEL, prompt=PROMPT).usage.completion_tokens <= 16, "OpenAI's default"  # type: ignore[union-attr]


def test_a_streamed_completion_is_the_same_and_tells_cached_tokens(client: openai.OpenAI, own: EngineClient) -> None:
    for is_cached in (False, True):
        *chunks, last = complete(client, LONG_PROMPT, stream=True, stream_options={"include_usage": True})
        assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(own, LONG_PROMPT)
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert (last.choices, last.usage.completion_tokens) == ([], 16)
        assert bool(last.usage.prompt_tokens_details.cached_tokens) == is_cached


def test_prompts_may_be_many_and_of_token_ids(client: openai.OpenAI, own: EngineClient) -> None:
    texts = [PROMPT, "import os\n", "class A:"]
    ids = [list(own.tokenize(text)) for text in texts]
    expected = [text for prompt in texts for text in own_texts(own, prompt, n=2, temperature=1, seed=5)]
    for prompt in (texts, ids):
        found = complete(client, prompt, n=2, temperature=1, seed=5)
        assert [choice.index for choice in found.choices] == list(range(6))
        assert [choice.text for choice in found.choices] == expected
        streamed = [""] * 6
        for chunk in complete(client, prompt, n=2, temperature=1, seed=5, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == expected
    assert complete(client, ids[0]).choices[0].text == text_of(own, PROMPT)


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_with_log_probabilities_scores_the_prompt(client: openai.OpenAI, own: EngineClient, is_stream: bool) -> None:
    text = "def héllo(世):"
    ids = own.tokenize(text)
    options = GenerateOptions(sampling=Sampling(max_tokens=1, temperature=0, num_logprobs=2, num_prompt_logprobs=2))
    (first, *_) = own.generate(text, options)
    for prompt in (text, list(ids)):
        found = complete(client, prompt, max_tokens=0, echo=True, logprobs=2, stream=is_stream)
        choice = (next(iter(found)) if is_stream else found).choices[0]
        told = choice.logprobs
        assert choice.text == text
        assert told.token_logprobs[0] is told.top_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx([each.logprob for each in first.prompt_logprobs], abs=1e-4)
        assert len(told.tokens) == len(ids)
        assert "".join(token for token in told.tokens if not token.startswith("bytes:")) == "def hllo():"
        assert "bytes:\\xc3" in told.tokens
        assert [text[at] for at in told.text_offset[:2]] == ["d", " "]
        assert all(2 <= len(top) <= 3 for top in told.top_logprobs[1:])
    whole = complete(client, text, echo=True, logprobs=1, n=2, temperature=1, seed=1)
    assert [choice.text[: len(text)] for choice in whole.choices] == [text] * 2
    assert [len(choice.logprobs.tokens) for choice in whole.choices] == [len(ids) + 16] * 2
    assert complete(client, text, echo=True).choices[0].text == text + text_of(own, text)


def test_log_probabilities_of_a_completion_are_the_engines(client: openai.OpenAI, own: EngineClient) -> None:
    options = GenerateOptions(sampling=Sampling(max_tokens=6, temperature=0, num_logprobs=3))
    expected = [each for chunk in own.generate(PROMPT, options) for each in chunk.logprobs]
    whole = complete(client, max_tokens=6, logprobs=3).choices[0]
    parts = [chunk.choices[0] for chunk in complete(client, max_tokens=6, logprobs=3, stream=True)]
    for told in ([whole.logprobs], [part.logprobs for part in parts]):
        assert [each for one in told for each in one.token_logprobs] == pytest.approx([e.logprob for e in expected], abs=1e-4)
        tokens = [each for one in told for each in one.tokens]
        assert "".join(tokens) == whole.text
        assert [at for one in told for at in one.text_offset] == [len("".join(tokens[:n])) for n in range(6)]


def test_best_of_and_beam_search_are_the_engines(client: openai.OpenAI, own: EngineClient) -> None:
    options = GenerateOptions(n=2, best_of=4, sampling=Sampling(max_tokens=8, temperature=1, seed=3))
    expected = [chunk.text for chunk in sorted(own.generate(PROMPT, options), key=lambda chunk: chunk.index) if chunk.text]
    found = complete(client, n=2, best_of=4, temperature=1, seed=3, max_tokens=8)
    assert [choice.text for choice in found.choices] == expected
    beams = complete(client, n=2, max_tokens=8, extra_body={"use_beam_search": True})
    assert len({choice.text for choice in beams.choices}) == 2


# -- chats


def test_a_chat_is_the_template_of_transformers_continued(client: openai.OpenAI, own: EngineClient) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    found = chat(client)
    assert found.usage.prompt_tokens == len(ids)
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", text_of(own, ids))
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(own, ids)
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert (chunks[-1].choices[0].finish_reason, last.choices) == ("length", [])
    assert last.usage.total_tokens == len(ids) + 16


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    first = chat(client).choices[0].message
    assert chat(client, [*CHAT, first.model_dump(), {"role": "user", "content": [{"type": "text", "text": "x"}]}]).choices


def test_an_absent_limit_of_a_chat_is_as_many_tokens_as_fit(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT * 250}]
    found = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
    assert found.usage is not None
    assert found.usage.total_tokens == NUM_MOST


def test_log_probabilities_of_a_chat_are_the_engines(client: openai.OpenAI, own: EngineClient) -> None:
    options = GenerateOptions(sampling=Sampling(max_tokens=4, temperature=0, num_logprobs=2))
    expected = [each for chunk in own.generate(Chat(CHAT), options) for each in chunk.logprobs]
    whole = chat(client, max_tokens=4, logprobs=True, top_logprobs=2).choices[0]
    parts = [chunk.choices[0].logprobs for chunk in chat(client, max_tokens=4, logprobs=True, top_logprobs=2, stream=True)]
    for told in (whole.logprobs.content, [each for part in parts if part for each in part.content]):
        assert [token.logprob for token in told] == pytest.approx([each.logprob for each in expected], abs=1e-4)
        assert [len(token.top_logprobs) for token in told] == [2] * 4
        assert bytes(byte for token in told for byte in token.bytes).decode() == whole.message.content
    assert [len(token.top_logprobs) for token in chat(client, logprobs=True, max_tokens=1).choices[0].logprobs.content] == [0]


def test_a_message_can_be_continued(client: openai.OpenAI, own: EngineClient) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "    return"}]
    found = chat(client, messages, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert found.choices[0].message.content == text_of(own, Chat(messages, continue_final_message=True))


# -- sampling


def test_the_models_own_defaults_shape_what_is_drawn(client: openai.OpenAI, own: EngineClient) -> None:
    options = GenerateOptions(sampling=Sampling(seed=5, max_tokens=16))
    expected = "".join(chunk.text for chunk in own.generate(PROMPT, options))
    assert client.completions.create(model=MODEL, prompt=PROMPT, seed=5, max_tokens=16).choices[0].text == expected


def test_seeds_are_64_bits_each_its_own(client: openai.OpenAI, own: EngineClient) -> None:
    seeds = (0, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -2)
    found = [complete(client, temperature=1, seed=seed).choices[0].text for seed in seeds]
    assert found == [complete(client, temperature=1, seed=seed).choices[0].text for seed in seeds]
    assert len(set(found)) == len(seeds)
    assert found[4] == text_of(own, PROMPT, temperature=1, seed=2**63 - 1)
    with pytest.raises(openai.BadRequestError, match="seed"):
        complete(client, seed=2**64)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, own: EngineClient) -> None:
    whole = text_of(own, PROMPT, max_tokens=30)
    stop = whole.split()[3]
    for fields in ({"stop": [stop]}, {"stop": stop}):
        found = complete(client, max_tokens=30, **fields).choices[0]
        assert (found.text, found.finish_reason) == (whole[: whole.index(stop)], "stop")


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "logit_bias": ({"logit_bias": {"5": 100}}, {"logit_bias": {5: 100.0}}),
    "frequency_penalty": ({"frequency_penalty": 2}, {"frequency_penalty": 2}),
    "presence_penalty": ({"presence_penalty": 2}, {"presence_penalty": 2}),
    "top_p": ({"top_p": 0.1, "temperature": 1, "seed": 3}, {"top_p": 0.1, "temperature": 1, "seed": 3}),
    "top_k": ({"top_k": 2, "temperature": 1, "seed": 3}, {"top_k": 2, "temperature": 1, "seed": 3}),
    "top_k off": ({"top_k": -1, "temperature": 1, "seed": 3}, {"top_k": 0, "temperature": 1, "seed": 3}),
    "min_p": ({"min_p": 0.5, "temperature": 1, "seed": 3}, {"min_p": 0.5, "temperature": 1, "seed": 3}),
    "typical_p": ({"typical_p": 0.2, "temperature": 1, "seed": 3}, {"typical_p": 0.2, "temperature": 1, "seed": 3}),
    "repetition_penalty": ({"repetition_penalty": 3}, {"repetition_penalty": 3}),
    "ignore_eos": ({"ignore_eos": True, "max_tokens": 60}, {"ignore_eos": True, "max_tokens": 60}),
    "allowed_token_ids": ({"allowed_token_ids": [5, 6, 7]}, {"allowed_token_ids": [5, 6, 7]}),
    "bad_words": ({"bad_words": ["return"]}, {"bad_words": ("return",)}),
    "guided_regex": ({"guided_regex": "[abc]{5}"}, {"regex": "[abc]{5}"}),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, {"choices": ("yes", "no")}),
    "guided_json": ({"guided_json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    "structured regex": ({"structured_outputs": {"regex": "[abc]{5}"}}, {"regex": "[abc]{5}"}),
    "structured choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choices": ("yes", "no")}),
    "structured json": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": json.dumps(SCHEMA)}),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"json_schema": json.dumps(SCHEMA)},
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_shapes_the_text_as_it_does_for_our_own_client(client: openai.OpenAI, own: EngineClient, name: str) -> None:
    fields, sampling = FIELDS[name]
    expected = text_of(own, PROMPT, **sampling)
    assert complete(client, extra_body=fields).choices[0].text == expected
    assert chat(client, extra_body=fields).choices[0].message.content == text_of(own, Chat(CHAT), **sampling)
    if name not in ("ignore_eos", "top_k off", "top_p"):
        plain = {key: value for key, value in sampling.items() if key in ("temperature", "seed")}
        assert expected != text_of(own, PROMPT, **plain), "the field makes a difference"


def test_stop_token_ids_and_min_tokens(client: openai.OpenAI, own: EngineClient) -> None:
    (chunks,) = [list(own.generate(PROMPT, GenerateOptions(sampling=Sampling(**GREEDY))))]  # type: ignore[arg-type]
    third = [token for chunk in chunks for token in chunk.token_ids][2]
    cut = complete(client, extra_body={"stop_token_ids": [third]})
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens < 4) == ("stop", True)
    kept = complete(client, extra_body={"stop_token_ids": [third], "min_tokens": 8})
    assert kept.usage.completion_tokens >= 8


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    found = chat(client, max_tokens=60, response_format={"type": "json_object"}, logit_bias={"5": -100})
    assert found.choices[0].message.content.startswith("{")


def test_tokens_are_told_where_they_are_asked_for(client: openai.OpenAI, own: EngineClient) -> None:
    body = {"return_token_ids": True}
    expected = [
        token for chunk in own.generate(PROMPT, GenerateOptions(sampling=Sampling(**GREEDY))) for token in chunk.token_ids
    ]  # type: ignore[arg-type]
    found = complete(client, extra_body=body).choices[0]
    assert (found.token_ids, found.prompt_token_ids) == (expected, list(own.tokenize(PROMPT)))
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True, extra_body=body)]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert chunks[0].prompt_token_ids == found.prompt_token_ids
    told = chat(client, extra_body=body)
    assert told.prompt_token_ids == list(own.tokenize(Chat(CHAT)))
    assert own.detokenize(told.choices[0].token_ids) == told.choices[0].message.content


def test_log_probabilities_of_the_prompt_are_vllms(client: openai.OpenAI, own: EngineClient) -> None:
    options = GenerateOptions(sampling=Sampling(max_tokens=1, temperature=0, num_prompt_logprobs=1))
    (first, *_) = own.generate(PROMPT, options)
    told = complete(client, extra_body={"prompt_logprobs": 1}).choices[0].prompt_logprobs
    assert told[0] is None
    for each, expected in zip(told[1:], first.prompt_logprobs, strict=True):
        mine = each[str(expected.token_id)]
        assert (mine["logprob"], mine["rank"]) == (pytest.approx(expected.logprob, abs=1e-4), expected.rank)
    assert told[1][str(first.prompt_logprobs[0].token_id)]["decoded_token"] == " f"
    assert chat(client, extra_body={"prompt_logprobs": 1}).prompt_logprobs[0] is None


def test_priorities_are_vllms(client: openai.OpenAI, own: EngineClient) -> None:
    stream = complete(client, max_tokens=2000, stream=True, extra_body={"priority": -7, "ignore_eos": True})
    next(iter(stream))
    (running,) = own.list_requests()
    assert running.priority == 7, "lower comes first there, larger here"
    assert running.request_id.startswith("cmpl-")
    stream.close()


# -- tools and responses


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "decide"}}], ids=["required", "named"]
)
def test_a_tool_that_has_to_be_called_is_called_with_its_arguments(client: openai.OpenAI, choice: Any, is_stream: bool) -> None:
    tool: Any = {"type": "function", "function": {"name": "decide", "description": "decides", "parameters": SCHEMA}}
    found = chat(client, max_tokens=60, tools=[tool], tool_choice=choice, stream=is_stream)
    if is_stream:
        parts = [chunk.choices[0] for chunk in found]
        calls = [call for part in parts for call in part.delta.tool_calls or ()]
        assert {call.index for call in calls} == {0}
        assert [call.function.name for call in calls if call.id] == ["decide"]
        arguments, reason = "".join(call.function.arguments or "" for call in calls), parts[-1].finish_reason
    else:
        (call,) = found.choices[0].message.tool_calls
        assert call.function.name == "decide"
        arguments, reason = call.function.arguments, found.choices[0].finish_reason
    assert set(json.loads(arguments)) == {"yes"}
    assert reason == "tool_calls"


def test_a_response_is_the_chats_text(client: openai.OpenAI) -> None:
    found = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=16, temperature=0)
    assert found.output_text == chat(client).choices[0].message.content
    assert found.status == "incomplete"
    with client.responses.stream(model=MODEL, input=PROMPT, max_output_tokens=16, temperature=0) as stream:
        assert "".join(each.delta for each in stream if each.type == "response.output_text.delta") == found.output_text


# -- tokens


def test_texts_become_tokens_and_texts_again(client: openai.OpenAI, own: EngineClient) -> None:
    def post(path: str, **body: Any) -> Any:
        return client.post(path, body=body, cast_to=dict[str, Any], options={"headers": {}})

    base = served_root(client)
    found = post(f"{base}/tokenize", model=MODEL, prompt=LONG_PROMPT, return_token_strs=True)
    assert found["tokens"] == list(own.tokenize(LONG_PROMPT))
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), NUM_MOST)
    assert "".join(found["token_strs"]) == LONG_PROMPT
    assert post(f"{base}/tokenize", messages=CHAT)["tokens"] == list(own.tokenize(Chat(CHAT)))
    assert post(f"{base}/detokenize", tokens=found["tokens"])["prompt"] == LONG_PROMPT
    with pytest.raises(openai.BadRequestError, match="tokens"):
        post(f"{base}/detokenize", tokens=[-1])


def served_root(client: openai.OpenAI) -> str:
    return str(client.base_url).removesuffix("/v1/")


# -- errors


def refusal(call: Any, **fields: Any) -> Any:
    with pytest.raises(openai.BadRequestError) as error:
        call(**fields)
    return error.value


def test_a_prompt_that_does_not_fit_has_the_usual_words_and_numbers(client: openai.OpenAI, own: EngineClient) -> None:
    num = len(own.tokenize(PROMPT))
    found = refusal(complete, client=client, max_tokens=3000)
    assert found.code == "context_length_exceeded"
    assert f"maximum context length is {NUM_MOST} tokens" in found.message
    assert f"you requested {num + 3000} tokens ({num} in the prompt, 3000 in the completion)" in found.message
    long = [{"role": "user", "content": "x = 1\n" * 1500}]
    num = len(own.tokenize(Chat(long)))
    found = refusal(chat, client=client, messages=long, max_tokens=10)
    assert (found.code, found.param) == ("context_length_exceeded", "messages")
    assert f"{num + 10} tokens ({num} in the messages, 10 in the completion)" in found.message
    found = refusal(client.chat.completions.create, model=MODEL, messages=long)
    assert (found.code, f"({num} in the messages, 1 in the completion)" in found.message) == ("context_length_exceeded", True)
    found = refusal(complete, client=client, prompt="x" * 100_000)
    assert found.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokns": 3}, "max_tokns"),
        ({"temperature": 900}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"n": 65}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": [1]}, "stop"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_a_field_that_is_wrong_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    for call in (complete, chat):
        found = refusal(call, client=client, extra_body=fields)
        assert found.param.startswith(param), found.message
        assert param.partition(".")[0] in found.message


def test_what_one_of_both_refuses_is_named(client: openai.OpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    found = refusal(chat, client=client, messages=[{"role": "user", "content": [picture]}])
    assert (found.param, "image_url" in found.message) == ("messages[0].content[0]", True)
    assert refusal(chat, client=client, messages=[]).param == "messages"
    assert refusal(chat, client=client, messages=[{"role": "king", "content": "x"}]).param == "messages[0].role"
    assert refusal(chat, client=client, top_logprobs=3).param == "top_logprobs"
    assert refusal(chat, client=client, tool_choice="required").param == "tool_choice"
    assert refusal(complete, client=client, suffix="x").param == "suffix"
    assert refusal(complete, client=client, prompt=[]).param == "prompt"
    assert refusal(complete, client=client, prompt=[1 << 40]).param == "prompt"
    assert refusal(complete, client=client, logprobs=99).param == "logprobs"


def test_other_models_paths_and_bodies_are_refused(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model") as error:
        client.completions.create(model="no-such-model", prompt=PROMPT)
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input=PROMPT)
    with httpx2.Client(base_url=served_root(client)) as http:
        assert http.get("/v1/completions").status_code == 405
        for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b" " * (17 << 20), 413)):
            assert http.post("/v1/completions", content=body).status_code == status
        assert complete(client).choices, "it serves on"
        page = http.get("/metrics").text
        assert re.search(r'kvkeeper_http_requests_total\{path="/v1/completions",status="400"\} \d', page)
        assert http.get("/version").json() == {"version": "0.1.0"}
        assert http.get("/health").status_code == 200


# -- crowds and clients that go


def test_64_streams_at_once_are_each_the_engines(client: openai.OpenAI, own: EngineClient) -> None:
    prompts = [f"def f_{n}(x):" for n in range(64)]
    with ThreadPoolExecutor(64) as pool:

        def stream(prompt: str) -> str:
            return "".join(chunk.choices[0].text for chunk in complete(client, prompt, max_tokens=8, stream=True))

        found = list(pool.map(stream, prompts))
    assert found == [text_of(own, prompt, max_tokens=8) for prompt in prompts]


def connect(served: Served) -> socket.socket:
    host, port = served.ready["http"].removeprefix("http://").removesuffix("/v1").split(":")
    return socket.create_connection((host, int(port)), timeout=END_S)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_request_whether_it_streams_or_waits(
    served: Served, own: EngineClient, is_stream: bool
) -> None:
    before = own.stats().num_cancelled_requests
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": is_stream}).encode()
    with connect(served) as leaving:
        leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        while not own.list_requests():  # each look is a call, so others have their turn
            pass
        if is_stream:
            assert leaving.recv(1 << 16).startswith(b"HTTP/1.1 200")
    while own.list_requests():
        pass
    assert own.stats().num_cancelled_requests == before + 1


@pytest.mark.parametrize(
    "head",
    [b"x: " + b"a" * (1 << 20), b"".join(b"x%d: %b\r\n" % (n, b"a" * 100) for n in range(2000)) + b"\r\n"],
    ids=["one", "many"],
)
def test_a_head_that_is_too_long_closes_its_connection(served: Served, client: openai.OpenAI, head: bytes) -> None:
    with connect(served) as sending:
        with contextlib.suppress(ConnectionError):  # it is closed before all of it is sent
            sending.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + head)
            answer = sending.recv(1 << 16)
            assert answer.split()[1] in (b"431", b"400")
        with contextlib.suppress(ConnectionError):
            assert sending.recv(1 << 16) == b""
    assert complete(client).choices
