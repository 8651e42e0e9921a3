"""Calls of tools as models write them: what is their name, and what are their arguments."""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .pieces import CallArguments, CallStart, Piece
from .source import NotThis, Reading, Source, markers

_MAX_WORD = 4096
_MAX_NAME = 256  # characters of a name, with what may stand around it
_KEY = re.compile(r'\s*"(\w+)"\s*:\s*(?=\S)')
_STRING, _SCALAR = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL), re.compile(r"[^\s,}\]]+(?=[\s,}\]])")
_KEYS = ("name", "arguments", "parameters", "id", "type")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_WORD = re.compile(r"[^\s{}\[\],:]++(?=\s*([{}\[\],:]))")


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes a call.

    opens: text before a call, blanks at its ends left out; empty: the answer's own beginning.
    closes: text behind a call, which may be missing.
    header: what stands between them and has the name in a group of that name. None: the call is a JSON object with its name
        and its arguments, or there is a list of such objects.
    arguments: JSON; "loose": JSON with keys without quotes, and with strings between other texts than quotes; "parameters": a
        tag for each.
    quote: what is around strings of loose arguments.
    """

    opens: str
    closes: str = ""
    header: re.Pattern[str] | None = None
    arguments: Literal["json", "loose", "parameters"] = "json"
    quote: str = ""


@dataclass(slots=True)
class CallReader:
    """Reads calls out of a source. say: takes each piece. tools: parameters by name. id_chars: of ids that are drawn."""

    source: Source
    say: Callable[[Piece], None]
    tools: Mapping[str, Mapping[str, Any]]
    id_chars: int | None = None
    num_calls: int = field(default=0, init=False)
    _name: str = field(default="", init=False)

    def read(self, syntax: CallSyntax) -> Reading[None]:
        """The calls behind `opens`. Raises NotThis, with all text as it was, if there are none."""
        num_before = self.num_calls
        try:
            if syntax.header is None:
                yield from self._objects(syntax)
            else:
                self.source.keep()
                found = (yield from self.source.match(syntax.header, _MAX_NAME)).groupdict()
                self._start(found["name"], found.get("id"))
                arguments = {"json": self._json, "loose": self._loose, "parameters": self._parameters}[syntax.arguments]
                yield from arguments(self._arguments, syntax)
        except NotThis:
            if self.source.is_kept:
                self.source.put_back()
            if self.num_calls == num_before:
                raise
            if self.source.has_ended:
                self.source.take(len(self.source.rest))  # a call that was cut: it has no more arguments
        behind = ""
        while syntax.closes and behind != syntax.closes:  # some models write a bracket too many
            yield from self.source.skip_blanks()
            if not (behind := (yield from self.source.starts(syntax.closes, "}", "]"))):
                break
            self.source.take(len(behind))

    def _objects(self, syntax: CallSyntax) -> Reading[None]:
        self.source.keep()
        yield from self.source.skip_blanks()
        is_list = bool((yield from self.source.starts("[")))
        self.source.take(is_list)
        yield from self._object(syntax)
        while True:
            self.source.keep()
            yield from self.source.skip_blanks()
            between = yield from self.source.starts(",", ";", "]", "{")
            if between == "]" and is_list:
                self.source.take(1)
                return self.source.commit()
            if not between or between == "]":
                return self.source.commit()
            self.source.take(between != "{")
            yield from self._object(syntax)

    def _object(self, syntax: CallSyntax) -> Reading[None]:
        """One call. What was kept is committed once its name is known."""
        yield from self._take("{")
        is_named, said, call_id = False, False, None
        held: list[str] = []
        while True:
            key = (yield from self.source.match(_KEY, _MAX_NAME)).group(1)
            if key == "name" and not is_named:
                name = json.loads((yield from self.source.match(_STRING, _MAX_NAME)).group())
                if not syntax.opens and name not in self.tools:
                    raise NotThis
                self._start(name, call_id)
                is_named = True
                for text in held:
                    self._arguments(text)
            elif key in ("arguments", "parameters") and not said:
                said = True
                yield from self._json(self._arguments if is_named else held.append, syntax)
            elif is_named or key in _KEYS:
                value: list[str] = []
                yield from self._json(value.append, syntax)
                call_id = "".join(value).strip('"') if key == "id" else call_id
            else:
                raise NotThis
            if (yield from self._take(",", "}")) == "}":
                break
        if not is_named:
            raise NotThis
        if not said:
            self._arguments("{}")  # the call is whole, and has none

    def _take(self, *literals: str) -> Reading[str]:
        """The one of the literals that is next, blanks left out. Raises NotThis if none is."""
        yield from self.source.skip_blanks()
        if not (found := (yield from self.source.starts(*literals))):
            raise NotThis
        return self.source.take(len(found))

    def _start(self, name: str, call_id: str | None) -> None:
        self.source.commit()
        drawn = uuid.uuid4().hex
        self.say(CallStart(self.num_calls, call_id or (drawn[: self.id_chars] if self.id_chars else f"call_{drawn}"), name))
        self.num_calls += 1
        self._name = name

    def _arguments(self, text: str) -> None:
        if text:
            self.say(CallArguments(self.num_calls - 1, text))

    def _json(self, say: Callable[[str], None], syntax: CallSyntax) -> Reading[None]:
        """Say one JSON value as it comes. It ends where `closes` stands outside a string, too."""
        if not (yield from self.source.starts("{", "[", '"')):
            return say((yield from self.source.match(_SCALAR, _MAX_NAME)).group())
        closes = re.escape(syntax.closes)
        tokens = re.compile(rf'\\.|["{{}}\[\]]{f"|{closes}" if closes else ""}', re.DOTALL)
        depth, in_string = 0, False
        while True:
            rest, scanned = self.source.rest, 0
            for found in tokens.finditer(rest):
                token, scanned = found.group(), found.end()
                if token == '"':
                    in_string = not in_string
                elif in_string or token[0] == "\\":
                    continue
                elif len(token) > 1:
                    return say(self.source.take(found.start()))
                else:
                    depth += 1 if token in "{[" else -1
                if depth <= 0 and not in_string:
                    return say(self.source.take(found.end()))
            begun = markers(syntax.closes).begun(rest) if syntax.closes and not in_string else len(rest)
            if self.source.has_ended:
                return say(self.source.take(begun))
            say(self.source.take(max(scanned, begun - rest[scanned:].endswith("\\"))))
            yield

    def _loose(self, say: Callable[[str], None], syntax: CallSyntax) -> Reading[None]:
        """Say as JSON what has words for keys, and strings between quotes of its own."""
        depth = 0
        while True:
            if (yield from self.source.starts(syntax.quote)):
                self.source.take(len(syntax.quote))
                yield from self._quoted(say, syntax.quote)
            elif not self.source.rest:
                return
            elif (char := self.source.rest[0]) in "{}[],: \n\t":
                say(self.source.take(1))
                depth += (char in "{[") - (char in "}]")
                if depth <= 0 and char in "}]":
                    return
            elif char == '"':
                say((yield from self.source.match(_STRING, _MAX_WORD)).group())
            else:
                found = yield from self.source.match(_WORD, _MAX_WORD)  # which is known with what is behind it
                is_value = found.group(1) != ":" and _is_json(found.group())
                say(found.group() if is_value else json.dumps(found.group(), ensure_ascii=False))

    def _quoted(self, say: Callable[[str], None], quote: str) -> Reading[None]:
        say('"')
        while True:
            end = self.source.rest.find(quote)
            if end >= 0:
                say(json.dumps(self.source.take(end), ensure_ascii=False)[1:-1] + '"')
                self.source.take(len(quote))
                return
            begun = next((n for n in range(len(quote) - 1, 0, -1) if self.source.rest.endswith(quote[:n])), 0)
            say(json.dumps(self.source.take(len(self.source.rest) - begun), ensure_ascii=False)[1:-1])
            if self.source.has_ended:
                self.source.take(begun)
                return
            yield

    def _parameters(self, say: Callable[[str], None], syntax: CallSyntax) -> Reading[None]:
        """Say tags as a JSON object: a value that its schema does not call a string is JSON if it can be."""
        before = "{"
        properties = self.tools.get(self._name, {}).get("properties", {})
        while True:
            yield from self.source.skip_blanks()
            if (end := (yield from self.source.starts("</function>"))) or not self.source.rest:
                self.source.take(len(end))
                return say("" if not end else "{}" if before == "{" else "}")
            key = (yield from self.source.match(_PARAMETER, _MAX_NAME)).group(1)
            say(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            while (end_idx := self.source.rest.find("</parameter>")) < 0 and not self.source.has_ended:
                yield
            value = self.source.take(markers("</parameter>").begun(self.source.rest) if end_idx < 0 else end_idx)
            self.source.take(len("</parameter>"))
            value = value.removeprefix("\n").removesuffix("\n")
            is_text = _is_string(properties.get(key)) or (end_idx >= 0 and not _is_json(value))
            text = json.dumps(value, ensure_ascii=False) if is_text else value.strip()
            say(text[:-1] if is_text and end_idx < 0 else text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_string(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
