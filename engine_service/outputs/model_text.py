"""ModelText: prompts to token ids and outputs to pieces of text, for one model; or neither, without a tokenizer.

Owns what ends a continuation, too: token ids, and strings in its text. A model without tokenizer.json (and the hash toy) serves
token ids alone: text in a request is refused, text in a response stays empty.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from ..model.checkpoint.errors import TokenizerError
from ..values.errors import InvalidField
from ..values.request import FinishReason, Int32Array
from .tokenizer import Detokenizer, StopStrings, Tokenizer


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


NO_TOKENIZER = "the model has no tokenizer: it takes and gives token ids"
_NUM_CONTEXT_TOKENS = 16  # only the end of a prompt matters to its detokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """Turns one model's text into tokens, and tokens into text. Raises InvalidField, which names the field of the request."""

    tokenizer: Tokenizer | None

    def encode(self, text: str, field: str, *, whole: bool = True) -> list[int]:
        """whole: with the tokens that the model wants around a text."""
        tokenizer = self._require(field)
        try:
            return tokenizer.encode(text, add_special_tokens=whole)
        except TokenizerError as error:
            raise InvalidField(f"{field}: {error}", field=field) from None

    def without_added(self, token_ids: Int32Array) -> Int32Array:
        """Without the tokens that `encode` puts around a text, where they are there."""
        return np.array(self._require("token_ids").without_added(token_ids.tolist()), np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._require("token_ids").decode(token_ids, skip_special_tokens=False)

    def output(
        self, prompt: Sequence[int], stops: Sequence[str], min_tokens: int, keep_special_tokens: bool = False
    ) -> TextOutput:
        """For one continuation of the prompt. Stops are not searched for before the last of its first min_tokens tokens."""
        if self.tokenizer is None:
            return self.no_output(prompt, stops, min_tokens, keep_special_tokens)
        detokenizer = Detokenizer(self.tokenizer, prompt[-_NUM_CONTEXT_TOKENS:], skip_special_tokens=not keep_special_tokens)
        return _Text(detokenizer, StopStrings(stops) if stops else None, min_tokens)

    def no_output(
        self, prompt: Sequence[int], stops: Sequence[str], min_tokens: int, keep_special_tokens: bool = False
    ) -> TextOutput:
        """For one continuation of which another process makes the text."""
        if stops:
            self._require("sampling.stop")
        return _NoText()

    def _require(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidField(NO_TOKENIZER, field=field)
        return self.tokenizer


@dataclass(slots=True)
class _Text:
    detokenizer: Detokenizer
    stops: StopStrings | None
    num_left: int  # tokens until stops are searched for
    has_text: ClassVar = True

    def push(self, token_id: int) -> tuple[str, bool]:
        text = self.detokenizer.add_token(token_id)
        self.num_left -= 1
        if self.stops is None or not text or self.num_left > 0:
            return text, False
        match = self.stops.add_piece(text)
        return match.text, match.stop is not None

    def copy(self) -> "_Text":
        return _Text(self.detokenizer.copy(), copy(self.stops), self.num_left)

    def flush(self) -> str:
        text = self.detokenizer.flush()
        if self.stops is None or self.num_left > 0:
            return text
        match = self.stops.add_piece(text)  # text that was held back may complete a stop string
        return match.text if match.stop is not None else match.text + self.stops.flush()


class _NoText:
    has_text = False

    def copy(self) -> "_NoText":
        return self

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def flush(self) -> str:
        return ""
