"""Speculator: decides for which sequences tokens are guessed, and learns from the outcome.

It is asked before each step for guesses for the sequences that decode; after the step it is given what was kept. Guessing is
left to a Proposer; whether it pays is guess_control.py's to know. Sequences under a constraint are left alone: their masks are
made token by token.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import numpy as np
import structlog

from ..scheduler.plan import NewTokens, Work
from ..scheduler.running import RunningSequences
from ..values.request import Int32Array, Sequence
from .guess_control import LookAhead, Switch, look_up

log = structlog.get_logger()


class Proposer(Protocol):
    """Guesses. Called for all sequences of a step at once; in the worker thread where it is slow."""

    is_slow: bool

    def propose(self, histories: Mapping[int, Int32Array], most: Mapping[int, int]) -> dict[int, Int32Array]:
        """Up to most[row] tokens, by row, that may follow histories[row]; rows without a guess are left out."""


class PromptLookUp:
    """Guesses the tokens that followed the same tokens earlier."""

    is_slow = False

    def propose(self, histories: Mapping[int, Int32Array], most: Mapping[int, int]) -> dict[int, Int32Array]:
        """See Proposer."""
        found = {row: look_up(history, most[row]) for row, history in histories.items()}
        return {row: guess for row, guess in found.items() if len(guess)}


class Speculator:
    """Asks for guesses and learns from them. may_guess says of a sequence whether its next tokens may be guessed."""

    def __init__(self, proposer: Proposer, may_guess: Callable[[Sequence], bool]) -> None:
        self.switch = Switch()
        self._proposer = proposer
        self._may_guess = may_guess
        self._ahead: weakref.WeakKeyDictionary[Sequence, LookAhead] = weakref.WeakKeyDictionary()

    @property
    def is_slow(self) -> bool:
        return self._proposer.is_slow

    def wants_to_guess(self, running: RunningSequences) -> bool:
        """Whether ask may have a call, as far as that can be said before the step that is computed has ended."""
        return bool(self._most(running))

    def ask(self, running: RunningSequences) -> Callable[[], dict[int, Int32Array]] | None:
        """A call that returns guesses by row, for the running sequences that compute one token now; None: none is wanted.

        The call reads the sequences' tokens, which must not grow meanwhile.
        """
        most = self._most(running)
        histories = {row: running.tokens[row, : running.num_tokens[row]] for row in most}
        return partial(self._propose, histories, most) if most else None

    def _propose(self, histories: Mapping[int, Int32Array], most: Mapping[int, int]) -> dict[int, Int32Array]:
        """Guesses save time and decide nothing: if the proposer fails, the step goes on without them."""
        try:
            return self._proposer.propose(histories, most)
        except Exception:
            log.exception("guessing_failed")
            return {}

    def _most(self, running: RunningSequences) -> dict[int, int]:
        """How many tokens to guess, by row; rows for which none are wanted now are left out."""
        most: dict[int, int] = {}
        if not self.switch.is_on:
            return most
        live = running.live
        decoding = live[running.num_tokens[live] - running.num_computed[live] == 1]
        for row, sequence in zip(decoding.tolist(), running.at(decoding), strict=True):
            if sequence.num_output and self._may_guess(sequence):
                ahead = self._ahead.setdefault(sequence, LookAhead())
                if count := ahead.most(sequence.num_output):
                    most[row] = count
        return most

    def note(self, work: Work, taken: NewTokens, seconds: float, *, was_guessing: bool) -> None:
        """A step is done; taken are the tokens that each of work.sampled got.

        seconds: it took, with what nothing was computed before it. was_guessing: it waited for the step before, for guesses.
        """
        num_guessed = num_kept = 0
        for sequence, guesses, token_ids in zip(work.sampled, work.guesses, taken, strict=True):
            if len(guesses):
                num_guessed += len(guesses)
                num_kept += len(token_ids) - 1
                if (ahead := self._ahead.get(sequence)) is not None:
                    ahead.note(len(guesses), len(token_ids) - 1, sequence.num_output)
        if not work.num_prompt_tokens:  # the cost of prompts would hide the difference
            num_tokens = int(np.sum([len(some) for some in taken], dtype=np.int64))
            self.switch.note(num_guessed, num_kept, num_tokens, seconds, was_guessing=was_guessing)
