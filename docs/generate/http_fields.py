"""docs/operate/http.md: its tables of fields, from those that the front goes by; the rest is by hand."""

import re
from pathlib import Path

from pydantic import BaseModel

from docs.generate.markdown import code_span, prose, table
from kvkeeper.http.fields import NO_EFFECT, NO_EFFECT_OF_MESSAGES, NO_EFFECT_WITHIN, REFUSED, ChatRequest, CompletionRequest

_PAGE = Path(__file__).resolve().parents[1] / "operate" / "http.md"
_TABLES: dict[str, type[BaseModel]] = {"completions": CompletionRequest, "chats": ChatRequest}


def page() -> str:
    """The page as it is, with the tables of today."""
    text = _PAGE.read_text()
    for name, kind in _TABLES.items():
        begin, end = f"<!-- Fields of {name}, by `make docs`; edits are lost. -->\n\n", "<!-- end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        found = pattern.search(text)
        assert found, f"docs/operate/http.md has no table of the fields of {name}"
        text = text.replace(found[0], f"{begin}{_rows(kind)}\n{end}")
    return text


def _rows(kind: type[BaseModel]) -> str:
    rows = {name: ["yes", "", ""] for name in kind.model_fields}
    for name, refused in REFUSED[kind].items():
        but = "" if refused.harmless is None else f", but for {code_span(_json(refused.harmless))}"
        rows[name] = ["", prose(refused.why) + but, ""]
    rows |= {name: ["", "", prose(why)] for name, why in NO_EFFECT[kind].items()}
    if kind is ChatRequest:
        rows |= {f"messages[].{name}": ["", "", prose(why)] for name, why in NO_EFFECT_OF_MESSAGES.items()}
    rows |= {name: ["", "", prose(why)] for name, why in NO_EFFECT_WITHIN.items() if re.split(r"\W", name)[0] in rows}
    header = ["field", "takes effect", "refused with 400 and its name", "has no effect here"]
    return "\n".join(table(header, [[code_span(name), *cells] for name, cells in sorted(rows.items())]))


def _json(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"') or '""'
