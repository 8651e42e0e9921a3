"""The shape of the tree: few folders at the top, few modules in each, and a charter in every one."""

import ast
import re
from pathlib import Path

import pytest

from tests.contracts.source_tree import ROOT, SERVICES, folders, modules, name_of, package_roots

TOP_FOLDERS = {"cache_service", "clients", "deploy", "docs", "engine_service", "kernels", "protos", "tests"}
MOST_MODULES = 24
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
# What a tool or a build leaves beside the sources.
_LEFT_BY_TOOLS = re.compile(r"\..*|__pycache__|build|dist|gpu-bundle|.*\.egg-info")


def missing_of(charter: str) -> list[str]:
    """What a charter lacks."""
    parts = {
        "two sentences": len(_SENTENCE_END.findall(charter)) >= 2,
        "what it owns (Owns ...)": re.search(r"\bowns?\b", charter, re.IGNORECASE) is not None,
        "what it may import (May import ...)": re.search(r"\bmay import\b", charter, re.IGNORECASE) is not None,
    }
    return [part for part, is_there in parts.items() if not is_there]


def test_the_folders_at_the_top_are_those_that_are_known() -> None:
    found = {path.name for path in ROOT.iterdir() if path.is_dir() and not _LEFT_BY_TOOLS.fullmatch(path.name)}
    assert found - TOP_FOLDERS == set()


@pytest.mark.parametrize("folder", folders(*package_roots()), ids=name_of)
def test_every_folder_has_a_charter(folder: Path) -> None:
    init = folder / "__init__.py"
    charter = (ast.get_docstring(ast.parse(init.read_text())) if init.exists() else None) or ""
    missing = missing_of(charter)
    assert not missing, f"the docstring of {name_of(init)} lacks {', '.join(missing)}"


@pytest.mark.parametrize("service", SERVICES)
def test_no_folder_of_a_service_has_too_many_modules(service: str) -> None:
    many = {name_of(folder): len(modules(folder)) for folder in folders(ROOT / service)}
    assert len(many) > 8
    assert {name: number for name, number in many.items() if number > MOST_MODULES} == {}


@pytest.mark.parametrize(
    ("charter", "missing"),
    [
        ("Owns blocks. May import values.", 0),
        ("Owns blocks, and may import values.", 1),
        ("Blocks. May import values.", 1),
        ("Owns blocks. Values.", 1),
        ("", 3),
    ],
)
def test_a_thin_charter_is_found(charter: str, missing: int) -> None:
    assert len(missing_of(charter)) == missing
