"""Speculator: decides for which sequences tokens are guessed, and learns from the outcome.

It is asked before each step for guesses for the sequences that decode; after the step it is given what was kept. Guessing is
left to a Proposer. Sequences under a constraint are left alone: their masks are made token by token.

Acceptance is exact by construction. The token at a position is a function of its logits and of (seed, continuation, position);
so each guessed position is sampled as it would have been, a guess is kept while it equals what was drawn, and the first draw
that differs ends the run. Output with and without speculation is the same token for token, and a guess is accepted with
the model's own probability of it, which for a guess without randomness is all that rejection sampling can give
(arXiv 2211.17192). Prompt look-up (arXiv 2304.04487 calls it inference with reference) guesses what followed the last tokens
earlier in prompt and output.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import structlog

from ..scheduler.plan import NewTokens, Work
from ..scheduler.running import RunningSequences
from ..values.request import Int32Array, Sequence

LEAST_AHEAD, MOST_AHEAD, FIRST_AHEAD = 2, 8, 4
_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2
_PATIENCE = 4  # runs without a kept guess before a request stops guessing for a while
_REST_TOKENS = 32  # that it then generates plainly
_SMOOTHING = 0.05  # so that a stretch without matches is not yet a change of mind
_TRIAL_STEPS = 8  # of each kind before they are compared, and again each time the losing kind gets another chance
_CHECK_EVERY = 256  # steps
_LEAST_GAIN = 0.95  # so that noise does not count as one
_MOST_OF_USUAL = 2.0  # a step many times as long as the usual one says more about the machine than about guessing


def look_up(history: Int32Array, most: int) -> Int32Array:
    """[up to most] tokens that followed the latest earlier occurrence of the history's end; empty where there is none."""
    length = len(history)
    for width in range(min(_LONGEST_MATCH, length - 1), _SHORTEST_MATCH - 1, -1):
        end = history[length - width :]
        starts = np.flatnonzero(history[: length - width] == end[0])
        for offset in range(1, width):
            starts = starts[history[starts + offset] == end[offset]]
        if len(starts):
            after = int(starts[-1]) + width
            return history[after : after + most]
    return history[:0]


@dataclass(slots=True)
class LookAhead:
    """How many tokens one sequence guesses: more while guesses are kept, fewer when they are not, and none for a while."""

    num_ahead: int = FIRST_AHEAD
    num_failed: int = 0  # runs in a row without a kept guess
    rests_until: int = 0  # length of the output

    def most(self, num_output: int) -> int:
        """Guesses that are worth making now."""
        return 0 if num_output < self.rests_until else self.num_ahead

    def note(self, num_guessed: int, num_kept: int, num_output: int) -> None:
        """Note the outcome of a run of guesses."""
        if num_kept == num_guessed:
            self.num_ahead = min(self.num_ahead + 2, MOST_AHEAD)
        elif num_kept * 2 < num_guessed:
            self.num_ahead = max(self.num_ahead - 1, LEAST_AHEAD)
        self.num_failed = 0 if num_kept else self.num_failed + 1
        if self.num_failed == _PATIENCE:
            self.num_failed, self.rests_until = 0, num_output + _REST_TOKENS


@dataclass(slots=True)
class _Pace:
    """Seconds and tokens of the usual step, each smoothed by itself: a mean of their quotients would belittle long runs."""

    seconds: float = 0.0
    num_tokens: float = 0.0
    num_steps: int = 0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens

    def note_step(self, seconds: float, num_tokens: int) -> None:
        if self.num_steps >= _TRIAL_STEPS:
            seconds = min(seconds, _MOST_OF_USUAL * self.seconds)
        self.num_steps += 1
        share = max(_SMOOTHING, 1 / self.num_steps)
        self.seconds += share * (seconds - self.seconds)
        self.num_tokens += share * (num_tokens - self.num_tokens)


@dataclass(slots=True)
class Switch:
    """Whether guessing pays: the measured time per token of steps that wait for guesses against that of steps that do not.

    A step that waited and got no guess counts among the former: its wait is the price of looking. Both are tried for
    a few steps, the better one is kept, and the other gets another chance every few hundred steps, because the answer depends
    on how many sequences run and on what they say.
    """

    num_guessed: int = 0
    num_kept: int = 0
    _with: _Pace = field(default_factory=_Pace)
    _without: _Pace = field(default_factory=_Pace)
    _num_steps: int = 0

    @property
    def is_on(self) -> bool:
        """Whether the next step should guess."""
        if self._with.num_steps < _TRIAL_STEPS:
            return True
        if self._without.num_steps < _TRIAL_STEPS:
            return False
        return self._pays

    @property
    def _pays(self) -> bool:
        return self._with.seconds_per_token < _LEAST_GAIN * self._without.seconds_per_token

    @property
    def acceptance_rate(self) -> float:
        """Kept guesses over guesses made; 0 before the first."""
        return self.num_kept / self.num_guessed if self.num_guessed else 0.0

    def note(self, num_guessed: int, num_kept: int, num_tokens: int, seconds: float, *, was_guessing: bool) -> None:
        """Note a step that only decoded: its guesses, kept guesses, tokens, seconds, and whether it waited for guesses."""
        self._num_steps += 1
        self.num_guessed += num_guessed
        self.num_kept += num_kept
        if num_tokens:
            (self._with if was_guessing else self._without).note_step(seconds, num_tokens)
        if self._num_steps % _CHECK_EVERY == 0 and min(self._with.num_steps, self._without.num_steps) >= _TRIAL_STEPS:
            (self._without if self._pays else self._with).num_steps = 0  # another trial, of which alone it is judged


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
