"""From the sampling fields that are about single tokens to TokenRules, each in its bounds. Raises EngineError."""

from collections.abc import Iterator

import numpy as np

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..messages import token_array
from ..outputs.model_text import ModelText
from ..values.errors import InvalidField
from ..values.token_rules import TokenRules

_MAX_BIASES, _MOST_BIAS = 1024, 100
_MAX_WORDS, _MAX_WORD_BYTES, _MAX_WORD_TOKENS = 64, 2048, 64


def parse_rules(sampling: pb.SamplingParams, ending_ids: frozenset[int], text: ModelText, vocab_size: int) -> TokenRules | None:
    """ending_ids: the tokens that end an output. None: nothing is said of single tokens."""
    bias, words, allowed_ids = sampling.logit_bias, sampling.bad_words, sampling.allowed_token_ids
    if not (bias or words or allowed_ids or sampling.bad_words_token_ids or sampling.min_tokens):
        return None
    _check_count("sampling.logit_bias", len(bias), _MAX_BIASES)
    if not all(-_MOST_BIAS <= amount <= _MOST_BIAS for amount in bias.values()):  # NaN is refused, too
        raise InvalidField(f"logit_bias: -{_MOST_BIAS} to {_MOST_BIAS}", field="sampling.logit_bias", limit=_MOST_BIAS)
    _check_count("sampling.bad_words", len(words), _MAX_WORDS)
    _check_count("sampling.bad_words", sum(len(word.encode()) for word in words), _MAX_WORD_BYTES)
    _check_count("sampling.bad_words_token_ids", len(sampling.bad_words_token_ids), _MAX_WORDS)
    _check_count("sampling.allowed_token_ids", len(allowed_ids), vocab_size)
    token_array(list(bias), vocab_size, "sampling.logit_bias")
    allowed = np.unique(token_array(allowed_ids, vocab_size, "sampling.allowed_token_ids"))
    bad_words = tuple(dict.fromkeys([*_listed(sampling, vocab_size), *_spelled(sampling, text)]))
    ending_ids = frozenset(token_id for token_id in ending_ids if token_id < vocab_size)
    return TokenRules(dict(bias), allowed if len(allowed) else None, bad_words, sampling.min_tokens, ending_ids)


def _listed(sampling: pb.SamplingParams, vocab_size: int) -> Iterator[tuple[int, ...]]:
    field = "sampling.bad_words_token_ids"
    for word in sampling.bad_words_token_ids:
        if not 1 <= len(word.ids) <= _MAX_WORD_TOKENS:
            raise InvalidField(f"{field}: each of 1 to {_MAX_WORD_TOKENS} tokens", field=field, limit=_MAX_WORD_TOKENS)
        yield tuple(token_array(word.ids, vocab_size, field).tolist())


def _spelled(sampling: pb.SamplingParams, text: ModelText) -> Iterator[tuple[int, ...]]:
    """The tokens of each word where a text begins with it, and where a blank stands before it."""
    field = "sampling.bad_words"
    for word in sampling.bad_words:
        if not word.strip():
            raise InvalidField(f"{field}: none empty", field=field, limit=1)
        for written in (word, f" {word.lstrip()}"):
            yield tuple(text.encode(written, field, whole=False))


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidField(f"{field}: at most {most}, not {count}", field=field, limit=most)
