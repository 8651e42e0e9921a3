"""Before a command runs: its version, what it imports, wrong usage in two lines, errors as JSON, completion in a shell."""

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvkeeper.cli import main
from kvkeeper.cli.commands import COMMANDS, MODULES
from kvkeeper.cli.console.version import version_text
from kvkeeper.cli.start.services import NAMES
from kvkeeper.client import KvkeeperError
from kvkeeper.common.service import VERSION
from tests.support.documents.markdown import ROOT

NO_SERVICE = "127.0.0.1:1"
CLIENT_COMMANDS = sorted(
    COMMANDS.keys() - {"up", "serve", "demo", "bench", "config", "doctor", "drain", "completion", "token", "convert"}
)


def exit_code(*argv: str) -> object:
    """However the command ends."""
    try:
        return main(argv)
    except SystemExit as ended:
        return ended.code


def failed(*argv: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return ended.value.code


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def imported_by(*argv: str) -> set[str]:
    """Names of all modules that a process of the command has imported when it ends."""
    script = (
        "import sys\nfrom kvkeeper.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('\\n', *sys.modules, file=sys.stderr, sep='\\n')"
    )
    command = [sys.executable, "-c", script, *argv]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60, stdin=subprocess.DEVNULL)
    return set(done.stderr.split())


def test_version_is_the_package_s_and_in_a_checkout_the_commit(capsys: pytest.CaptureFixture[str]) -> None:
    assert failed("--version") == 0
    said = capsys.readouterr().out
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
    if not (ROOT / ".git").exists():  # a folder of sources alone
        assert said == f"kvkeeper {VERSION}\n"
        return
    commit = git(ROOT, "rev-parse", "--short=12", "HEAD")
    assert said in (f"kvkeeper {VERSION} (checkout {commit})\n", f"kvkeeper {VERSION} (checkout {commit}, changed)\n")


def test_a_change_in_the_checkout_is_told_and_another_project_s_is_not(tmp_path: Path) -> None:
    root, other = tmp_path / "checkout", tmp_path / "other"
    for folder, package in ((root, root / "protos/kvkeeper"), (other, other / ".venv/lib")):
        package.mkdir(parents=True)
        (package / "module.py").write_text("")
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "first")
    file = root / "protos/kvkeeper/module.py"
    commit = git(root, "rev-parse", "--short=12", "HEAD")
    assert version_text(file) == f"{VERSION} (checkout {commit})"
    file.write_text("changed")
    assert version_text(file) == f"{VERSION} (checkout {commit}, changed)"
    assert version_text(other / ".venv/lib/module.py") == VERSION
    (root / ".git/HEAD").unlink()
    assert version_text(file) == f"{VERSION} (a checkout)"


def test_help_and_version_import_no_command_and_no_client() -> None:
    for argv in (["--help"], ["--version"], ["generat"]):
        modules = imported_by(*argv)
        assert "kvkeeper.cli.commands" in modules
        slow = {"grpc", "numpy", "torch", "rich", "tqdm", "asyncio", "google.protobuf"}
        assert not modules & {*slow, MODULES["status"]}


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "--help"],
        ["status", "--cache", NO_SERVICE, "--engine", NO_SERVICE],
        ["stats", "--cache", NO_SERVICE, "--engine", NO_SERVICE],
        ["sequences", "--cache", NO_SERVICE],
        ["requests", "--engine", NO_SERVICE],
        ["generate", "hello", "--engine", NO_SERVICE],
        ["explain", "hello", "--engine", NO_SERVICE],
        ["hint", "retain", "hello", "--engine", NO_SERVICE],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_a_client_command_imports_nothing_that_it_does_not_need(argv: list[str]) -> None:
    modules = imported_by(*argv)
    assert {MODULES[argv[0]], "grpc"} <= modules
    others = {MODULES[name] for name in COMMANDS.keys() - {argv[0]}}
    others -= {MODULES["status"]} if argv[0] == "stats" else set()  # it shows the line of status about a pool
    heavy = {"numpy", "torch", "rich", "tqdm", "triton", "transformers", "opentelemetry.sdk", "jinja2", "structlog", "shtab"}
    assert not modules & (heavy | others)
    assert not [name for name in modules if name.startswith(("kvkeeper.cache_service", "kvkeeper.engine_service"))]


