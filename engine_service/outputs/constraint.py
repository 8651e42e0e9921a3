"""Constraints: output that follows a JSON schema or a regular expression, or is one of several choices.

A thin shell on llguidance, which parses grammars and computes token masks. write_grammar and try_out run in a worker process,
so that a grammar that costs too much is refused before it reaches the engine. compile_grammar runs beside the loop; each
continuation gets a copy of the compiled constraint. The library's limits bound the cost of one mask, and the request's account
bounds the cost of all its masks. A constraint that exceeds either bound ends its own request alone.
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

MAX_CHOICES = 1024
_MAX_REASON_CHARS = 200
_NUM_TRIED = 4  # first tokens: a few limits show only when a token is added

# A unit of fuel is about 1.5 us of one core: 0.3 s at the start, which is tried in a worker process, and 30 ms in a step, for
# which every request of the step waits. Large schemas need about 50,000 units at the start and 10,000 in a step.
_INITIAL_FUEL, _STEP_FUEL = 200_000, 20_000
_MAX_STATES = 50_000
_NO_TEXT = "no text that the model's tokens can spell matches it"
_TOO_MANY_STATES = "it has too many states"
_DEAD_END = "NoExtension"  # begins the library's error text where no token can follow
_LIMIT_WORDS = re.compile(r"limit|fuel|too (many|big|large)", re.IGNORECASE)  # in its texts about too complex grammars


class UnknownTokenizer(Exception):
    """The library makes no constraints for tokenizers of this kind. The text says why, in one line."""


class BadGrammar(Exception):
    """The grammar is wrong. The text says how, in one line; limit is the one that it exceeds, if it does."""

    def __init__(self, text: str, limit: int | None = None) -> None:
        super().__init__(text)
        self.limit = limit


class GrammarTooComplex(Exception):
    """The grammar exceeds a limit. The text says so in one line; exceeded is "states" or "depth"."""

    def __init__(self, text: str, exceeded: str = "states") -> None:
        super().__init__(text)
        self.exceeded = exceeded


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens in the library's form. Making it holds the interpreter, for up to a second with a large vocabulary."""

    tokens: llguidance.LLTokenizer
    size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> "Vocabulary":
        """vocab_size: of the model, which can draw no other token that its tokenizer may have. Raises UnknownTokenizer."""
        source = tokenizer.to_json() if tokenizer.vocab_size <= vocab_size else _json_below(tokenizer, vocab_size)
        try:
            tokens = llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=sorted(tokenizer.eos_ids) or None)
        except ValueError as error:
            raise UnknownTokenizer(_reason(str(error))) from error
        return cls(tokens, vocab_size)


@dataclass(slots=True)
class Account:
    """What the masks of one request cost, in seconds of one core: spent so far, and allowed at first and with each token."""

    at_once_s: float = 1.0
    per_token_s: float = 0.005
    spent_s: float = 0.0
    num_tokens: int = 0

    @property
    def is_overdrawn(self) -> bool:
        return self.spent_s > self.at_once_s + self.num_tokens * self.per_token_s


