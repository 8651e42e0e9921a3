"""Every command of the README and of docs/ can be typed: targets, subcommands, flags, modules, extras and files exist."""

import argparse
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import google
import pytest
from smg.router_args import RouterArgs

from kvkeeper.cache_service.config import SOURCE as CACHE
from kvkeeper.cli import commands as cli
from kvkeeper.common.hold.config import SOURCE as HOLD
from kvkeeper.engine_service.config import SOURCE as ENGINE
from tests.benchmarks.__main__ import NAMES as BENCHMARKS
from tests.support.documents.markdown import ROOT, Page, commands, pages

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
# Read, not imported: the rows bring torch and both services.
ROWS = {int(row) for row in re.findall(r"^    Row\((\d+),", (ROOT / "tests/soak/rows.py").read_text(), re.MULTILINE)}
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
PAGES = pages()
_OF_SERVICES = {"up": ("--cache-", "--engine-", "--http-"), "serve": ("--cache-", "--engine-", "--http-", "--gateway-")}
_PLACEHOLDERS = {"FILE", "PATH", "NAME", "PROMPT", "conversation_trace.jsonl", "hit_rate.png", "tier_hits.png"}


class Wrong(Exception):
    """What is wrong with a command."""


def _require(holds: object, text: str) -> None:
    if not holds:
        raise Wrong(text)


def _check_make(words: list[str]) -> None:
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            _require(word in TARGETS, f"no make target {word}")
            continue
        _require(f"$({name}" in MAKEFILE or f"{name} ?=" in MAKEFILE or f"or $({name})" in MAKEFILE, f"no variable {name}")
        if name == "ONLY":
            _require(set(value.split()) <= set(BENCHMARKS), f"no benchmark of {value}")
        if name == "ROWS":
            _require({int(row) for row in value.split(",")} <= ROWS, f"no row of {value}")


def _check_service(name: str, flags: list[str]) -> None:
    load = {"cache": CACHE.load, "engine": ENGINE.load, "hold": HOLD.load}[name]
    try:
        load(flags, {})
    except (Exception, SystemExit) as error:
        raise Wrong(f"kvkeeper {name}: {error}") from None


def _check_kvkeeper(words: list[str]) -> None:
    if words in (["--version"], ["--help"]):
        return None
    if words[:1] in (["cache"], ["engine"], ["hold"]):
        return _check_service(words[0], words[1:])
    parser, _ = cli.whole_parser()
    try:
        _, others = parser.parse_known_args(words)
    except SystemExit:
        raise Wrong("wrong usage") from None
    if words[0] not in _OF_SERVICES:
        return _require(not others, f"unknown flags {others}")
    for name in ("cache", "engine"):
        _check_service(name, _flags_of(name, others))
    _check_kvkeeper(["http", *_flags_of("http", others)])
    _check_gateway(_flags_of("gateway", others))
    _require(all(word.startswith(_OF_SERVICES[words[0]]) for word in others if word.startswith("-")), str(others))
    return None


