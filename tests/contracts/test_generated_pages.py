"""The generated pages of docs/ are those that the sources give, and plain text in them is never taken for markup."""

import re
from enum import Enum
from pathlib import Path

import pytest

from docs.generate import PAGES
from docs.generate.imports import circles_of, packages
from docs.generate.markdown import prose, slug, table
from docs.generate.models import with_list
from docs.generate.states import picture
from kvkeeper.cache_service.config import SOURCE as CACHE
from kvkeeper.common.hold.config import SOURCE as HOLD
from kvkeeper.common.service.settings import list_settings
from kvkeeper.engine_service.config import SOURCE as ENGINE
from tests.contracts.source_tree import ROOT


def written(name: str) -> str:
    return Path(ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    is_current = PAGES[name]() == written(name)  # not in the assert: it would print the whole page as the difference
    assert is_current, f"docs/{name} is not what the sources give: run `make docs` and commit it"


@pytest.mark.parametrize("name", PAGES)
def test_links_within_a_page_lead_to_a_heading_and_tables_are_whole(name: str) -> None:
    page = written(name)
    headings = {slug(heading) for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= headings
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_a_line_of_a_sentence_that_begins_with_code_is_no_list_of_model_types() -> None:
    told = "## Some\n\nTensors lie under a name,\n`visual` beside it.\n\n"
    assert with_list(f"{told}`old`,\n`older`\n\nMore.\n", "Some", ["new"]) == f"{told}`new`\n\nMore.\n"
    assert with_list("## Some\n\n`old`\n\n## Next\n\n`other`\n", "Some", ["new"]) == "## Some\n\n`new`\n\n## Next\n\n`other`\n"


@pytest.mark.parametrize("source", [CACHE, ENGINE, HOLD], ids=["cache", "engine", "hold"])
def test_every_flag_and_variable_is_told(source) -> None:
    page = written("operate/configuration.md")
    for one in list_settings(source.config):
        assert f"| `{one.flag}`" in page
        assert f"| `{source.variable(one)}` |" in page


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a | b", r"a \| b"),
        ("`a|b`", r"`a\|b`"),
        ("see num_blocks\n and --num-pools", "see `num_blocks` and `--num-pools`"),
        ("[a, b]: 2 * 3 <x>", r"\[a, b\]: 2 \* 3 &lt;x&gt;"),
        ("from http://a_b:1/c_d, say", "from `http://a_b:1/c_d`, say"),
        (r"a \ b _c", r"a \\ b \_c"),
        ("one-item - and 5 -- 6", "one-item - and 5 -- 6"),
    ],
)
def test_plain_text_stays_plain(text: str, markdown: str) -> None:
    assert prose(text) == markdown


def test_a_table_has_a_line_for_each_row() -> None:
    assert table(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |", ""]


def test_states_are_drawn_with_their_beginning_and_their_end() -> None:
    state = Enum("state", ["NEW", "WAITING", "RUNNING", "ENDED"])
    drawn = picture({(state.NEW, state.RUNNING): "started: at once", (state.RUNNING, state.ENDED): "released"})
    assert drawn[2:-1] == [
        "    [*] --> NEW",
        "    NEW --> RUNNING: started, at once",
        "    RUNNING --> ENDED: released",
        "    ENDED --> [*]",
    ]
    again = {(state.NEW, state.RUNNING): "started", (state.RUNNING, state.NEW): "preempted"}
    assert [line for line in picture(again, ["NEW"]) if "[*]" in line] == ["    [*] --> NEW"]
    slot = Enum("slot", ["FREE_SLOT", "RUNNING"])
    assert picture({(slot.FREE_SLOT, slot.RUNNING): "created"})[2:-1] == ["    [*] --> RUNNING: created", "    RUNNING --> [*]"]


def test_circles_of_imports_are_found() -> None:
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [{"b", "c"}, {"d"}]


def test_the_picture_of_imports_leaves_no_package_out() -> None:
    in_tree = {path.name for path in (ROOT / "clients" / "python" / "kvkeeper").iterdir()} - {"__pycache__"}
    assert set(packages()) == {f"kvkeeper.{name}" for name in in_tree}
