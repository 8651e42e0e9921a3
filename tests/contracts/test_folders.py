"""The shape of the tree: few folders at the top, few modules in each, and a charter in every one."""

import ast
import re
from pathlib import Path

import pytest

from tests.contracts.source_tree import ROOT, SERVICES, folders, modules, name_of, package_roots

TOP_FOLDERS = {"cache_service", "clients", "deploy", "docs", "engine_service", "kernels", "protos", "tests"}
MOST_MODULES = 14
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
# What a tool or a build leaves beside the sources.
_LEFT_BY_TOOLS = re.compile(r"\..*|__pycache__|build|dist|gpu-bundle|.*\.egg-info")

# Folders whose charter is still to be written. A folder that has one may not stand here.
WITHOUT_CHARTER: set[str] = {
    "cache_service",
    "cache_service/core",
    "cache_service/core/blocks",
    "cache_service/core/calls",
    "cache_service/core/eviction",
    "cache_service/core/index",
    "cache_service/core/inspection",
    "cache_service/core/sequences",
    "cache_service/core/step",
    "cache_service/core/tables",
    "cache_service/core/tiers",
    "cache_service/core/values",
    "cache_service/memory",
    "cache_service/rpc",
    "cache_service/rpc/convert",
    "cache_service/runtime",
    "clients/python/kvkeeper/cli",
    "clients/python/kvkeeper/client",
    "clients/python/kvkeeper/cuda",
    "clients/python/kvkeeper/service",
    "clients/python/kvkeeper/tracing",
    "engine_service",
    "engine_service/cache_session",
    "engine_service/compute",
    "engine_service/loop",
    "engine_service/model",
    "engine_service/model/checkpoint",
    "engine_service/model/demo_model",
    "engine_service/outputs",
    "engine_service/rpc",
    "engine_service/scheduler",
    "engine_service/scheduler/state",
    "engine_service/speculation",
    "engine_service/text_workers",
    "engine_service/values",
    "kernels",
    "kernels/gpu",
}


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
    if name_of(folder) in WITHOUT_CHARTER:
        assert missing, f"{name_of(folder)} has a charter now: take it out of WITHOUT_CHARTER"
    else:
        assert not missing, f"the docstring of {name_of(init)} lacks {', '.join(missing)}"


def test_only_folders_that_exist_lack_a_charter() -> None:
    assert {name_of(folder) for folder in folders(*package_roots())} >= WITHOUT_CHARTER


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
