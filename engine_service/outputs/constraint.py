"""Constraints: output that follows a JSON schema or a regular expression, or is one of several choices.

A thin shell on llguidance, which knows grammars and works out token masks. write_grammar and try_out belong into a worker
process: what takes too much there is refused before it comes here. compile_grammar belongs beside the loop; one compiled
constraint is copied for each continuation. What a mask may cost is bounded by the library's own limits, and what all masks of a
request may cost by its account: one that passes either ends its request alone.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt

from ..values.errors import EngineError, InvalidField, RequestFailed, TooComplex
from .tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
_MAX_REASON_CHARS = 200
_NUM_TRIED = 4  # tokens from the start: some limits show only when a token is taken

# A unit of fuel is about 1.5 us of one core: 0.3 s at the start, which a worker process finds out, and 30 ms in a step, which
# every request in it waits for. Large schemas need some 50,000 at the start and 10,000 in a step.
_INITIAL_FUEL, _STEP_FUEL = 200_000, 20_000
_MAX_STATES = 50_000
_NO_TEXT = "no text that the model's tokens can spell matches it"
_TOO_MANY_STATES = "it has too many states"
_DEAD_END = "NoExtension"  # begins the library's text for a place where no token can follow
_LIMIT_WORDS = re.compile(r"limit|fuel|too (many|big|large)", re.IGNORECASE)  # of its texts about grammars that are too much


class BadGrammar(Exception):
    """What is wrong with it. One line."""


class GrammarTooComplex(Exception):
    """The limit that it passed. One line."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens as the library wants them. Making one holds the interpreter, for a second where they are many."""

    tokens: llguidance.LLTokenizer
    size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> "Vocabulary":
        eos_ids = sorted(tokenizer.eos_ids)
        return cls(llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=eos_ids or None), vocab_size)


@dataclass(slots=True)
class Account:
    """Seconds of one core that the masks of a request have cost, and may: some at once, and some more with each token."""

    at_once_s: float = 1.0
    per_token_s: float = 0.005
    spent_s: float = 0.0
    num_tokens: int = 0

    @property
    def is_overdrawn(self) -> bool:
        return self.spent_s > self.at_once_s + self.num_tokens * self.per_token_s


class Constraint:
    """Where one continuation stands in its grammar. Moved by take_token; may be asked for its mask at any time between."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, account: Account, field: str) -> None:
        """field: of the request, that it comes from."""
        self._matcher = matcher
        self._field = field
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._vocab_size = vocab_size
        self._account = account

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab_size] the tokens that may come next; none where the grammar cannot go on, or costs too much."""
        if self._matcher.is_error() or self._account.is_overdrawn:
            return np.zeros(self._vocab_size, np.bool_)
        started_at = time.thread_time()
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        self._account.spent_s += time.thread_time() - started_at
        if self._matcher.is_error():  # a limit was passed while the mask was worked out
            return np.zeros(self._vocab_size, np.bool_)
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)

    def take_token(self, token_id: int) -> None:
        """The next token, which was allowed."""
        started_at = time.thread_time()
        self._matcher.consume_token(token_id)
        self._account.spent_s += time.thread_time() - started_at
        self._account.num_tokens += 1

    @property
    def is_complete(self) -> bool:
        """Nothing more can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_too_complex(self) -> bool:
        """A limit was passed, and that is why nothing is allowed: what was taken was allowed, so it can be nothing else."""
        return self._account.is_overdrawn or (self._matcher.is_error() and not self._matcher.get_error().startswith(_DEAD_END))

    def refusal(self) -> EngineError:
        """Of its request, when it allows nothing."""
        if self.is_too_complex:
            return TooComplex("the constraint takes too many states or too much time", field=self._field)
        if self._matcher.is_error():
            return InvalidField("the constraint cannot go on: no token spells what has to follow", field=self._field)
        return RequestFailed("the constraint allows no token")

    def copy(self) -> "Constraint":
        """The same place, for another continuation of the request; the account stays one."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size, self._account, self._field)


def write_grammar(kind: str, source: str | Sequence[str]) -> str:
    """What a request's constraint is to the library. kind: json_schema, regex or choices. Raises BadGrammar."""
    if kind == "json_schema":
        assert isinstance(source, str)
        return _json_schema(source)
    pattern = "|".join(_literal(choice) for choice in source) if kind == "choices" else source
    assert isinstance(pattern, str)
    if len(pattern.encode()) > MAX_GRAMMAR_BYTES:
        raise BadGrammar(f"at most {MAX_GRAMMAR_BYTES} bytes as a pattern")
    return str(llguidance.LLMatcher.grammar_from_regex(pattern))


def compile_grammar(vocabulary: Vocabulary, grammar: str, field: str = "") -> Constraint:
    """At its start, with its first mask worked out: copies need not do that again. Raises BadGrammar, GrammarTooComplex."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL, step_lexer_fuel=_STEP_FUEL, max_lexer_states=_MAX_STATES
    )
    matcher = llguidance.LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        raise GrammarTooComplex(reason) if _LIMIT_WORDS.search(reason) else BadGrammar(reason)
    constraint = Constraint(matcher, vocabulary.size, Account(), field)
    if constraint.allowed().any():
        return constraint
    if constraint.is_too_complex:
        raise GrammarTooComplex(_TOO_MANY_STATES)
    raise BadGrammar(_NO_TEXT)


def try_out(vocabulary: Vocabulary, grammar: str) -> None:
    """Whether it can be compiled and some first tokens stay within the limits. Raises BadGrammar, GrammarTooComplex."""
    constraint, is_only_way = compile_grammar(vocabulary, grammar), True
    for _ in range(_NUM_TRIED):
        allowed = np.flatnonzero(constraint.allowed())
        if constraint.is_too_complex:
            raise GrammarTooComplex(_TOO_MANY_STATES)
        if constraint.is_complete:
            return
        if not len(allowed):
            if is_only_way:
                raise BadGrammar(_NO_TEXT)
            return  # this way has come to its end; others may go on
        is_only_way = is_only_way and len(allowed) == 1
        constraint.take_token(int(allowed[-1]))


def _json_schema(schema: str) -> str:
    try:
        parsed = json.loads(schema)
    except ValueError:
        raise BadGrammar("not JSON") from None
    except RecursionError:
        raise GrammarTooComplex("it is nested too deep") from None
    if not isinstance(parsed, dict):
        raise BadGrammar("an object is needed")
    # Free white space lets a small model write blanks until its tokens are used up.
    parsed["x-guidance"] = {"whitespace_flexible": False}
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(parsed)))


def _reason(error: str) -> str:
    """What is wrong, in one line: of a pattern's error, whose first lines only show where."""
    lines = error.strip().splitlines()
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return reason[:_MAX_REASON_CHARS]


def _literal(text: str) -> str:
    """A pattern of exactly this text: whatever could mean something is written as its code point."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
