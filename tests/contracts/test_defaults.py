"""Which settings of the services the shared support of tests sets for tests that do not name them: all of them are told.

docs/inside/development.md has the table, with what runs at the default. Settings are found in the sources: fields of a config
in a call that makes one or starts a service, in a dict of such fields, and flags of a command line.
"""

import ast
import re
from collections.abc import Iterator

from kvkeeper.cache_service.config import SOURCE as CACHE
from kvkeeper.common.service.settings import list_settings
from kvkeeper.engine_service.config import SOURCE as ENGINE
from tests.contracts.source_tree import ROOT

_STARTS = {"EngineConfig", "start_engine", "start_gated_engine", "CacheConfig", "start_cache", "serving"}
_SETTINGS = [setting for source in (CACHE, ENGINE) for setting in list_settings(source.config)]
_NAMES = {setting.name for setting in _SETTINGS}
_FLAGS = {
    prefix + setting.flag.removeprefix("--"): setting.name
    for setting in _SETTINGS
    for prefix in ("--", "--no-", "--cache-", "--engine-")
}


def _set_in(source: str) -> Iterator[str]:
    """The names of the settings that a module sets."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords) if name in _STARTS:
                yield from (keyword.arg for keyword in keywords if keyword.arg in _NAMES)
            case ast.Dict(keys=keys):
                yield from (key.value for key in keys if isinstance(key, ast.Constant) and key.value in _NAMES)
            case ast.Constant(value=str(text)) if text.partition("=")[0] in _FLAGS:
                yield _FLAGS[text.partition("=")[0]]


def _rows() -> list[list[str]]:
    """The cells of the table's rows."""
    page = (ROOT / "docs/inside/development.md").read_text()
    section = page.partition("### Settings that tests change")[2].partition("###")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def test_every_setting_that_tests_change_unasked_is_told_with_what_runs_at_its_default() -> None:
    sources = [*(ROOT / "tests/support").rglob("*.py"), *(ROOT / "tests").rglob("conftest.py")]
    changed = {name for path in sources for name in _set_in(path.read_text())}
    told = [name for row in _rows() for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(changed)


def test_what_runs_at_the_default_is_there() -> None:
    for row in _rows():
        assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", row[2])), row
        assert row[2].strip(), row


def test_settings_are_found_in_each_form() -> None:
    forms = "start_engine(fronts=0)", "x = {'overlap': False}", "run('--no-reflection', '--engine-token-budget=3')"
    assert [list(_set_in(form)) for form in forms] == [["fronts"], ["overlap"], ["reflection", "token_budget"]]
