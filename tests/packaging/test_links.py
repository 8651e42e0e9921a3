"""What the README and docs/ point to exists: links, anchors, paths, `file:function`; so do the sections that the code cites."""

import re
from pathlib import Path

import pytest

from tests.support.documents.markdown import ROOT, Page, definitions, page, pages

PAGES = [*pages(), *(page(str(path.relative_to(ROOT))) for path in sorted((ROOT / "clients").glob("*/README.md")))]
IDS = [found.name for found in PAGES]
_TOP = "cache_service|engine_service|kernels|common|clients|tests|protos|docs|deploy"
_PATH = re.compile(rf"(?:{_TOP})/[\w./-]*|\.ci/run|Makefile|pyproject\.toml|constraints\.txt")
_CITED = re.compile(r"docs/(\w+/\w+)\.md,? (?:section|promise) (\d+)")


@pytest.mark.parametrize("found", PAGES, ids=IDS)
def test_links_lead_somewhere(found: Page) -> None:
    wrong: list[str] = []
    for link in found.links():
        target, _, anchor = link.partition("#")
        file = (found.folder / target).resolve() if target else ROOT / found.name
        name = str(file.relative_to(ROOT))
        if not file.exists():
            wrong.append(link)
        elif anchor and anchor not in page(name).anchors():
            wrong.append(f"{link}: {name} has no such heading")
    assert wrong == []


@pytest.mark.parametrize("found", PAGES, ids=IDS)
def test_paths_exist(found: Page) -> None:
    named = {span.rstrip("/") for span in found.spans() if _PATH.fullmatch(span)}
    assert {path for path in named if not (ROOT / path).exists()} - {"tests/gpu/results"} == set()


def test_functions_exist() -> None:
    places = [place for found in PAGES for place in re.findall(r"`([\w/]+\.py:[\w.]+)`", found.prose)]
    assert len(places) >= 20, "the life of a request has more stations than that"
    wrong = []
    for place in set(places):
        file, _, name = place.partition(":")
        if not (ROOT / file).exists() or name not in definitions(ROOT / file):
            wrong.append(place)
    assert wrong == []


def _folders(top: str) -> set[str]:
    return {str(init.parent.relative_to(ROOT)) + "/" for init in (ROOT / top).rglob("__init__.py")} - {f"{top}/"}


def test_every_folder_has_a_sentence() -> None:
    told = set(re.findall(r"^\| `([\w/]+/)` \|", page("docs/inside/architecture.md").text, re.MULTILINE))
    assert {"protos/", "tests/", "docs/"} <= told
    assert (_folders("cache_service") | _folders("engine_service") | _folders("kernels") | _folders("common")) - told == set()


def test_the_index_of_pages_is_whole() -> None:
    linked = {link.partition("#")[0] for link in page("docs/README.md").links()}
    others = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert others - linked == {"README.md"}, "a page that docs/README.md does not lead to"
    assert "docs/README.md" in page("README.md").links()


def _sources() -> list[Path]:
    folders = [ROOT / name for name in (*_TOP.split("|"),) if name != "docs"]
    found = (path for folder in folders if folder.exists() for path in (*folder.rglob("*.py"), *folder.rglob("*.proto")))
    return [path for path in found if "node_modules" not in path.parts]


def test_sections_that_the_code_cites_exist() -> None:
    texts = {path: path.read_text() for path in _sources()}
    cited = {match for text in texts.values() for match in _CITED.findall(text)}
    assert {name for name, _ in cited} == {"api/protocol", "inside/reliability"}
    for name, number in cited:
        text = page(f"docs/{name}.md").text
        pattern = rf"^## {number}\. " if name == "api/protocol" else rf"^\| {number} \|"
        assert re.search(pattern, text, re.MULTILINE), f"docs/{name}.md has no {number}"
    rules = {int(n) for path, text in texts.items() if "core" in path.parts for n in re.findall(r"\bR([1-9])\b", text)}
    assert {2, 5, 6} <= rules <= {int(n) for n in re.findall(r"^## R(\d):", page("docs/inside/rules.md").text, re.MULTILINE)}


def test_no_document_is_cited_that_is_not_there() -> None:
    names = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    gone = re.compile(r"\b(?:PROTOCOL|DESIGN|RELIABILITY|FEATURES)\b(?!\.)[' s]*(?:\d|section|[CE]\d|rule|R\d)")
    for path in _sources():
        text = path.read_text()
        assert set(re.findall(r"docs/([\w/-]+\.md)", text)) <= names, path
        if path != Path(__file__):
            assert gone.search(text) is None, path


def test_anchors_are_githubs() -> None:
    text = "# A b\n## R1: every `block`, is\n## A b\n```sh\n# no heading\n```\n## [Un]: 0.1.0\n"
    assert Page("x.md", text).anchors() == {"a-b", "r1-every-block-is", "a-b-1", "un-010"}
