"""Pieces of what a model said, in the order in which they came."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Further text of the thought before an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Further text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. index: which call of the answer, from 0; id: as the model wrote it, or drawn."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further text of the arguments of the call that began last, as the model wrote them: JSON, if that was JSON."""

    index: int
    text: str


Piece = Reasoning | Content | CallStart | CallArguments


class Reader(Protocol):
    """Reads the text of one continuation as it comes."""

    def feed(self, text: str) -> list[Piece]:
        """What is certain with this text."""

    def end(self) -> list[Piece]:
        """The text has ended: what was held back."""
