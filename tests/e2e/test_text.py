"""Text in, text out, with the embedded demo model through both services."""

import asyncio
import copy
import dataclasses
import json
from pathlib import Path

import pytest

from kvkeeper.client import AsyncEngineClient, Chat, GenerateOptions, Sampling
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.digest import weights_digest
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.outputs.model_text import ModelText
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from tests.support.processes.service_pair import Output, Services, generate
from tests.support.worlds.cache_api import failure

FREE = Sampling(temperature=0, repetition_penalty=1.0, ignore_eos=True)
PROMPT = "import os\nimport sys\n\n\ndef main():\n    "


@pytest.fixture
async def client(world: Services, demo_model: ServedModel) -> AsyncEngineClient:
    await world.start_cache()
    return await world.client(await world.start_engine(demo_model, block_size=16))


async def test_text_is_that_of_the_tokens(client: AsyncEngineClient) -> None:
    output = await generate(client, PROMPT, 40, FREE)
    assert output.reasons == ["length"]
    assert len(output.token_ids[0]) == 40
    prompt = await client.tokenize(PROMPT)
    assert output.usage.prompt_tokens == len(prompt)
    eos = (await client.model()).eos_token_ids
    whole = await client.detokenize([*prompt, *(token for token in output.token_ids[0] if token not in eos)])
    assert whole.endswith(PROMPT + output.texts[0])
    again = await generate(client, list(prompt), 40, FREE)
    assert again.texts == output.texts, "cached tokens change nothing"
    assert again.usage.cached_tokens == (len(prompt) - 1) // 16 * 16


async def test_continuations_differ_by_their_random_streams_and_repeat_by_their_seed(client: AsyncEngineClient) -> None:
    options = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=7, ignore_eos=True)
    output = await generate(client, PROMPT, 12, options, n=4)
    assert len(set(output.texts)) == 4
    assert len({tokens[0] for tokens in output.token_ids}) > 1, "first tokens come from one row of logits"
    alone = await generate(client, PROMPT, 12, options)
    assert alone.token_ids[0] == output.token_ids[0]
    other = await generate(client, PROMPT, 12, dataclasses.replace(options, seed=8))
    assert other.token_ids != alone.token_ids


async def test_a_stop_string_ends_the_text_before_it(client: AsyncEngineClient) -> None:
    free = await generate(client, PROMPT, 40, FREE)
    stop = free.texts[0][10:13]
    before = free.texts[0][: free.texts[0].index(stop)]
    output = await generate(client, PROMPT, 40, dataclasses.replace(FREE, stop=(stop,)))
    assert (output.texts, output.reasons) == ([before], ["stop"])
    assert output.token_ids[0] == free.token_ids[0][: len(output.token_ids[0])]
    assert output.usage.new_tokens == len(output.token_ids[0]) < 40


async def test_special_tokens_are_part_of_the_text_on_request(client: AsyncEngineClient) -> None:
    eos = (await client.model()).eos_token_ids[0]
    special = dataclasses.replace(FREE, allowed_token_ids=(eos,))
    name = await client.detokenize([eos])
    assert name
    assert (await generate(client, PROMPT, 3, special)).texts == [""]
    assert (await generate(client, PROMPT, 3, dataclasses.replace(special, keep_special_tokens=True))).texts == [3 * name]


async def test_a_stop_token_is_not_part_of_the_output(client: AsyncEngineClient) -> None:
    free = await generate(client, PROMPT, 40, FREE)
    stop = free.token_ids[0][9]
    expected = free.token_ids[0][: free.token_ids[0].index(stop)]
    output = await generate(client, PROMPT, 40, dataclasses.replace(FREE, stop_token_ids=(stop,)))
    assert (output.token_ids[0], output.reasons) == (expected, ["stop"])


async def test_the_end_of_sequence_is_not_part_of_the_output(world: Services, demo_model: ServedModel) -> None:
    client = await world.serve(demo_model, block_size=16)
    free = await generate(client, PROMPT, 40, FREE)
    tokenizer = copy.copy(demo_model.text.tokenizer)
    assert tokenizer is not None
    tokenizer.eos_ids = frozenset({free.token_ids[0][9]})
    expected = free.token_ids[0][: free.token_ids[0].index(free.token_ids[0][9])]
    changed = dataclasses.replace(demo_model, text=ModelText(tokenizer))
    client = await world.client(await world.start_engine(changed, block_size=16))
    output = await generate(client, PROMPT, 40, dataclasses.replace(FREE, ignore_eos=False))
    assert (output.token_ids[0], output.reasons) == (expected, ["end_of_sequence"])
    assert (await generate(client, PROMPT, 40, FREE)).token_ids == free.token_ids


