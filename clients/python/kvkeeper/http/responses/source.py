"""Text that comes in parts, for parsers that read it as if it were all there.

A parser is a generator, which yields where it needs more text. So what it finds does not depend on where the text is cut.
"""

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]


class NotThis(Exception):
    """The text is not what the parser reads."""


class Source:
    """`rest` is what has come and is not read; nothing follows it once has_ended is set."""

    def __init__(self) -> None:
        self.rest = ""
        self.has_ended = False
        self._taken: list[str] | None = None  # since `keep`

    def take(self, num_chars: int) -> str:
        taken, self.rest = self.rest[:num_chars], self.rest[num_chars:]
        if self._taken is not None:
            self._taken.append(taken)
        return taken

    def keep(self) -> None:
        """From here on, what is taken can be put back, until `commit`."""
        self._taken = []

    def commit(self) -> None:
        self._taken = None

    @property
    def is_kept(self) -> bool:
        return self._taken is not None

    def put_back(self) -> None:
        self.rest = "".join(self._taken or ()) + self.rest
        self._taken = None

    def skip_blanks(self) -> Reading[None]:
        """Up to a character that is none, or to the end."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or self.has_ended:
                return
            yield

    def starts(self, *literals: str) -> Reading[str]:
        """The longest of the literals that come next, which stays there; empty: none does."""
        while not self.has_ended and any(len(self.rest) < len(one) and one.startswith(self.rest) for one in literals):
            yield
        return max((one for one in literals if self.rest.startswith(one)), key=len, default="")

    def match(self, pattern: re.Pattern[str], longest: int) -> Reading[re.Match[str]]:
        """Take what the pattern matches here. More text never changes what it has matched.

        Raises NotThis: at the end, or where so many characters are no match.
        """
        while (found := pattern.match(self.rest, 0, longest)) is None:
            if self.has_ended or len(self.rest) >= longest:
                raise NotThis
            yield
        self.take(found.end())
        return found


class Markers:
    """Finds the first of some literals, each with the blanks before it, and the longest of those that begin at one place."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        longest_first = sorted(set(literals), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first))) if literals else None
        self._begun = re.compile(rf"(?:{'|'.join(map(_beginnings, longest_first))})\Z")

    def find(self, source: Source) -> tuple[int, str]:
        """How many characters are before any marker and its blanks, and the marker, if it is whole; else empty."""
        rest = source.rest
        if self._whole is None:
            return len(rest), ""
        found = self._whole.search(rest)
        before = len(rest) if source.has_ended else self.begun(rest)
        if found is None or not (source.has_ended or found.start() < before):
            return before, ""
        return len(rest[: found.start()].rstrip()), found.group()

    def begun(self, text: str) -> int:
        """Where the end of a text begins that may become a marker, or the text's length."""
        found = self._begun.search(text)
        return len(text) if found is None else len(text[: found.start()].rstrip())


@lru_cache(maxsize=64)
def markers(*literals: str) -> Markers:
    return Markers(literals)


def _beginnings(literal: str) -> str:
    """A pattern of all that the literal begins with, but for the whole of it."""
    pattern = ""
    for char in reversed(literal[:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern
