"""The README is short and says what is so; Python in it and in docs/ compiles. Its example is run by tests/api."""

import ast
import tomllib

import pytest

from kvkeeper.common.service import VERSION
from tests.support.documents.markdown import ROOT, Fence, page, pages

MOST_LINES = 130
SNIPPETS = [fence for found in pages() for fence in found.fences() if fence.language == "python"]


def test_it_is_short() -> None:
    assert len(page("README.md").text.splitlines()) <= MOST_LINES


def test_the_version_is_the_package_s() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
    assert f"Version {VERSION}" in page("README.md").text
    assert f"## [Unreleased]: {VERSION}" in page("docs/CHANGELOG.md").text


@pytest.mark.parametrize("fence", SNIPPETS, ids=lambda fence: fence.page)
def test_python_compiles(fence: Fence) -> None:
    ast.parse(fence.body)
