"""What ends a continuation: token ids, and strings in its text. Pure."""

from dataclasses import dataclass
from typing import Protocol

from ..values.request import FinishReason


class TextOutput(Protocol):
    """Turns one continuation's tokens into text, and finds stop strings in it."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Text that is complete now, and whether a stop string was met, of which nothing is in the text."""

    def flush(self) -> str:
        """What was held back."""

    def copy(self) -> "TextOutput":
        """The same, to go on differently."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """Token ids that end a continuation and are not part of it. Stop strings are TextOutput's."""

    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()

    def reason(self, token_id: int) -> FinishReason | None:
        """Why a continuation ends with this token; None: it does not."""
        if token_id in self.eos_token_ids:
            return FinishReason.END_OF_SEQUENCE
        return FinishReason.STOP if token_id in self.stop_token_ids else None

    @property
    def num_ids(self) -> int:
        return len(self.eos_token_ids | self.stop_token_ids)
