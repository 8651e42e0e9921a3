"""What ends a continuation: token ids, and strings in its text. Pure."""

from dataclasses import dataclass
from typing import Protocol

from ..values.request import FinishReason


class TextOutput(Protocol):
    """Turns one continuation's tokens into text, and finds stop strings in it."""

    @property
    def has_text(self) -> bool:
        """Whether tokens have text at all."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that is complete now, and whether a stop string was found; the text holds no part of it."""

    def flush(self) -> str:
        """The text that was held back."""

    def copy(self) -> "TextOutput":
        """A copy, for another continuation."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """Token ids that end a continuation and are not part of it. TextOutput finds stop strings."""

    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()

    def reason(self, token_id: int) -> FinishReason | None:
        """Why a continuation ends with this token; None: it goes on."""
        if token_id in self.eos_token_ids:
            return FinishReason.END_OF_SEQUENCE
        return FinishReason.STOP if token_id in self.stop_token_ids else None

    @property
    def ids(self) -> frozenset[int]:
        return self.eos_token_ids | self.stop_token_ids

    @property
    def num_ids(self) -> int:
        return len(self.ids)
