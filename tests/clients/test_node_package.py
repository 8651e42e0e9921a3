"""The Node client as a package: what it holds, its typings, and what it refuses; test_services.py runs it."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.clients.test_node_client import run_node
from tests.support.processes.node_package import NODE_CLIENT, run

METHODS_OF = {"CacheClient": "cache.js", "CacheSession": "session.js", "EngineClient": "engine.js"}
_METHOD = re.compile(r"^  (?:async )?\*?((?!constructor)[a-z]\w*)\(", re.MULTILINE)  # of a class, two blanks in


@pytest.mark.parametrize("name", METHODS_OF)
def test_every_public_method_has_its_typing(name: str) -> None:
    def methods(text: str) -> list[str]:
        body = re.split(r"^}", re.split(rf"^export class {name}\b", text, flags=re.MULTILINE)[1], flags=re.MULTILINE)[0]
        return sorted(_METHOD.findall(body))

    found = methods((NODE_CLIENT / "lib" / METHODS_OF[name]).read_text())
    assert len(found) > 4
    assert methods((NODE_CLIENT / "index.d.ts").read_text()) == found


async def test_a_request_that_cannot_be_is_refused_before_anything_is_sent() -> None:
    await run_node("requests.test.js")


def test_the_package_holds_the_protocol_and_the_checkout_keeps_one_copy(node_project: Path) -> None:
    package = node_project / "node_modules" / "kvkeeper"
    for name in ("cache/v1/cache_service.proto", "engine/v1/engine_service.proto"):
        assert (package / "protos" / "kvkeeper" / name).read_bytes() == (
            NODE_CLIENT / "../../protos/kvkeeper" / name
        ).read_bytes()
    assert not list(package.rglob("*.py")) and not (package / "test").exists()
    assert not (NODE_CLIENT / "protos").exists() and not (NODE_CLIENT / "messages.d.ts").exists()


def test_typings_are_those_of_the_protocol_and_refuse_what_is_refused(node_project: Path) -> None:
    shutil.copy(NODE_CLIENT / "test" / "package" / "typed.ts", node_project / "typed.ts")
    compiler = NODE_CLIENT / "node_modules" / "typescript" / "lib" / "tsc.js"
    options = {"strict": True, "noEmit": True, "module": "nodenext", "target": "es2022", "lib": ["es2022"], "types": []}
    (node_project / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "files": ["typed.ts"]}))
    run("node", compiler, cwd=node_project)


def test_a_fresh_clone_can_be_packed(tmp_path: Path) -> None:
    client, commands = tmp_path / "clients" / "node", tmp_path / "commands"
    left_out = shutil.ignore_patterns("node_modules", "*.tgz")
    shutil.copytree(NODE_CLIENT, client, ignore=left_out)
    shutil.copytree(NODE_CLIENT / "../../protos", tmp_path / "protos", ignore=shutil.ignore_patterns("__pycache__"))
    commands.mkdir()
    npm = commands / "npm"  # installs what the checkout has: no test uses a network
    npm.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\nln -s {NODE_CLIENT}/node_modules node_modules\n')
    npm.chmod(0o755)
    run("node", "scripts/pack.js", "add", cwd=client, PATH=f"{commands}:{os.environ['PATH']}")
    assert (tmp_path / "asked").read_text().startswith("ci ")
    assert "interface GenerateRequest" in (client / "messages.d.ts").read_text()
    assert (client / "protos" / "kvkeeper" / "engine" / "v1" / "engine_service.proto").exists()
