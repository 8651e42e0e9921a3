"""Beam search: which token lists go on, which have finished, and when the search is over. Pure.

Follows generate(num_beams, do_sample=False) of Hugging Face transformers, up to the order of equals. Every list with any one
token more is a candidate. The likeliest are considered, twice as many as there are beams, so that enough are left when
candidates end. A candidate that ends counts as finished if it is among the first num_beams. Finished lists are ranked by the
sum of their log probabilities over length ** length_penalty, including the token that ended them. The search is over when the
best list that goes on, at its present length, is no better than the worst of num_beams finished lists.

Candidates arrive list by list, in any order and at any time; the search moves on once every list has its candidates. A list has
a slot, 0 to num_beams - 1. Its likeliest continuation keeps the slot; its other continuations take slots that came free.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..values.request import FinishReason
from ..values.sampling_params import Branch, Candidates
from .model_text import StopRules, TextOutput


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Names are the protocol's."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(slots=True, eq=False)
class TokenList:
    """Tokens behind the prompt, the last of them here. logprob: the sum of all of them."""

    previous: "TokenList | None"
    token_id: int
    logprob: float
    length: int
    text: TextOutput | None = None  # what has been made of it, where stop strings have to be found

    def token_ids(self) -> list[int]:
        found: list[int] = []
        at = self
        while at.previous is not None:
            found.append(at.token_id)
            at = at.previous
        return found[::-1]


class Finished(NamedTuple):
    """A list that has ended, and its score."""

    tokens: TokenList
    reason: FinishReason
    score: float


def why_ends(stop: StopRules, tokens: TokenList) -> FinishReason | None:
    """Why a list ends with its last token; None: it does not. Its text goes on from the one before, where it is wanted."""
    if (reason := stop.reason(tokens.token_id)) is not None:
        return reason
    if tokens.previous is None or tokens.previous.text is None:
        return None
    tokens.text = tokens.previous.text.copy()
    _, is_stopped = tokens.text.push(tokens.token_id)
    return FinishReason.STOP if is_stopped else None


@dataclass(slots=True, eq=False)
class BeamSearch:
    """One request's search.

    Attributes:
        num_returned: lists wanted, at most num_beams.
        max_new_tokens: a list of so many ends.
        num_ending_ids: token ids that end a list.
        ends: why a list ends with its last token; None: it does not.
        text: of the empty list, where stop strings have to be found.
        num_tokens: that lists have got so far, those of lists that were given up included.
    """

    options: BeamOptions
    num_returned: int
    max_new_tokens: int
    num_ending_ids: int
    ends: Callable[[TokenList], FinishReason | None]
    text: TextOutput | None = None
    num_tokens: int = 0
    _live: dict[int, TokenList] = field(init=False)  # by slot, the likeliest first
    _candidates: dict[int, Candidates] = field(default_factory=dict)  # by slot
    _finished: list[Finished] = field(default_factory=list)  # the best first

    def __post_init__(self) -> None:
        assert 1 <= self.num_returned <= self.options.num_beams
        self._live = {0: TokenList(None, 0, 0.0, 0, self.text)}

    @property
    def num_candidates(self) -> int:
        """How many candidates of a list are looked at.

        They are so many that num_beams are left when as many end as can, by strings too.
        """
        num_beams = self.options.num_beams
        return num_beams + self.num_ending_ids + (num_beams if self.text is not None else 0)

    def take_candidates(self, slot: int, candidates: Candidates) -> list[Branch] | None:
        """What the model says of a list. The lists that go on, once that is known; none of them: the search is over."""
        self._candidates[slot] = candidates
        return self._move_on() if len(self._candidates) == len(self._live) else None

    def best(self) -> list[Finished]:
        """The best finished lists."""
        return self._finished[: self.num_returned]

    def so_far(self, reason: FinishReason) -> list[Finished]:
        """The best where it is cut short behind its first tokens: finished lists, and those that went on, with the reason."""
        going = [Finished(tokens, reason, self._score(tokens)) for tokens in self._live.values()]
        return sorted([*self._finished, *going], key=lambda finished: -finished.score)[: self.num_returned]

    def _move_on(self) -> list[Branch] | None:
        num_beams = self.options.num_beams
        going: list[tuple[int, TokenList]] = []  # with their parents' slots
        for place, (slot, tokens) in enumerate(self._likeliest()):
            reason = self.ends(tokens)
            if reason is None and tokens.length == self.max_new_tokens:
                reason = FinishReason.LENGTH
            if reason is None:
                going += [(slot, tokens)] if len(going) < num_beams else []
            elif place < num_beams:
                self._finish(tokens, reason)
            if len(going) == num_beams <= place + 1:
                break  # what is less likely neither goes on nor counts
        self._candidates.clear()
        self.num_tokens += len(going)
        if self._is_over(going[0][1] if going else None):
            return []
        return self._place(going)

    def _likeliest(self) -> list[tuple[int, TokenList]]:
        """Lists one token longer, with their parents' slots."""
        extended = [
            (-(tokens.logprob + logprob), rank, token_id, slot)
            for rank, (slot, tokens) in enumerate(self._live.items())
            for token_id, logprob in zip(*self._candidates[slot], strict=True)
        ]
        chosen = heapq.nsmallest(max(2, 1 + self.num_ending_ids) * self.options.num_beams, extended)
        live = self._live
        return [(slot, TokenList(live[slot], token_id, -cost, live[slot].length + 1)) for cost, _, token_id, slot in chosen]

    def _finish(self, tokens: TokenList, reason: FinishReason) -> None:
        """It is kept while fewer than num_beams are better."""
        self.num_tokens += 1
        self._finished.append(Finished(tokens, reason, self._score(tokens)))
        self._finished.sort(key=lambda finished: -finished.score)
        del self._finished[self.options.num_beams :]

    def _score(self, tokens: TokenList) -> float:
        return tokens.logprob / tokens.length**self.options.length_penalty

    def _is_over(self, best: TokenList | None) -> bool:
        """best: of those that go on."""
        if best is None:
            return True
        if len(self._finished) < self.options.num_beams:
            return False
        return self.options.early_stopping or self._score(best) <= self._finished[-1].score

    def _place(self, going: list[tuple[int, TokenList]]) -> list[Branch]:
        parents = {slot for slot, _ in going}
        free = iter([slot for slot in range(self.options.num_beams) if slot not in parents])
        branches = []
        for parent, tokens in going:
            slot = parent if parent in parents else next(free)
            parents.discard(parent)
            branches.append(Branch(parent, slot, tokens.token_id))
        self._live = {branch.slot: tokens for branch, (_, tokens) in zip(branches, going, strict=True)}
        return branches
