"""`kvkeeper generate`: what its flags ask for, what they refuse, and what it shows of an answer."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvkeeper.cli import main
from kvkeeper.client import Chat, GenerateOptions, KvkeeperError, OutputChunk, Sampling, Thought, TokenLogprobs, Usage

SCHEMA = '{"type": "integer"}'


class Engine:
    """What `generate` is asked with, and what it answers."""

    def __init__(self, *chunks: OutputChunk) -> None:
        self.chunks = chunks
        self.asked: list[tuple[Any, GenerateOptions]] = []
        self.request_id = "r"
        self.usage = Usage(1, 0, 2, 0, 0)

    def generate(self, prompt: Any, options: GenerateOptions) -> "Engine":
        self.asked.append((prompt, options))
        return self

    def detokenize(self, token_ids: list[int], *, keep_special_tokens: bool) -> str:
        return f"<{token_ids[0]}>"

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(self.chunks)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    places = (TokenLogprobs(5, -0.25, 1, ((5, -0.25), (6, -1.5))), TokenLogprobs(7, -2.0, 2, ((5, -0.5), (7, -2.0))))
    engine = Engine(OutputChunk(0, "hi", (5,), None, places[:1]), OutputChunk(0, "!", (7,), "length", places[1:]))
    monkeypatch.setattr("kvkeeper.cli.generation.generate.EngineClient", lambda *_: engine)
    return engine


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "x", *argv])
    return capsys.readouterr().err.splitlines()[-1]


def test_what_is_not_given_is_left_to_the_model(engine: Engine) -> None:
    assert main(["generate", "x"]) == 0
    ((prompt, options),) = engine.asked
    assert (prompt, options) == ("x", GenerateOptions())
    assert options.sampling == Sampling()


def test_a_conversation_is_asked_for_with_its_system_message(engine: Engine) -> None:
    user = {"role": "user", "content": "hello"}
    for flags in (["--chat"], ["--chat", "--system", "Be brief."], ["--system", "Be brief."]):
        assert main(["generate", "hello", *flags]) == 0
    system = {"role": "system", "content": "Be brief."}
    assert [prompt for prompt, _ in engine.asked] == [Chat([user]), *2 * [Chat([system, user])]]


def test_what_a_template_is_given_makes_it_a_conversation(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"type": "function"}]')
    user, begun = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "It is"}
    for flags in (
        ["--tools", str(file)],
        ["--tools", file.read_text()],
        ["--template-arguments", '{"a": 1}'],
        ["--answer-begins", "It is"],
        ["--plain-user-text"],
    ):
        assert main(["generate", "hello", *flags]) == 0
    assert [prompt for prompt, _ in engine.asked] == [
        *2 * [Chat([user], tools=[{"type": "function"}])],
        Chat([user], template_arguments={"a": 1}),
        Chat([user, begun], continue_final_message=True),
        Chat([user], plain_user_text=True),
    ]


def test_json_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--tools", "{}").endswith("argument --tools: a JSON list is needed")
    assert refused(capsys, "--template-arguments", "[]").endswith("argument --template-arguments: a JSON object is needed")
    assert "argument --tools: not JSON" in refused(capsys, "--tools", "[{]")


def test_a_schema_is_taken_from_a_file_or_as_it_is(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(SCHEMA)
    for given in (SCHEMA, f" {SCHEMA}", str(file)):
        assert main(["generate", "x", "--json-schema", given]) == 0
    assert {(options.sampling.json_schema or "").strip() for _, options in engine.asked} == {SCHEMA}
    assert main(["generate", "x", "--json-schema", "true"]) == 0
    assert engine.asked[-1][1].sampling.json_schema == "true"


def test_a_pattern_and_choices_are_asked_for(engine: Engine) -> None:
    assert main(["generate", "x", "--regex", "[ab]+"]) == 0
    assert main(["generate", "x", "--choice", "yes", "--choice", "no"]) == 0
    asked = [options.sampling for _, options in engine.asked]
    assert asked == [Sampling(regex="[ab]+"), Sampling(choices=("yes", "no"))]


def test_rules_about_tokens_are_asked_for(engine: Engine) -> None:
    flags = (
        "--logit-bias",
        "5=-100",
        "--logit-bias",
        "0=1.5",
        "--min-tokens",
        "3",
        "--bad-word",
        "a b",
        "--bad-token-ids",
        "7,8",
        *("--keep-special-tokens", "--regex", "a+", "--thought", "<think>", "</think>"),
    )
    assert main(["generate", "x", *flags, "--bad-token-ids", "9", "--allowed-token-ids", "1,2"]) == 0
    ((_, options),) = engine.asked
    assert options.sampling == Sampling(
        logit_bias={5: -100.0, 0: 1.5},
        min_tokens=3,
        bad_words=("a b",),
        bad_words_token_ids=([7, 8], [9]),
        allowed_token_ids=(1, 2),
        keep_special_tokens=True,
        regex="a+",
        thought=Thought("<think>", "</think>"),
    )


def test_rules_about_tokens_are_refused_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (["--logit-bias", "5"], "KEY=VALUE, not '5'"),
        (["--logit-bias", "a=1"], "a whole number, not 'a'"),
        (["--bad-token-ids", "1,-2"], "a token id of 0 or more, not '-2'"),
        (["--bad-word", ""], "a text of 1 byte or more"),
    ):
        assert said in refused(capsys, *flags)


def test_constraints_are_refused_with_a_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"type":')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    missing, broken, binary = (str(tmp_path / name) for name in ("missing.json", "broken.json", "binary.json"))
    for flags, said in (
        (["--json-schema", "{"], "not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        (["--json-schema", missing], f"the file {missing!r} cannot be read: No such file or directory"),
        (["--json-schema", broken], "not JSON: Expecting value at line 1, column 9"),
        (["--json-schema", binary], f"the file {binary!r} is not UTF-8 text"),
        (["--regex", ""], "argument --regex: a text of 1 byte or more, not an empty one"),
        (["--choice", ""], "argument --choice: a text of 1 byte or more, not an empty one"),
        (["--thought", "a", "b"], "--thought goes with --json-schema, --regex or --choice"),
        (["--regex", "a", "--choice", "b"], "give one of --json-schema, --regex and --choice"),
        (["--json-schema", SCHEMA, "--regex", "a"], "give one of --json-schema, --regex and --choice"),
    ):
        assert said in refused(capsys, *flags)


def test_a_stop_text_is_refused_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--stop", "").endswith("argument --stop: a text of 1 to 256 bytes, not of 0")
    assert refused(capsys, "--stop", "é" * 129).endswith("argument --stop: a text of 1 to 256 bytes, not of 258")


def test_numbers_are_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--temperature", "hot").endswith("argument --temperature: a number, not 'hot'")


def test_log_probabilities_are_shown_and_told(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--logprobs", "2"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, engine.asked[0][1].sampling.num_logprobs) == ("hi!\n", 2)
    rows = captured.err.splitlines()
    assert rows[0].split() == ["token", "logprob", "rank", "likeliest"]
    assert rows[2].split() == ["'<5>'", "-0.250", "1", "'<5>'", "-0.250", "'<6>'", "-1.500"]
    assert rows[3].split()[:3] == ["'<7>'", "-2.000", "2"]

    assert main(["generate", "x", "--logprobs", "2", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["continuations"]
    assert told["logprobs"][1] == {"token_id": 7, "logprob": -2.0, "rank": 2, "top": [[5, -0.5], [7, -2.0]]}


def test_help_tells_what_applies_where_a_flag_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "0 takes the likeliest token each time (default: the model's, else 1)",
        "on tokens that occurred before, at any temperature; 1 is off (default: the model's, else off)",
        "most time from arrival to the last token (default: none, as long as tokens come)",
    ):
        assert text in said
    assert "0.7" not in said and "60000" not in said


def test_a_time_out_names_the_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def late(*_: Any) -> None:
        raise KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, "TIMED_OUT", "the request took longer than 5 ms")

    monkeypatch.setattr("kvkeeper.cli.generation.generate.EngineClient", late)
    assert main(["generate", "x", "--timeout-ms", "5"]) == 1
    assert "--timeout-ms gives it more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [
        ("timed_out", 1, "cut short by --timeout-ms 50; a larger one gives it more time"),
        ("stalled", 1, "cut short: the engine made no progress"),
        ("length", 0, ""),
    ],
)
def test_what_came_before_a_time_limit_is_shown_and_the_flag_named(
    engine: Engine, capsys: pytest.CaptureFixture[str], reason: str, code: int, said: str
) -> None:
    engine.chunks = (OutputChunk(0, "so far", (5,), None), OutputChunk(0, "", (), reason))
    assert main(["generate", "x", "--timeout-ms", "50"]) == code
    shown = capsys.readouterr()
    assert shown.out == "so far\n"
    assert f"finish: {reason.replace('_', ' ')}" in shown.err
    assert shown.err.splitlines()[1:] == ([f"kvkeeper: {said}"] if said else [])
    assert main(["generate", "x", "--timeout-ms", "50", "--json"]) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["continuations"][0]["finish_reason"] == reason
    if said:
        assert json.loads(shown.err)["error"] == {"reason": reason.upper(), "message": said, "metadata": {}}
