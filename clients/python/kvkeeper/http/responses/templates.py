"""Response templates: how a model says that it writes, for transformers, whose parser reads the text here.

A call comes once all of it is there. What cannot be read as one is content, as it was written.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing.content_parsers import parse_content
from transformers.utils.chat_parsing.response_parser import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from .pieces import CallArguments, CallStart, Content, Piece, Reasoning

_CALLS = "tool_calls"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TEXTS: Mapping[str, type[Content] | type[Reasoning]] = {"content": Content, **dict.fromkeys(_THOUGHTS, Reasoning)}


def load(text: str) -> ResponseTemplate:
    """Raises ValueError."""
    try:
        template = load_response_template(json.loads(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    for name, field in template.fields.items():
        if name not in _TEXTS and name != _CALLS:
            raise ValueError(f"field {name!r} is none of {', '.join((*_TEXTS, _CALLS))}")
        if name in _TEXTS and (field.content != "text" or field.transform is not None):
            raise ValueError(f"field {name!r} is a text, without a transform")
        try:
            parse_content("{}", field.content, field.content_args)
        except Exception as error:  # whatever the parser of the contents makes of its arguments
            raise ValueError(f"field {name!r}: content_args: {error}") from None
        field.optional = True  # a text that lacks it is no failure
    return template


def thought(template: ResponseTemplate) -> tuple[str, str] | None:
    """What is around a thought, where that is one text before it and one behind it."""
    for name, field in template.fields.items():
        opens, closes = field.open_literals or (), field.close_literals or ()
        if _TEXTS.get(name) is Reasoning and len(opens) == len(closes) == 1:
            return opens[0].strip(), closes[0].strip()
    return None


def end_markers(template: ResponseTemplate) -> tuple[str, ...]:
    """What ends an answer."""
    return tuple(template.fields["content"].close_literals or ()) if "content" in template.fields else ()


class TemplateReader:
    """Reads the text of one continuation as it comes, as Reader does."""

    def __init__(self, template: ResponseTemplate, tools: Sequence[Mapping[str, Any]], prompt: str) -> None:
        """prompt: its text, of which the template knows where the answer begins."""
        self._parser = _Parser(template, prompt, tools=[dict(tool) for tool in tools])
        self._strips = {name: field.content_args.get("strip", True) for name, field in template.fields.items()}
        self._has_tools = bool(tools)
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self._has_begun = False  # the region of text
        self._goes_on = False  # what looked like a call was content, and so are the blanks around it
        self._blanks = ""  # behind what was said
        self._read(self._parser.initial_events)

    def feed(self, text: str) -> list[Piece]:
        """What is certain with this text."""
        return self._read(self._parser.feed(text))

    def end(self) -> list[Piece]:
        """The text has ended: what was held back."""
        self._parser.has_ended = True
        return self._read(self._parser.finalize()[1])

    def _read(self, events: Sequence[Mapping[str, Any]]) -> list[Piece]:
        self._pieces = []
        for event in events:
            match event:
                case {"type": "region_close", "field": name} if name == _CALLS:
                    self._say_calls(event["value"], event["written"])
                case {"type": "region_open", "field": name} if name != _CALLS:
                    if not self._goes_on or _TEXTS[name] is Reasoning:
                        self._end_text()
                    self._goes_on = False
                case {"type": "region_chunk", "field": name, "text": text} if name != _CALLS:
                    self._say(_TEXTS[name], text, strips=self._strips[name])
                case {"type": "region_close", "field": name} if _TEXTS[name] is Reasoning:
                    self._end_text()
        return self._pieces

    def _say(self, kind: type[Content] | type[Reasoning], text: str, *, strips: bool) -> None:
        if strips:
            text = self._blanks + (text if self._has_begun else text.lstrip())
            self._blanks = text[len(text.rstrip()) :]
            text = text.rstrip()
        if text:
            self._has_begun = True
            last = self._pieces[-1] if self._pieces else None
            if isinstance(last, kind):
                self._pieces[-1] = kind(last.text + text)
            else:
                self._pieces.append(kind(text))

    def _end_text(self) -> None:
        self._has_begun, self._blanks = False, ""

    def _say_calls(self, value: Any, written: str) -> None:
        try:
            calls = [_call(each) for each in (value if isinstance(value, list) else [value])] if self._has_tools else []
        except ValueError:
            calls = []
        if not calls:
            self._say(Content, written, strips=True)
            self._goes_on = True
            return
        self._end_text()
        for call_id, name, arguments in calls:
            self._pieces.append(CallStart(self._num_calls, call_id or f"call_{uuid.uuid4().hex}", name))
            self._pieces.append(CallArguments(self._num_calls, arguments))
            self._num_calls += 1


def _call(value: Any) -> tuple[str, str, str]:
    """Id, which may be empty, name and arguments. Raises ValueError."""
    match value:
        case {"function": {"name": str(name), **rest}} | {"name": str(name), **rest}:
            call_id, arguments = value.get("id"), rest.get("arguments") or {}
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            return call_id if isinstance(call_id, str) else "", name, written
    raise ValueError("no call has this shape")


class _Parser(ResponseParser):
    """Calls close with all that was written of them, and with the value None where they cannot be read, or were cut."""

    has_ended = False
    _place = (0, 0)  # where the marker before the region begins, and where it ends

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, found: Any) -> None:
        super()._open_explicit(events, field, found)
        self._place = found.span()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        if self._current != _CALLS:
            super()._close_current(events)
            return
        written, is_cut = self._buffer[self._place[0] : self._pos], self._is_cut()
        try:
            super()._close_current(events)
        except Exception:  # whatever the template's parser and its transform make of the text
            events.append({"type": "region_close", "field": _CALLS})
            self._reset_to_implicit()
            is_cut = True
        events[-1] |= {"written": written} | ({"value": None} if is_cut else {})

    def _is_cut(self) -> bool:
        """Whether the text ended within the region. JSON that can be read is whole without the marker behind it."""
        field = self._spec.fields[_CALLS]
        if not self.has_ended or field.close_re is None or self._place[1] + len(self._body) < self._pos:
            return False
        is_whole = field.content == "json" and not field.content_args.get("allow_non_json")
        return not (is_whole or field.close_re.match(self._buffer, self._pos))
