"""`kvkeeper chat`: what each turn asks for, what its commands change, and that it outlives a refused turn."""

import io
from typing import Any

import grpc
import pytest

from kvkeeper.cli import main
from kvkeeper.client import GenerateOptions, KvkeeperError, OutputChunk, Usage


class Engine:
    """Returns each turn with its number; what is in `failing` fails instead, once."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []
        self.options: list[GenerateOptions] = []
        self.failing: dict[int, BaseException] = {}
        self.usage = Usage(7, 4, 1, 0, 0)

    def generate(self, prompt: list[dict[str, str]], options: GenerateOptions) -> "Engine":
        self.asked.append([(turn["role"], turn["content"]) for turn in prompt])
        self.options.append(options)
        return self

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Any:
        turn = len(self.asked)
        yield OutputChunk(0, f"answer {turn}", (turn,), None)
        if turn in self.failing:
            raise self.failing.pop(turn)
        yield OutputChunk(0, "", (), "length")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr("kvkeeper.cli.generation.chat.EngineClient", lambda *_: engine)
    return engine


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *flags])


def refusal(reason: str, code: grpc.StatusCode) -> KvkeeperError:
    return KvkeeperError(code, reason, "why")


def test_each_turn_brings_what_was_said(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--system", "be brief", "--max-tokens", "5", "--temperature", "0", "--stop", "x", "--seed", "3", "--tenant", "t")
    assert chat(monkeypatch, "one\n\ntwo\n", *flags) == 0
    assert engine.asked == [
        [("system", "be brief"), ("user", "one")],
        [("system", "be brief"), ("user", "one"), ("assistant", "answer 1"), ("user", "two")],
    ]
    sampling = engine.options[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.stop, sampling.seed) == (5, 0, ("x",), 3)
    assert (engine.options[0].tenant, engine.options[0].reuse_hint) == ("t", "soon")
    said = capsys.readouterr()
    assert said.out == "answer 1\nanswer 2\n"
    assert said.err.count("cached 4") == 2, "counts after each answer"


def test_commands_change_what_is_sent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "one\n/undo\n/system short\ntwo\n/clear\nthree\n/system\nfour\n/what\n/quit\nfive\n"
    assert chat(monkeypatch, lines) == 0
    assert engine.asked == [
        [("user", "one")],
        [("system", "short"), ("user", "two")],
        [("system", "short"), ("user", "three")],
        [("user", "three"), ("assistant", "answer 3"), ("user", "four")],
    ]
    assert "/undo" in capsys.readouterr().err, "an unknown command shows those that there are"


def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.failing[1] = KeyboardInterrupt()
    assert chat(monkeypatch, "one\ntwo\n") == 0
    assert engine.asked[1] == [("user", "one"), ("assistant", "answer 1"), ("user", "two")]


def test_a_refused_turn_is_told_and_forgotten(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.failing[2] = refusal("NEVER_FITS", grpc.StatusCode.INVALID_ARGUMENT)
    assert chat(monkeypatch, "one\ntwo\nthree\n") == 0
    assert engine.asked[2] == [("user", "one"), ("assistant", "answer 1"), ("user", "three")]
    assert "NEVER_FITS" in capsys.readouterr().err


@pytest.mark.parametrize(("turn", "code"), [(1, 3), (2, 3)])
def test_an_engine_that_is_down_ends_it(engine: Engine, monkeypatch: pytest.MonkeyPatch, turn: int, code: int) -> None:
    engine.failing[turn] = refusal("", grpc.StatusCode.UNAVAILABLE)
    assert chat(monkeypatch, "one\ntwo\nthree\n") == code
    assert len(engine.asked) == turn


def test_a_first_turn_that_is_refused_ends_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a chat template refuses every turn."""
    engine.failing[1] = refusal("INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT)
    assert chat(monkeypatch, "one\ntwo\n") == 1
    assert len(engine.asked) == 1