async def test_every_chunk_is_text_by_itself(client: AsyncEngineClient) -> None:
    prompt = "# naïve café — 日本語 🙂\n"
    options = GenerateOptions(sampling=Sampling(max_tokens=60, temperature=3.0, top_k=0, top_p=1.0, seed=1))
    tokens, chunks = [], []
    async for chunk in client.generate(prompt, options):
        chunk.text.encode()
        chunks.append(chunk.text)
        tokens += chunk.token_ids
    ids = list(await client.tokenize(prompt))
    assert (await client.detokenize(ids + tokens)).endswith("".join(chunks))


async def test_requests_of_many_lengths_at_once(client: AsyncEngineClient) -> None:
    prompts = [PROMPT * (1 + place % 4) + "x" * place for place in range(12)]

    async def one(prompt: str) -> Output:
        return await generate(client, prompt, 16, FREE)

    together = await asyncio.gather(*map(one, prompts))
    assert [output.reasons for output in together] == [["length"]] * 12
    stats = await client.stats()
    assert stats.num_completed_requests == 12
    assert 0 < stats.time_to_first_token_p50_ms <= stats.time_to_first_token_p99_ms


async def test_the_model_is_described(client: AsyncEngineClient) -> None:
    model = await client.model()
    assert model.model_id == "demo_model"
    assert model.architecture == "LlamaForCausalLM"
    assert 0 < model.num_parameters <= 4_000_000
    assert model.revision == weights_digest(DEMO_MODEL_DIR)
    assert (model.block_size, model.num_blocks, model.compute_dtype) == (16, 64, "float32")


async def test_a_conversation_is_its_template_filled_in(client: AsyncEngineClient) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    asked = await generate(client, messages, 6)
    assert asked.token_ids == (await generate(client, f"Be brief.\n{PROMPT}\n", 6)).token_ids


async def test_a_conversation_goes_on_where_its_last_message_ends(client: AsyncEngineClient) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": PROMPT.rstrip()}]
    asked = await generate(client, Chat(messages, continue_final_message=True), 6)
    assert asked.token_ids == (await generate(client, f"Be brief.\n{PROMPT.rstrip()}", 6)).token_ids
    error = await failure(generate(client, Chat(messages, continue_final_message=True, add_generation_prompt=True)))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "chat.add_generation_prompt")


async def test_a_template_gets_tools_calls_and_variables(world: Services, demo_model: ServedModel) -> None:
    tokenizer = demo_model.text.tokenizer
    assert tokenizer is not None
    template = (
        "{% for t in tools or [] %}{{ t.name }};{% endfor %}{{ kind }}{% for m in messages %}[{{ m.role }} {{ m.name }}]"
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.id }}={{ c.function.name }}({{ c.function.arguments.x[0] }})"
        "{% endfor %}"
        "{{ m.tool_call_id }}{% endfor %}{{ '>' if add_generation_prompt }}"
    )
    state = tokenizer.state()
    changed = Tokenizer.from_state({**state, "settings": {**state["settings"], "chat_template": template}})
    client = await world.serve(dataclasses.replace(demo_model, text=ModelText(changed)), block_size=16)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [7]}'}}
    messages = [
        {"role": "user", "content": "a<|endoftext|>", "name": "ada"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "8", "tool_call_id": "c1"},
    ]
    text = "g;h;kind![user ada]a<|endoftext|>[assistant ]c1=f(7)[tool ]8c1"
    tools = [{"name": "g"}, {"name": "h"}]
    found = await generate(client, Chat(messages, tools, {"kind": "kind!"}), 6)
    assert found.token_ids == (await generate(client, f"{text}>", 6)).token_ids
    bare = await generate(client, Chat(messages, tools, {"kind": "kind!"}, add_generation_prompt=False), 6)
    assert bare.token_ids == (await generate(client, text, 6)).token_ids
    plain = await generate(client, Chat(messages, tools, {"kind": "kind!"}, plain_user_text=True), 6)
    assert plain.usage.prompt_tokens > found.usage.prompt_tokens, "the letters of a control token, in its place"
    for field, chat in {
        "chat.tools": Chat(messages, [7]),  # type: ignore[list-item]
        "chat.template_arguments": Chat(messages, template_arguments={"tools": 1}),
        "chat.messages[0].role": Chat([{"role": "robot", "content": ""}]),
    }.items():
        error = await failure(generate(client, chat, 6))
        assert (error.reason, error.metadata) == ("INVALID_FIELD", {"field": field})


async def test_a_conversation_needs_a_template(world: Services, tmp_path: Path) -> None:
    for file in DEMO_MODEL_DIR.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").symlink_to(DEMO_MODEL_DIR / "model.safetensors")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    await world.start_cache()
    without = load_served_model(EngineConfig(model=str(tmp_path), progress=False))
    client = await world.client(await world.start_engine(without, block_size=16))
    refused = await failure(generate(client, [{"role": "user", "content": "hello"}]))
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_FIELD", "chat")