def _check_gateway(flags: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    RouterArgs.add_cli_args(parser)
    try:
        parser.parse_args(flags)
    except SystemExit:
        raise Wrong(f"smg launch: {flags}") from None


def _flags_of(name: str, words: list[str]) -> list[str]:
    """Those that `up` hands to a service: `--cache-num-pools 1` is its `--num-pools 1`."""
    flags: list[str] = []
    is_own = False
    for word in words:
        if word.startswith("--"):
            is_own = word.startswith(f"--{name}-")
        if is_own:
            flags.append(word.replace(f"--{name}-", "--", 1))
    return flags


def _check_python(words: list[str]) -> None:
    _require(words[:1] == ["-m"], "only python -m")
    module = words[1]
    spec = importlib.util.find_spec(module)
    _require(spec is not None, f"no module {module}")
    if module == "pytest":
        for word in words[2:]:
            _require(word.startswith("-") or (ROOT / word).exists(), f"no {word}")


def _check_pip(words: list[str]) -> None:
    _require(words[:2] in (["install", "-e"], ["install", "-c"]), "only pip install -e, or with constraints")
    _require(words[1] == "-e" or (ROOT / words[2]).exists(), f"no {words[2]}")
    extras = set(re.findall(r"[\w-]+", words[-1].removeprefix(".")))
    _require(extras and extras <= EXTRAS, f"no extra of {words[2]}")


def _check_files(words: list[str]) -> None:
    paths = [word for word in words if "/" in word and (ROOT / word.split("/")[0]).is_dir() and "[" not in word]
    _require(paths, "no file named")
    for path in paths:
        _require((ROOT / path).exists(), f"no {path}")


def check(line: str) -> None:
    """Raises Wrong. Calls by grpcurl and buf curl are held to their table by tests/api."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"\d?>", word)]  # output that goes to a file
    if not words or re.fullmatch(r"[A-Z]+=.*", words[0]):  # a variable of the shell
        return None
    match re.sub(r"^(\.venv|\.venv-core|/opt/kvkeeper)/bin/", "", words[0]), words[1:]:
        case "make", rest:
            return _check_make(rest)
        case "kvkeeper", rest:
            return _check_kvkeeper([word for word in rest if word != "&"])
        case "smg", ["launch", *rest]:
            return _check_gateway(rest)
        case "python", rest:
            return _check_python(rest)
        case "pip", rest:
            return _check_pip(rest)
        case "buf", ["lint", folder]:
            return _require((ROOT / folder / "buf.yaml").exists(), "nothing to lint")
        case ("sed", rest) | ("install", rest):
            return _check_files([word for word in rest if not word.startswith("/")])
        case "protoc", rest:
            folders = [ROOT / "protos", *map(Path, google.__path__)]
            protos = [word for word in rest if word.endswith(".proto")]
            found = [any((folder / proto.removeprefix("google/")).exists() for folder in folders) for proto in protos]
            return _require(protos and all(found), "no such .proto file")
        case "systemctl", ["daemon-reload"]:
            return None
        case "systemctl", ["enable", "--now", *units]:
            return _check_files([f"deploy/systemd/{unit}.service" for unit in units])
        case "python3", ["-m", "venv", _]:
            return None
        case "useradd", ["--system", *_]:
            return None
        case "umask", [mask]:
            return _require(mask == "077", "a file for its owner alone")
        case "openssl", ["req", *rest]:
            return _require({"-x509", "-nodes", "-keyout", "-out", "-addext"} <= set(rest), "not a certificate and its key")
        case "git", ["checkout", *rest]:
            return _check_files(rest)
        case name, _:
            raise Wrong(f"{name}: a command that no check knows")


def _wrong(lines: list[str]) -> list[str]:
    found: list[str] = []
    for line in lines:
        try:
            check(line)
        except Wrong as error:
            found.append(f"{line}: {error}")
    return found


def _typed(page: Page) -> list[str]:
    """Lines of shell fences, and commands in backticks."""
    lines = [line for fence in page.fences() if fence.language == "sh" for line in commands(fence.body)]
    spans = [span for span in page.spans() if re.match(r"(\.venv/bin/|make )", span) or re.match(r"kvkeeper [a-z]+ ", span)]
    return [line for line in lines if "grpcurl" not in line and "buf curl" not in line] + spans


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_command_can_be_typed(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    assert _wrong(_typed(page)) == [], capsys.readouterr().err


def test_commands_are_found() -> None:
    lines = [line for page in PAGES for line in _typed(page)]
    assert len(lines) > 60
    assert {"demo", "up", "test", "lint", "bench", "soak"} <= {word for line in lines for word in line.split()}


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "make bench ONLY=nothing",
        "make soak ROWS=99",
        "make demo NOTHING=1",
        ".venv/bin/kvkeeper nothing",
        "kvkeeper generate --nothing 1",
        "kvkeeper cache --nothing 1",
        "kvkeeper up --cache-nothing 1",
        "kvkeeper up --nothing 1",
        "kvkeeper up --gateway-policy cache_aware",
        "kvkeeper serve --nothing 1",
        "kvkeeper serve --gateway-nothing 1",
        "kvkeeper serve --gateway-policy nothing",
        "kvkeeper serve --http-nothing 1",
        "kvkeeper http --nothing 1",
        "smg launch --nothing 1",
        "kvkeeper engine --policy nothing",
        ".venv/bin/python -m nothing",
        ".venv/bin/python -m pytest tests/nothing",
        ".venv/bin/pip install -e '.[nothing]'",
        "git checkout tests/nothing.py",
        "curl nothing",
    ],
)
def test_a_command_that_cannot_be_typed_is_found(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(_wrong([line])) == 1


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_only_known_languages_are_fenced(page: Page) -> None:
    assert {fence.language for fence in page.fences()} <= {"", "sh", "python", "text", "mermaid", "toml"}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_file_of_settings_is_one(page: Page, tmp_path: Path) -> None:
    for fence in page.fences():
        if fence.language == "toml":
            (tmp_path / "kvkeeper.toml").write_text(fence.body)
            for name in ("cache", "engine"):
                _check_service(name, ["--config", str(tmp_path / "kvkeeper.toml")])
