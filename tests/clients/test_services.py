"""Clients and command line against both services as `kvkeeper up` runs them."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.client import AsyncEngineClient, EngineClient, GenerateOptions, KvkeeperError, Sampling
from tests.clients.test_cli import kvkeeper
from tests.support.processes.node_package import NODE_CLIENT, run
from tests.support.processes.services import Services, environment, services_up, short_folder, sockets_in

PROMPT = "def fibonacci(n):\n    " * 8
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with short_folder() as folder, services_up(folder, *sockets_in(folder)) as running:
        yield running


def test_up_says_where_everything_is_and_what_to_type_next(services: Services) -> None:
    assert services.ready["ready"] is True
    assert (services.ready["cache"], services.ready["engine"]) == (services.cache, services.engine)
    assert services.ready["model"]
    assert services.ready["pools"]
    assert services.ready["max_tokens_per_sequence"] == 2048  # all that the demo model has positions for


def test_the_next_command_works_as_it_is_printed_and_hits_the_second_time(services: Services, tmp_path: Path) -> None:
    command = str(services.ready["next"])
    assert services.engine in command
    cached = []
    for _ in range(2):
        done = subprocess.run(["bash", "-c", command], env=environment(tmp_path), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        cached.append(int(re.findall(r"cached (\d+)", done.stderr)[0]))
    assert cached == [0, 16]


async def test_a_prompt_that_is_too_large_is_refused_with_the_limit(services: Services, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("x" * 15_000_000)
    outcome = await kvkeeper("generate", "--prompt-file", str(tmp_path / "prompt"), "--engine", services.engine)
    assert (outcome.exit_code, outcome.out) == (1, "")
    (told,) = re.findall(
        r"^kvkeeper: the request has 15,000,\d+ bytes, and the service takes at most ([\d,]+) at once", outcome.err
    )
    async with AsyncEngineClient(services.engine) as client:
        with pytest.raises(KvkeeperError, match="the service takes at most") as caught:
            await client.tokenize("x" * 15_000_000)
        assert caught.value.metadata["limit"] == told.replace(",", "")
        with pytest.raises(KvkeeperError, match=r"the message has 4,194,\d+ bytes, at most 4,194,304 are taken"):
            await client.tokenize("x" * 4_194_304)


async def test_the_command_line_asks_for_all_that_the_protocol_has(services: Services) -> None:
    engine = ("--engine", services.engine, "--temperature", "0")
    assert (await kvkeeper("generate", "x", "--choice", "yes", "--choice", "no", *engine)).out in ("yes\n", "no\n")
    assert (await kvkeeper("generate", "x", "--regex", "a{3}", *engine)).out == "aaa\n"
    assert (await kvkeeper("generate", "x", "--json-schema", '{"type": "boolean"}', *engine)).out in ("true\n", "false\n")
    piped = await kvkeeper("generate", "--max-tokens", "2", "--logprobs", "1", *engine, stdin=b"def f(")
    typed = await kvkeeper("generate", "def f(", "--max-tokens", "2", *engine)
    assert (piped.exit_code, piped.out) == (0, typed.out)
    assert piped.err.splitlines()[0].split() == ["token", "logprob", "rank", "likeliest"]
    assert len(piped.err.splitlines()) == 2 + 2 + 1  # headings, tokens, what it took
    asked = await kvkeeper("generate", "hello", "--system", "Be brief.", "--max-tokens", "2", "--json", *engine)
    rendered = await kvkeeper("generate", "Be brief.\nhello\n", "--max-tokens", "2", "--json", *engine)
    assert json.loads(asked.out)["continuations"] == json.loads(rendered.out)["continuations"], "by the model's chat template"
    refused = await kvkeeper("generate", "hello", "--max-tokens", "0", "--json", *engine)
    told = json.loads(refused.err)["error"]
    assert (refused.exit_code, told["reason"]) == (1, "INVALID_FIELD")
    assert "max_tokens" in told["metadata"]["field"]


async def test_an_empty_stop_text_is_refused_with_its_unit(services: Services) -> None:
    async with AsyncEngineClient(services.engine) as client:
        with pytest.raises(KvkeeperError, match=r"sampling\.stop: 1 to 256 bytes, not 0"):
            async for _ in client.generate("x", GenerateOptions(sampling=Sampling(stop=("",)))):
                pass


async def test_both_clients_stream_the_same_text(services: Services) -> None:
    options = GenerateOptions(sampling=GREEDY)
    async with AsyncEngineClient(services.engine) as client, client.generate(PROMPT, options) as chunks:
        text = "".join([chunk.text async for chunk in chunks])
        token_ids = await client.tokenize(PROMPT)
        usage = chunks.usage
        assert chunks.request_id
    assert usage is not None
    assert (usage.prompt_tokens, usage.new_tokens) == (len(token_ids), 12)
    with EngineClient(services.engine) as client:
        with client.generate(PROMPT, options) as generation:
            again = list(generation)
        assert "".join(chunk.text for chunk in again) == text
        assert [chunk.finish_reason for chunk in again if chunk.finish_reason] == ["length"]
        assert generation.usage is not None
        assert 0 < generation.usage.cached_tokens < len(token_ids)  # what the first one computed
        with client.generate(token_ids, options) as generation:
            assert "".join(chunk.text for chunk in generation) == text
        assert client.detokenize(token_ids) == PROMPT


async def test_a_generation_that_is_left_is_cancelled(services: Services) -> None:
    endless = GenerateOptions(request_id="left", sampling=Sampling(max_tokens=200, ignore_eos=True))
    async with AsyncEngineClient(services.engine) as client:
        before = (await client.stats()).num_cancelled_requests
        async with client.generate(PROMPT, endless) as chunks:
            async for _ in chunks:
                break
        while any(request.request_id == "left" for request in await client.list_requests()):
            pass
        assert (await client.stats()).num_cancelled_requests == before + 1


def test_a_refused_request_says_which_field(services: Services) -> None:
    with EngineClient(services.engine) as client:
        with pytest.raises(KvkeeperError) as caught:
            list(client.generate("x", GenerateOptions(sampling=Sampling(top_p=2.0))))
        assert caught.value.reason == "INVALID_FIELD"
        with pytest.raises(KvkeeperError) as caught:
            client.cancel("unknown")
        assert caught.value.reason == "UNKNOWN_REQUEST"


async def test_generate_streams_text_and_tells_what_it_took(services: Services, tmp_path: Path) -> None:
    flags = ("--engine", services.engine, "--temperature", "0", "--max-tokens", "8", "--ignore-eos")
    (tmp_path / "prompt").write_text(PROMPT + "# cli")
    first = await kvkeeper("generate", "--prompt-file", str(tmp_path / "prompt"), *flags)
    assert (first.exit_code, bool(first.out.strip())) == (0, True)
    summary = first.err.splitlines()[-1]
    for part in ("prompt ", "cached ", "new 8", "finish: length", "first token after "):
        assert part in summary
    again = await kvkeeper("generate", "-", *flags, "--json", stdin=(PROMPT + "# cli").encode())
    report = json.loads(again.out)
    assert 0 < report["cached_tokens"] < report["prompt_tokens"]
    assert report["new_tokens"] == 8
    (continuation,) = report["continuations"]
    assert continuation["text"] == first.out.removesuffix("\n")
    assert (continuation["finish_reason"], len(continuation["token_ids"])) == ("length", 8)


async def test_a_prompt_is_explained_before_and_after_it_was_computed(services: Services) -> None:
    addresses = ("--cache", services.cache, "--engine", services.engine)
    prompt = "import this  # explain" * 8
    before = await kvkeeper("explain", prompt, *addresses)
    assert (before.exit_code, before.err) == (0, "")
    assert "0 of " in before.out and "never stored" in before.out
    await kvkeeper("generate", prompt, "--max-tokens", "2", "--engine", services.engine)
    (found,) = json.loads((await kvkeeper("explain", prompt, *addresses, "--json")).out)["pools"]
    assert found["num_hit_tokens"] >= 16
    assert found["end"] in ("MATCH_END_COMPLETE", "MATCH_END_PARTIAL_BLOCK")
    async with AsyncEngineClient(services.engine) as client:
        token_ids = await client.tokenize(prompt)
    by_ids = await kvkeeper("explain", "--token-ids", ",".join(map(str, token_ids)), *addresses, "--json")
    assert json.loads(by_ids.out)["pools"] == [found]
    refused = await kvkeeper("explain", "--token-ids", "1,two", *addresses)
    assert (refused.exit_code, refused.out) == (2, "") and "--token-ids: a whole number, not 'two'" in refused.err


async def test_a_hint_moves_a_cached_prompt_and_tells_how_much_it_reached(services: Services) -> None:
    addresses = ("--cache", services.cache, "--engine", services.engine)
    prompt = "import that  # hint" * 8
    missed = await kvkeeper("hint", "retain", prompt, *addresses)
    assert (missed.exit_code, missed.err) == (0, "") and "reached 0 of " in missed.out
    await kvkeeper("generate", prompt, "--max-tokens", "2", "--engine", services.engine)
    hinted = []
    for words in (["retain", "--retain-ms", "61000"], ["release"], ["demote"], ["prefetch"]):
        (told,) = json.loads((await kvkeeper("hint", *words, prompt, *addresses, "--json")).out)["pools"]
        (pool,) = json.loads((await kvkeeper("stats", *addresses, "--json")).out)["cache"]["pools"]
        hinted.append((told["num_hinted_tokens"] > 16, pool["num_soon_blocks"] > 0, pool["num_no_reuse_blocks"] > 0))
    assert hinted == [(True, True, False), (True, False, False), (True, False, True), (True, False, False)]
    outcome = await kvkeeper("hint", "demote", prompt, "--retain-ms", "1", *addresses)
    assert outcome.exit_code == 2 and "--retain-ms is for retain" in outcome.err


async def test_continuations_stand_under_their_headings(services: Services) -> None:
    outcome = await kvkeeper(*("generate", PROMPT, "--n", "3", "--seed", "1", "--max-tokens", "6", "--engine", services.engine))
    assert outcome.exit_code == 0
    headings = [line for line in outcome.out.splitlines() if line.startswith("--- continuation ")]
    assert headings == [f"--- continuation {number} of 3 ---" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    "how",
    [("--best-of", "4", "--temperature", "2", "--seed", "1"), ("--beams", "4", "--length-penalty", "0.5", "--early-stopping")],
)
async def test_the_likeliest_come_first(services: Services, how: tuple[str, ...]) -> None:
    flags = ("--n", "2", "--max-tokens", "6", "--ignore-eos", "--engine", services.engine, "--json")
    outcome = await kvkeeper("generate", PROMPT, *flags, *how)
    first, second = json.loads(outcome.out)["continuations"]
    assert first["text"] != second["text"]
    assert len(first["token_ids"]) == len(second["token_ids"]) == 6
    assert 0 > first["cumulative_logprob"] >= second["cumulative_logprob"]


async def test_a_refusal_is_one_line_and_exit_code_1(services: Services) -> None:
    outcome = await kvkeeper("generate", "x", "--top-p", "2", "--engine", services.engine)
    assert (outcome.exit_code, outcome.out) == (1, "")
    assert len(outcome.err.splitlines()) == 1
    assert "INVALID_FIELD" in outcome.err


async def test_status_stats_and_sequences_of_two_live_services(services: Services) -> None:
    addresses = ("--cache", services.cache, "--engine", services.engine)
    status = await kvkeeper("status", *addresses, "--json")
    assert status.exit_code == 0
    report = json.loads(status.out)
    assert (report["cache"]["state"], report["engine"]["state"]) == ("up", "up")
    stats = await kvkeeper("stats", *addresses)
    assert stats.exit_code == 0
    assert "tokens sampled" in stats.out
    assert json.loads((await kvkeeper("stats", *addresses, "--json")).out)["engine"]["num_steps"] > 0
    assert (await kvkeeper("sequences", "--cache", services.cache)).exit_code == 0


def test_the_node_client_generates_where_it_was_installed(services: Services, node_project: Path) -> None:
    source = (NODE_CLIENT / "test" / "engine.test.js").read_text()
    (node_project / "engine.test.js").write_text(source.replace("'../index.js'", "'kvkeeper'"))
    out = run("node", "--test", "engine.test.js", cwd=node_project, KVKEEPER_ENGINE_LISTEN=services.engine)
    assert "# skipped 0" in out


def test_the_node_client_s_readme_has_an_example_that_runs(services: Services, node_project: Path) -> None:
    (example,) = re.findall(r"```js\n(.*?)```", (NODE_CLIENT / "README.md").read_text(), re.DOTALL)
    (node_project / "example.js").write_text(example)
    out = run("node", "example.js", cwd=node_project, KVKEEPER_ENGINE_LISTEN=services.engine)
    assert "\n16 tokens, " in out
    assert re.search(r"^completed (yes|no)$", out, re.MULTILINE)
    assert "UNKNOWN_REQUEST {}" in out
