"""Constraints: output that follows a JSON schema or a regular expression, or is one of several choices.

A thin shell on llguidance, which knows grammars and works out token masks. Compiling takes its time and belongs beside the
loop; one compiled constraint is copied for each continuation. A grammar's cost is bounded by the library's own limits: one
that passes them while it runs ends its request alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt

from engine_service.refusals import InvalidField
from engine_service.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
_MAX_REASON_CHARS = 200


class Constraint:
    """Where one continuation stands in its grammar. Moved by take; may be asked for its mask at any time between."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._vocab_size = vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab_size] the tokens that may come next; none where the grammar cannot go on."""
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, np.bool_)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():  # a limit was passed while the mask was worked out
            return np.zeros(self._vocab_size, np.bool_)
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)

    def take(self, token_id: int) -> None:
        """The next token, which was allowed."""
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Nothing more can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> "Constraint":
        return Constraint(self._matcher.deep_copy(), self._vocab_size)


@dataclass
class ConstraintCompiler:
    """For one model. tokenizer None: a model of token ids only, which takes no constraint."""

    tokenizer: Tokenizer | None
    vocab_size: int

    def json_schema(self, schema: str) -> Constraint:
        """Output is one JSON value. Raises InvalidField."""
        field = "sampling.json_schema"
        _check_size(schema, field)
        try:
            parsed = json.loads(schema)
        except ValueError:
            raise InvalidField("json_schema: not JSON", field=field) from None
        if not isinstance(parsed, dict):
            raise InvalidField("json_schema: an object", field=field)
        # Free white space lets a small model write blanks until its tokens are used up.
        parsed["x-guidance"] = {"whitespace_flexible": False}
        return self._compile(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(parsed)), field)

    def regex(self, pattern: str) -> Constraint:
        """Output matches the whole pattern, in the syntax of Rust's regex crate. Raises InvalidField."""
        _check_size(pattern, "sampling.regex")
        return self._compile(llguidance.LLMatcher.grammar_from_regex(pattern), "sampling.regex")

    def choices(self, choices: Sequence[str]) -> Constraint:
        """Output is one of them. Raises InvalidField."""
        field = "sampling.choices"
        if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
            raise InvalidField(f"choices: 1 to {MAX_CHOICES}, none empty", field=field, limit=MAX_CHOICES)
        pattern = "|".join(_literal(choice) for choice in choices)
        _check_size(pattern, field)
        return self._compile(llguidance.LLMatcher.grammar_from_regex(pattern), field)

    def _compile(self, grammar: str, field: str) -> Constraint:
        if self.tokenizer is None:
            raise InvalidField("the model has no tokenizer: its output cannot be constrained", field=field)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidField(f"{field}: {_reason(matcher.get_error())}", field=field)
        return Constraint(matcher, self.vocab_size)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        """0.07 s for 4,096 tokens, and more for more, so it is made when first needed."""
        assert self.tokenizer is not None
        eos_ids = sorted(self.tokenizer.eos_ids)
        return llguidance.LLTokenizer(self.tokenizer.to_json(), n_vocab=self.vocab_size, eos_token=eos_ids or None)


def _reason(error: str) -> str:
    """What is wrong, in one line: of a pattern's error, whose first lines only show where."""
    lines = error.strip().splitlines()
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return reason[:_MAX_REASON_CHARS]


def _check_size(text: str, field: str) -> None:
    if not 1 <= len(text.encode()) <= MAX_GRAMMAR_BYTES:
        raise InvalidField(f"{field}: 1 to {MAX_GRAMMAR_BYTES} bytes", field=field, limit=MAX_GRAMMAR_BYTES)


def _literal(text: str) -> str:
    """A pattern of exactly this text: whatever could mean something is written as its code point."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
