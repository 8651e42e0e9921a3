"""docs/operate/models.md: the lists of its sections and the table over them, from what the tests found; the rest is by hand.

Native families are those of FAMILIES. Of all other types that transformers knows, the test of architectures keeps its results
in a file beside it. What becomes of a type is there by the heading of its section.
"""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from docs.generate.markdown import slug, table
from kvkeeper.engine_service.model.families.table import FAMILIES

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS = _ROOT / "tests/unit/engine_service/model/verdicts.json"
_PAGE = _ROOT / "docs/operate/models.md"
_BEGIN = "<!-- Written by `make docs`, as all lists of model types here; edits are lost. -->"
_END = "<!-- Written by hand again. -->"
_LINE_LEN = 128


def page() -> str:
    """The page as it is, with the results of today."""
    sections = by_section({**json.loads(_RESULTS.read_text()), **dict.fromkeys(FAMILIES, "Native families")})
    before, _, rest = _PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    rows = [[f"[{section}](#{slug(section)})", str(len(members))] for section, members in sections.items()]
    text = "\n".join([before + _BEGIN, "", *table(["what becomes of it", "model types"], rows), _END]) + after
    for section, members in sections.items():
        text = with_list(text, section, members)
    return text


def with_list(text: str, section: str, members: Sequence[str]) -> str:
    """The text with these model types in the list of a section: its first lines behind an empty one that begin as code."""
    names = textwrap.fill(", ".join(f"`{name}`" for name in members), _LINE_LEN, break_on_hyphens=False)
    until_list = rf"({re.escape(f'## {section}')}(?=\n)(?:(?!\n## |\n\n`).)*\n\n)(?:`[^\n]*\n)+"
    text, count = re.subn(until_list, rf"\1{names}\n", text, count=1, flags=re.DOTALL)
    assert count, f"docs/operate/models.md has no list of model types below {section!r}"
    return text


def by_section(results: Mapping[str, str]) -> dict[str, list[str]]:
    """Model types, sorted, by section; sections in the order of the page."""
    order = re.findall(r"^## (.*)$", _PAGE.read_text(), re.MULTILINE)
    found: dict[str, list[str]] = {section: [] for section in sorted(set(results.values()), key=order.index)}
    for model_type, section in sorted(results.items()):
        found[section].append(model_type)
    return found
