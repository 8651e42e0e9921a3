"""Reads the text of one continuation as it comes: its thought, its answer, and the calls in it."""

from collections.abc import Mapping, Sequence
from typing import Any

from .calls import CallReader, CallSyntax
from .pieces import CallArguments, Content, Piece, Reasoning
from .source import Markers, NotThis, Reading, Source, markers


class FormReader:
    """Pieces say the same wherever the text is cut. Text is held back only while it may belong to a marker."""

    def __init__(
        self,
        thought: tuple[str, str] | None,
        calls: Sequence[CallSyntax],
        dropped: Sequence[str],
        tools: Mapping[str, Mapping[str, Any]],
        *,
        is_thinking: bool,
        id_chars: int | None,
    ) -> None:
        """thought: what is around it. is_thinking: the prompt has begun it. dropped: markers that say nothing themselves."""
        self._source = Source()
        self._pieces: list[Piece] = []
        self._thought = thought
        self._calls = calls
        self._dropped = frozenset(dropped)
        self._call_reader = CallReader(self._source, self._pieces.append, tools, id_chars)
        later = (*dropped, *(syntax.opens for syntax in calls if syntax.opens))
        self._later = markers(*later)
        self._first = (*later, *([thought[0]] if thought else ()))
        self._has_markers = bool(self._first or calls)
        self._reading = self._read(is_thinking)
        next(self._reading, None)

    def feed(self, text: str) -> list[Piece]:
        """What is certain with this text."""
        if not self._has_markers:
            return [Content(text)] if text else []
        self._source.rest += text
        return self._go_on()

    def end(self) -> list[Piece]:
        """The text has ended: what was held back."""
        self._source.has_ended = True
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        next(self._reading, None)
        pieces = _joined(self._pieces)
        self._pieces.clear()
        return pieces

    def _read(self, is_thinking: bool) -> Reading[None]:
        if is_thinking:
            yield from self._think()
        is_start, is_beginning = not is_thinking, True
        while True:
            found = (yield from self._begin(is_start=is_start)) if is_beginning else None
            is_start = False
            if found is None:
                found = yield from self._say_until(Content, self._later)
            if found is None:
                return
            is_beginning = yield from self._behind(*found)

    def _begin(self, *, is_start: bool) -> Reading[tuple[str, str] | None]:
        """Take the marker that stands where an answer begins, with the blanks before it; it is empty before a call without one.

        Blanks before any other text are of the answer, if they are its start.
        """
        while self._has_markers and not self._source.has_ended:
            text = self._source.rest.lstrip()
            if text and not any(len(text) < len(one) and one.startswith(text) for one in self._first):
                break
            yield
        text = self._source.rest.lstrip()
        marker = max((one for one in self._first if text.startswith(one)), key=len, default="")
        num_blanks = len(self._source.rest) - len(text)
        if marker or (text[:1] in ("{", "[") and any(not syntax.opens for syntax in self._calls)):
            return self._source.take(num_blanks + len(marker)), marker
        if not is_start:
            self._source.take(num_blanks)
        return None

    def _behind(self, text: str, marker: str) -> Reading[bool]:
        """Read on behind a marker, which was found as this text. Whether it was one, and an answer begins behind it."""
        if marker in self._dropped:
            return True
        if self._thought is not None and marker == self._thought[0]:
            yield from self._think()
            return True
        for syntax in self._calls:
            if syntax.opens == marker:
                try:
                    yield from self._call_reader.read(syntax)
                except NotThis:
                    continue
                return True
        self._pieces.append(Content(text))
        return False

    def _think(self) -> Reading[None]:
        assert self._thought is not None
        opens, closes = self._thought
        yield from self._source.skip_blanks()
        self._source.take(len((yield from self._source.starts(opens))))
        yield from self._source.skip_blanks()
        yield from self._say_until(Reasoning, markers(closes))

    def _say_until(self, kind: type[Content] | type[Reasoning], ends: Markers) -> Reading[tuple[str, str] | None]:
        """Say the text before a marker, which is taken, with the blanks before it. None: the text ended."""
        while True:
            num_chars, marker = ends.find(self._source)
            if num_chars:
                self._pieces.append(kind(self._source.take(num_chars)))
            if marker:
                num_blanks = len(self._source.rest) - len(self._source.rest.lstrip())
                return self._source.take(num_blanks + len(marker)), marker
            if self._source.has_ended:
                return None
            yield


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Texts of one kind that follow each other are one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and piece.index == last.index:
            joined[-1] = CallArguments(last.index, last.text + piece.text)
        else:
            joined.append(piece)
    return joined