@pytest.mark.parametrize("name", CLIENT_COMMANDS)
def test_a_wrong_flag_is_told_in_two_lines_with_what_was_meant(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--cach" if name in ("events", "sequences", "misses", "curve", "tiers", "top") else "--engin"
    needed = {
        "generate": ["hello"],
        "explain": ["hello"],
        "hint": ["retain", "hello"],
        "events": ["--zmq", "tcp://127.0.0.1:1"],
    }.get(name, [])
    assert failed(name, *needed, f"{flag}=127.0.0.1:1") == 2
    hint, reason = capsys.readouterr().err.splitlines()
    assert hint.startswith(f"usage: kvkeeper {name} ") and hint.endswith(f"; all flags: kvkeeper {name} --help")
    meant = "--cache" if flag == "--cach" else "--engine"
    assert reason == f"kvkeeper {name}: error: unrecognized arguments: {flag}=127.0.0.1:1; did you mean {meant}?"


@pytest.mark.parametrize("name", ["top", "sequences", "tiers", "misses", "curve"])
def test_a_flag_that_is_like_none_is_told_without_a_guess(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failed(name, "--engine", "127.0.0.1:1") == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --engine 127.0.0.1:1\n")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("generat", "there is no command 'generat'; did you mean generate?"),
        ("statu", "there is no command 'statu'; did you mean status?"),
        ("chache", "there is no command 'chache'; did you mean cache?"),
        ("xyzzy", "there is no command 'xyzzy'"),
    ],
)
def test_a_wrong_command_is_told_with_what_was_meant(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failed(word, "--flag", "of it") == 2
    hint, reason = capsys.readouterr().err.splitlines()
    assert (hint, reason) == ("usage: kvkeeper [COMMAND] [flags]; all flags: kvkeeper --help", f"kvkeeper: error: {said}")


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "--jsn"],
        ["generate", "x", "--n", "many"],
        ["fly"],
        ["generate", "x", "--regex", "a", "--choice", "b"],
        ["generate", "--prompt-file", "/nonexistent/prompt"],
    ],
    ids=" ".join,
)
def test_with_json_wrong_usage_is_one_object_on_stderr(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*argv, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error = json.loads(captured.err)["error"]
    assert error["reason"] == "USAGE" and error["message"]


def test_with_json_a_refusal_is_one_object_with_its_reason_and_facts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        facts = {"requested": "9", "limit": "4"}
        raise KvkeeperError(grpc.StatusCode.INVALID_ARGUMENT, "NEVER_FITS", "too many tokens", facts)

    monkeypatch.setattr("kvkeeper.cli.generation.generate.EngineClient", refuse)
    assert main(["generate", "hello", "--json"]) == 1
    assert json.loads(capsys.readouterr().err) == {
        "error": {"reason": "NEVER_FITS", "message": "too many tokens", "metadata": {"limit": "4", "requested": "9"}}
    }
    assert main(["generate", "hello"]) == 1
    assert capsys.readouterr().err == "kvkeeper: too many tokens (NEVER_FITS, limit=4, requested=9)\n"


def test_with_json_status_says_in_json_what_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--cache", NO_SERVICE, "--engine", NO_SERVICE, "--json"]) == 3
    errors = [json.loads(line)["error"] for line in capsys.readouterr().err.splitlines()]
    assert [error["reason"] for error in errors] == ["SERVICE_DOWN", "SERVICE_DOWN"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_its_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, *NAMES):
        assert word in script
    for flag in ("json-schema", "best-of", "pool-memory", "frames", "policy"):
        assert flag in script


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["kvkeeper", "gen"], ["generate"]),
        (["kvkeeper", "generate", "--json-"], ["--json-schema"]),
        (["kvkeeper", "dra"], ["drain"]),
        (["kvkeeper", "status", "--only", "en"], ["engine"]),
        (["kvkeeper", "completion", "z"], ["zsh"]),
        (["kvkeeper", "cache", "--num-h"], ["--num-host-blocks"]),
        (["kvkeeper", "engine", "--token-"], ["--token-budget"]),
    ],
    ids=lambda value: " ".join(value) if value[0] == "kvkeeper" else None,
)
def test_bash_completes_what_is_typed(words: list[str], completed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_kvkeeper; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = f"{capsys.readouterr().out}\n{ask}\n"
    done = subprocess.run(["bash", "--norc"], input=script, capture_output=True, text=True, check=True, timeout=30)
    assert (done.stdout.split(), done.stderr) == (completed, "")


def test_a_piped_prompt_is_read_without_a_dash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[object] = []

    def note(_: object, prompt: object, options: object) -> None:
        asked.append(prompt)
        raise KvkeeperError(grpc.StatusCode.INTERNAL)

    def pipe(text: bytes, is_terminal: bool = False) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(text))
        monkeypatch.setattr(stdin, "isatty", lambda: is_terminal, raising=False)
        monkeypatch.setattr("sys.stdin", stdin)

    monkeypatch.setattr("kvkeeper.cli.generation.generate.EngineClient.generate", note)
    for argv in (["generate"], ["generate", "-"], ["generate", "--n", "2"]):
        pipe("naïve".encode())
        assert main(argv) == 1
    assert asked == ["naïve"] * 3
    capsys.readouterr()
    for text, is_terminal in ((b"", False), (b"typed", True)):
        pipe(text, is_terminal)
        assert failed("generate") == 2
        assert capsys.readouterr().err.endswith("give a prompt, pipe one in, or name a file with --prompt-file PATH\n")
    assert len(asked) == 3
