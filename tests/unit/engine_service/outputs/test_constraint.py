"""Constraints by themselves: where they end, why they allow nothing, and what they may cost."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvkeeper.engine_service.outputs.constraint import (
    Account,
    BadGrammar,
    Constraint,
    Vocabulary,
    behind_thought,
    compile_grammar,
    try_out,
    write_grammar,
)
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.engine_service.values.errors import InvalidField, TooComplex


def vocabulary(chars: str) -> Vocabulary:
    """Of a model that can spell these characters alone; its last token ends a sequence."""
    backend = tokenizers.Tokenizer(models.BPE({char: place for place, char in enumerate(chars)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Vocabulary.of(Tokenizer(backend, {}, frozenset({len(chars)})), len(chars) + 1)


def at_start(pattern: str, chars: str = "abc") -> Constraint:
    return compile_grammar(vocabulary(chars), write_grammar("regex", pattern, 1 << 16), "sampling.regex")


def allowed(constraint: Constraint) -> list[int]:
    return np.flatnonzero(constraint.allowed()).tolist()


@pytest.mark.parametrize("pattern", ["x", "ax", "abcx"])
def test_what_the_tokens_cannot_spell_is_found_before_anything_is_drawn(pattern: str) -> None:
    with pytest.raises(BadGrammar, match="no text"):
        try_out(vocabulary("abc"), write_grammar("regex", pattern, 1 << 16))


@pytest.mark.parametrize("pattern", ["(a|bx)", "(b|cx)", "a?", "a+x?"])
def test_one_way_that_can_be_spelt_is_enough(pattern: str) -> None:
    try_out(vocabulary("abc"), write_grammar("regex", pattern, 1 << 16))


def test_a_way_that_comes_to_a_dead_end_is_no_fault_of_the_service() -> None:
    constraint = at_start("(a|bx)")
    assert allowed(constraint) == [0, 1]
    other = constraint.copy()
    constraint.take_token(1)
    assert not allowed(constraint)
    assert not constraint.is_complete
    refusal = constraint.refusal()
    assert isinstance(refusal, InvalidField)
    assert refusal.metadata == {"field": "sampling.regex"}
    other.take_token(0)
    assert other.is_complete


def test_all_continuations_draw_on_one_account() -> None:
    constraint = at_start("[abc]{50}")
    account = Account(at_once_s=0.5, per_token_s=0.1)
    constraint._account = account
    first, second = constraint.copy(), constraint.copy()
    first.take_token(0)
    second.take_token(1)
    assert account.num_tokens == 2
    account.spent_s = 0.65
    assert allowed(first)
    account.spent_s = 0.75
    for each in (first, second):
        assert not allowed(each)
        assert isinstance(each.refusal(), TooComplex)


THINKING = "abx<>/"  # of which the tokens <x> and </x> are tokens of their own, and <end> ends a sequence


def with_thought(opens: str, closes: str) -> tuple[Tokenizer, Constraint]:
    backend = tokenizers.Tokenizer(models.BPE({char: place for place, char in enumerate(THINKING)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.add_tokens(["<x>", "</x>"])
    tokenizer = Tokenizer(backend, {}, frozenset({len(THINKING)}))
    grammar = behind_thought(write_grammar("regex", "ab", 1 << 16), tokenizer, opens, closes)
    return tokenizer, compile_grammar(Vocabulary.of(tokenizer, len(THINKING) + 3), grammar, "sampling.regex")


@pytest.mark.parametrize(
    ("opens", "closes", "text", "is_allowed"),
    [
        ("", "</x>", "bb<x>a</x>ab", True),
        ("", "</x>", "bb<x>a</x>b", False),  # behind the thought, it has to have the form
        ("", "</x>", "b<end>", False),  # a thought has to be closed
        ("", "</x>", "</x>ab", True),
        ("<x>", "</x>", "ab", True),
        ("<x>", "</x>", "<x>ba</x>ab", True),
        ("<x>", "</x>", "<x>ab<end>", False),
        ("<x>a", "</x>", "<x>ab</x>ab", True),
        ("<x>a", "</x>", "<x>b", False),
        ("<x>", "</x>", "b", False),  # without a thought, it has to have the form at once
        ("", "/b/", "aaa/b/ab", True),  # a text that no token spells
        ("", "/b/", "aaa/b/bb", False),
        ("/a/", "/b/", "/a/bb/b/ab", True),
        ("/a/", "/b/", "ab", True),
        ("/a/", "/b/", "bb/b/ab", False),
    ],
)
def test_what_a_constraint_is_about_comes_behind_a_thought(opens: str, closes: str, text: str, is_allowed: bool) -> None:
    tokenizer, constraint = with_thought(opens, closes)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if not constraint.allowed()[token_id]:
            assert not is_allowed
            return
        constraint.take_token(token_id)
    assert is_allowed and constraint.is_complete
