"""The client, the command line and the cache service need none of the engine's packages, and what needs them says so.

Here those packages are hidden from fresh interpreters; test_wheel.py installs the package without them.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.common.service.extras import install_command, missing
from kvkeeper.engine_service.preflight import _PACKAGES
from tests.support.processes.services import environment, short_folder, sockets_in

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXAMPLES = ROOT / "clients" / "python" / "examples"
ENGINE = ["jinja2", "llguidance", "safetensors", "tokenizers", "torch", "triton"]
HIDING = f"""\
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {ENGINE} else found(name, path, target)
PathFinder.find_spec = find_spec
"""


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """The environment of an interpreter that cannot import the engine's packages."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    found = environment(tmp_path)
    return {**found, "PYTHONPATH": os.pathsep.join((str(tmp_path), found["PYTHONPATH"]))}


def python(hidden: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], env=hidden, capture_output=True, text=True, timeout=60)


def test_the_extra_has_the_engine_s_packages_and_nothing_else_asks_for_them() -> None:
    assert [name_of(text) for text in PROJECT["optional-dependencies"]["engine"]] == ENGINE
    assert not {name_of(text) for text in PROJECT["dependencies"]} & set(ENGINE)
    assert set(_PACKAGES) <= set(ENGINE)
    assert missing(*_PACKAGES, "kvkeeper.no_such_module") == ["kvkeeper.no_such_module"]


def test_they_are_hidden_here(hidden: dict[str, str]) -> None:
    for name in ENGINE:
        assert f"No module named '{name}'" in python(hidden, "-c", f"import {name}").stderr


def test_the_client_and_help_do_without(hidden: dict[str, str]) -> None:
    imported = python(hidden, "-W", "error", "-c", "from kvkeeper.client import *; AsyncCacheClient, EngineClient, Arena")
    assert (imported.returncode, imported.stderr) == (0, "")
    for words, said in (("", "usage: kvkeeper "), ("cache", "--pool-memory"), ("engine", "--model"), ("up", "--model")):
        shown = python(hidden, "-m", "kvkeeper.cli", *words.split(), "--help")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert said in shown.stdout


async def test_the_cache_service_steps_without(hidden: dict[str, str]) -> None:
    with short_folder() as folder, (folder / "log").open("wb") as log:
        address, _ = sockets_in(folder)
        flags = ("--listen", address, "--runtime-dir", str(folder), "--pool-memory", "1MiB")
        service = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvkeeper.cli", "cache", *flags, env=hidden, stdout=log, stderr=log
        )
        try:
            await asyncio.wait_for(until_serving(address), 60)
            done = await asyncio.to_thread(python, hidden, str(EXAMPLES / "cache_session.py"), address)
            assert done.returncode == 0, done.stderr
            assert "the same prompt again: 4 of 6 tokens are cached" in done.stdout
        finally:
            with contextlib.suppress(ProcessLookupError):
                service.terminate()
            assert await asyncio.wait_for(service.wait(), 60) == 0, (folder / "log").read_text()


@pytest.mark.parametrize(
    ("module", "words", "name"),
    [
        ("kvkeeper.cli", ["engine"], "kvkeeper engine"),
        ("kvkeeper.engine_service", [], "kvkeeper engine"),
        ("kvkeeper.cli", ["up"], "kvkeeper"),
        ("kvkeeper.cli", ["demo"], "kvkeeper"),
    ],
)
def test_what_needs_the_engine_names_the_command_that_installs_it(
    hidden: dict[str, str], module: str, words: list[str], name: str
) -> None:
    ended = python(hidden, "-m", module, *words)
    told = f"{name}: the engine service needs {', '.join(_PACKAGES)}, which are not installed; install them with: "
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"{told}{install_command('engine')}\n")


def name_of(requirement: str) -> str:
    return requirement.partition(">")[0]