class Constraint:
    """The position of one continuation in its grammar. take_token advances it; `allowed` may be called at any time between."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, account: Account, field: str) -> None:
        """field: the field of the request that holds the constraint."""
        self._matcher = matcher
        self._field = field
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._vocab_size = vocab_size
        self._account = account

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab_size] mask of the tokens that may come next; all False where the grammar cannot go on or costs too much."""
        if self._matcher.is_error() or self._account.is_overdrawn:
            return np.zeros(self._vocab_size, np.bool_)
        started_at = time.thread_time()
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        self._account.spent_s += time.thread_time() - started_at
        if self._matcher.is_error():  # computing the mask exceeded a limit
            return np.zeros(self._vocab_size, np.bool_)
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)

    def take_token(self, token_id: int) -> None:
        """Advance by the next token, which was allowed."""
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
        """Whether nothing is allowed because a limit was exceeded. Every token taken was allowed, so nothing else can fail."""
        return self._account.is_overdrawn or (self._matcher.is_error() and not self._matcher.get_error().startswith(_DEAD_END))

    def refusal(self) -> EngineError:
        """The error that ends the request when the constraint allows nothing."""
        if self.is_too_complex:
            what, exceeded = ("much time", "time") if self._account.is_overdrawn else ("many states", "states")
            return TooComplex(f"the constraint takes too {what}", field=self._field, exceeded=exceeded)
        if self._matcher.is_error():
            return InvalidField("the constraint cannot go on: no token spells what has to follow", field=self._field)
        return RequestFailed("the constraint allows no token")

    def copy(self) -> "Constraint":
        """A copy at the same position, for another continuation of the request. Both use the same account."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size, self._account, self._field)


def write_grammar(kind: str, source: str | Sequence[str], max_bytes: int) -> str:
    """A request's constraint as a grammar of the library. kind: json_schema, regex or choices. Raises BadGrammar.

    max_bytes: of choices once they are one pattern, in which a character may take more bytes.
    """
    if kind == "json_schema":
        assert isinstance(source, str)
        return _json_schema(source)
    pattern = "|".join(_literal(choice) for choice in source) if kind == "choices" else source
    assert isinstance(pattern, str)
    if len(pattern.encode()) > max_bytes:
        raise BadGrammar(f"at most {max_bytes} bytes as a pattern", max_bytes)
    return str(llguidance.LLMatcher.grammar_from_regex(pattern))


def behind_thought(grammar: str, tokenizer: Tokenizer, opens: str, closes: str) -> str:
    """The grammar behind a thought between two texts. opens: empty if the prompt has begun it. Raises BadGrammar.

    An added token is no text to the library, but is known by its id.
    """
    first, last = (tokenizer.encode(text, add_special_tokens=False) if text else [] for text in (opens, closes))
    if last[0] in tokenizer.added_ids and len(last) == 1:
        others = ",".join(map(str, sorted({*last, *tokenizer.eos_ids})))
        thought, rule = f"free <[{last[0]}]>", f"free: (<[^{others}]>)*"
    elif tokenizer.added_ids.isdisjoint(last):
        thought, rule = "free", f"free[lazy]: /(?s:.*){_literal(closes)}/"
    else:
        raise BadGrammar("what closes a thought is one added token, or has none in it")
    if opens:
        has_added = not tokenizer.added_ids.isdisjoint(first)
        thought = f"@answer | {' '.join(f'<[{i}]>' for i in first) if has_added else f'/{_literal(opens)}/'} {thought}"
    whole = json.loads(grammar)
    whole["grammars"][0]["name"] = "answer"
    whole["grammars"].insert(0, {"lark_grammar": f"start: {thought} /[ \\t\\r\\n]{{0,8}}/ @answer\n{rule}"})
    return json.dumps(whole)


def compile_grammar(vocabulary: Vocabulary, grammar: str, field: str = "") -> Constraint:
    """The constraint at its start, its first mask computed once for all copies. Raises BadGrammar, GrammarTooComplex."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL, step_lexer_fuel=_STEP_FUEL, max_lexer_states=_MAX_STATES
    )
    matcher = llguidance.LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        if _LIMIT_WORDS.search(reason):
            raise GrammarTooComplex(reason, "depth" if "recursion" in reason else "states")
        raise BadGrammar(reason)
    constraint = Constraint(matcher, vocabulary.size, Account(), field)
    if constraint.allowed().any():
        return constraint
    if constraint.is_too_complex:
        raise GrammarTooComplex(_TOO_MANY_STATES)
    raise BadGrammar(_NO_TEXT)


def try_out(vocabulary: Vocabulary, grammar: str) -> None:
    """Check that the grammar compiles and that a few first tokens stay within limits. Raises BadGrammar, GrammarTooComplex."""
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
            return  # a dead end on this path; other paths may continue
        is_only_way = is_only_way and len(allowed) == 1
        constraint.take_token(int(allowed[-1]))


def _json_below(tokenizer: Tokenizer, vocab_size: int) -> str:
    """The tokenizer without the added tokens from vocab_size on."""
    parsed = json.loads(tokenizer.to_json())
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["id"] < vocab_size]
    return json.dumps(parsed)


def _json_schema(schema: str) -> str:
    try:
        parsed = json.loads(schema)
    except ValueError:
        raise BadGrammar("not JSON") from None
    except RecursionError:
        raise GrammarTooComplex("it is nested too deep", "depth") from None
    if not isinstance(parsed, dict):
        raise BadGrammar("an object is needed")
    # With free white space, a small model may write blanks until its tokens are used up.
    parsed["x-guidance"] = {"whitespace_flexible": False}
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(parsed)))


def _reason(error: str) -> str:
    """The cause of an error, in one line. The first lines of a pattern's error only show the place."""
    lines = error.strip().splitlines()
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return reason[:_MAX_REASON_CHARS]


def _literal(text: str) -> str:
    """A pattern that matches exactly this text: every character that may have a meaning is written as its code point."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
