"""docs/operate/http.md: its tables of fields, from those that the front goes by; the rest is by hand."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from docs.generate.markdown import code_span, prose, table
from kvkeeper.http.fields import (
    NO_EFFECT,
    NO_EFFECT_OF_MESSAGES,
    NO_EFFECT_WITHIN,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    Refused,
)
from kvkeeper.http.message_fields import MESSAGES_NO_EFFECT, MESSAGES_NO_EFFECT_WITHIN, MESSAGES_REFUSED, MessageRequest
from kvkeeper.http.reply_fields import REPLIES_NO_EFFECT, REPLIES_NO_EFFECT_WITHIN, REPLIES_REFUSED, ReplyRequest

_PAGE = Path(__file__).resolve().parents[1] / "operate" / "http.md"
_OF_CHATS = {f"messages[].{name}": why for name, why in NO_EFFECT_OF_MESSAGES.items()}


class _Columns(NamedTuple):
    """Of one kind of request; within: fields within those that take effect."""

    kind: type[BaseModel]
    refused: Mapping[str, Refused]
    no_effect: Mapping[str, str]
    within: Mapping[str, str]


_TABLES = {
    "completions": _Columns(CompletionRequest, REFUSED[CompletionRequest], NO_EFFECT[CompletionRequest], NO_EFFECT_WITHIN),
    "chats": _Columns(ChatRequest, REFUSED[ChatRequest], NO_EFFECT[ChatRequest], NO_EFFECT_WITHIN | _OF_CHATS),
    "responses": _Columns(ReplyRequest, REPLIES_REFUSED, REPLIES_NO_EFFECT, REPLIES_NO_EFFECT_WITHIN),
    "messages": _Columns(MessageRequest, MESSAGES_REFUSED, MESSAGES_NO_EFFECT, MESSAGES_NO_EFFECT_WITHIN),
}


def page() -> str:
    """The page as it is, with the tables of today."""
    text = _PAGE.read_text()
    for name, columns in _TABLES.items():
        begin, end = f"<!-- Fields of {name}, by `make docs`; edits are lost. -->\n\n", "<!-- end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        found = pattern.search(text)
        assert found, f"docs/operate/http.md has no table of the fields of {name}"
        text = text.replace(found[0], f"{begin}{_rows(columns)}\n{end}")
    return text


def _rows(columns: _Columns) -> str:
    rows = {name: ["yes", "", ""] for name in columns.kind.model_fields}
    for name, refused in columns.refused.items():
        but = "" if refused.harmless is None else f", but for {code_span(_json(refused.harmless))}"
        rows[name] = ["", prose(refused.why) + but, ""]
    rows |= {name: ["", "", prose(why)] for name, why in columns.no_effect.items()}
    rows |= {name: ["", "", prose(why)] for name, why in columns.within.items() if re.split(r"\W", name)[0] in rows}
    header = ["field", "takes effect", "refused with 400 and its name", "has no effect here"]
    return "\n".join(table(header, [[code_span(name), *cells] for name, cells in sorted(rows.items())]))


def _json(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"') or '""'
