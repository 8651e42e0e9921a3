"""README says what is so: every file:function of "Follow one request" exists, every make target and flag it names too."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvkeeper.service import VERSION

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FOLLOW = README.split("## Follow one request")[1].split("\n## ")[0]


def definitions(path: Path) -> set[str]:
    """Names and Class.method names that a module defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            names.update(f"{node.name}.{part.name}" for part in inner)
    return names


def test_follow_one_request_names_code_that_exists() -> None:
    places = re.findall(r"`([\w/]+\.py):([\w.]+)`", FOLLOW)
    assert len(places) >= 10, "the path of a request has more stations than that"
    for file, name in places:
        assert name in definitions(ROOT / file), f"{file} has no {name}"


def test_the_version_is_the_package_s() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "up", "test", "lint", "bench"} <= named
    assert named <= targets


@pytest.mark.parametrize("service", ["cache", "engine"])
def test_configuration_table_is_what_help_says(service: str) -> None:
    found = {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "protos", "clients/python"))}
    command = [sys.executable, "-m", "kvkeeper.cli", service, "--help"]
    help_text = subprocess.run(command, env=os.environ | found, capture_output=True, text=True, check=True, timeout=120).stdout
    rows = re.findall(rf"^\| `{service} (--[a-z-]+)` \|", README, re.MULTILINE)
    assert rows, f"README has no flag of the {service} service"
    for flag in rows:
        assert flag in help_text, f"kvkeeper {service} has no {flag}"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), f"README links to {target}"
