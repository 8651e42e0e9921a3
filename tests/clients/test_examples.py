"""The examples of both clients, run as they are against live services."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.cache_service.server import RunningServer
from tests.support.processes.node_package import NODE_CLIENT, run
from tests.support.processes.services import Services, environment, services_up, short_folder, sockets_in

CLIENTS = NODE_CLIENT.parent
PYTHON = sorted((CLIENTS / "python" / "examples").glob("*.py"))
NODE = sorted((NODE_CLIENT / "examples").glob("*.js"))

CACHE_SESSION = """\
a pool of {num_blocks} blocks, 4 tokens each
started with 0 cached tokens and the blocks {table}
forked; blocks to copy before they are written, source and destination: {copies}
the same prompt again: 4 of 6 tokens are cached
"""
EVENTS = """\
EVENT_KIND_SNAPSHOT_END: 0 blocks, revision 1
EVENT_KIND_STORED: 2 blocks, revision 2
EVENT_KIND_REMOVED: 2 blocks, revision 3
"""


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with short_folder() as folder, services_up(folder, *sockets_in(folder)) as running:
        yield running


def python(name: str, address: str, folder: Path) -> str:
    command = [sys.executable, str(CLIENTS / "python" / "examples" / name), address]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def node(name: str, address: str, project: Path) -> str:
    """In a project that has installed the client: an example imports it by its name."""
    shutil.copy(NODE_CLIENT / "examples" / name, project)
    return run("node", name, address, cwd=project)


def test_every_example_is_run_here() -> None:
    assert [path.stem for path in PYTHON] == ["cache_session", "generate", "watch_events"]
    assert [path.stem for path in NODE] == ["cache_session", "generate"]


async def test_a_session_is_driven_by_steps_from_python(cache_server: RunningServer, folder: Path) -> None:
    said = await asyncio.to_thread(python, "cache_session.py", cache_server.address, folder)
    assert said == CACHE_SESSION.format(num_blocks=2048, table="[1, 2]", copies="[(2, 3)]")


async def test_a_session_is_driven_by_steps_from_node(cache_server: RunningServer, node_project: Path) -> None:
    said = await asyncio.to_thread(node, "cache_session.js", cache_server.address, node_project)
    assert said == CACHE_SESSION.format(num_blocks=2048, table="[1,2]", copies="[[2,3]]")


async def test_events_of_a_pool_are_watched(cache_server: RunningServer, folder: Path) -> None:
    assert await asyncio.to_thread(python, "watch_events.py", cache_server.address, folder) == EVENTS


def test_text_is_generated_from_both_languages(services: Services, tmp_path: Path, node_project: Path) -> None:
    ours, theirs = python("generate.py", services.engine, tmp_path), node("generate.js", services.engine, node_project)
    for said in (ours, theirs):
        *_, last = said.splitlines()
        assert len(said.splitlines()) >= 5, said
        assert last.endswith("prompt tokens came from the cache")
        assert not last.startswith("0 of ")
    assert ours.splitlines()[0] == theirs.splitlines()[0]  # the greedy continuation
