"""Reads the text of one continuation as it comes."""

from .pieces import Content, Piece


class Reader:
    """Pieces are the same wherever the text is cut."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def end(self, finish_reason: str) -> list[Piece]:
        """The text has ended: what was held back. finish_reason: the engine's, in lower case."""
        return []
