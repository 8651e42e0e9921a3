"""A scheduler world with beam searches in it, and a naive search to compare with.

What the "model" says of a token list is a function of the whole list, so that a list that was taken for another one shows.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkeeper.engine_service.outputs.beam_search import BeamOptions, BeamSearch, TokenList
from kvkeeper.engine_service.values.request import FinishReason, Request, SequenceState
from kvkeeper.engine_service.values.sampling_params import Candidates
from tests.support.worlds.scheduler_world import Flight, World

NUM_CHOICES = 7
EOS = 0


def logprobs_of(tokens: tuple[int, ...]) -> list[float]:
    """Of each possible next token."""
    dice = random.Random(repr(tokens))
    weights = [dice.random() + 0.02 for _ in range(NUM_CHOICES)]
    return [math.log(weight / sum(weights)) for weight in weights]


def candidates_of(tokens: tuple[int, ...], count: int) -> Candidates:
    logprobs = logprobs_of(tokens)
    best = sorted(range(NUM_CHOICES), key=lambda token: -logprobs[token])[:count]
    return Candidates(best, [logprobs[token] for token in best])


def ends(tokens: TokenList) -> FinishReason | None:
    return FinishReason.END_OF_SEQUENCE if tokens.token_id == EOS else None


@dataclass(frozen=True)
class Told:
    """One list that a search gives."""

    tokens: tuple[int, ...]
    logprob: float


def naive_search(prompt: tuple[int, ...], options: BeamOptions, num_returned: int, max_new: int) -> list[Told]:
    """All lists times all tokens, in one place and with no cache."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, float, tuple[int, ...]]] = []
    for length in range(1, max_new + 1):
        extended = sorted(
            (-(total + logprob), (*tokens, token))
            for total, tokens in live
            for token, logprob in enumerate(logprobs_of(prompt + tokens))
        )[: 2 * options.num_beams]
        live = []
        for place, (cost, tokens) in enumerate(extended):
            if tokens[-1] != EOS and length < max_new:
                live.append((-cost, tokens))
            elif place < options.num_beams:
                finished.append((cost / length**options.length_penalty, -cost, tokens))
        live = live[: options.num_beams]
        finished = sorted(finished)[: options.num_beams]
        if not live:
            break
        is_full = len(finished) == options.num_beams
        if is_full and (options.early_stopping or live[0][0] / length**options.length_penalty <= -finished[-1][0]):
            break
    return [Told(tokens, total) for _, total, tokens in finished[:num_returned]]


class BeamWorld(World):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.searches: dict[Request, BeamSearch] = {}
        self.num_candidates_taken = 0

    def submit_search(
        self, prompt: list[int], max_new: int, options: BeamOptions, num_returned: int = 1, priority: int = 0
    ) -> Request:
        num_beams = options.num_beams
        assert num_beams <= self.limits.num_rows, "the engine refuses it"
        tokens = np.array(prompt, np.int32)
        request = Request("s", tokens, max_new, n=num_returned, num_beams=num_beams, priority=priority)
        self.searches[request] = BeamSearch(options, num_returned, max_new, 1, ends)
        return self.submit(request)

    def check_searches(self) -> None:
        """Those that were not cancelled gave what a naive search gives."""
        for request, search in self.searches.items():
            if request in self.cancelled:
                continue
            expected = naive_search(tuple(request.prompt.tolist()), search.options, search.num_returned, request.max_new_tokens)
            found = [Told(tuple(each.tokens.token_ids()), each.tokens.logprob) for each in search.best()]
            assert [told.tokens for told in found] == [told.tokens for told in expected]
            assert all(abs(one.logprob - other.logprob) < 1e-9 for one, other in zip(found, expected, strict=True))

    def _finish(self, flight: Flight) -> None:
        super()._finish(flight)
        work = flight.work
        for sequence in work.searched:
            if sequence.state is SequenceState.ENDED:
                continue  # it was cancelled while this was computed
            search, tokens = self.searches[sequence.request], self._tokens(sequence)
            self.num_candidates_taken += 1
            branches = search.take_candidates(sequence.index, candidates_of(tokens, search.num_candidates))
            if branches:
                self.scheduler.branch(sequence.request, branches)
            elif branches is not None:
                for other in sequence.request.sequences:
                    if other.state is not SequenceState.ENDED:
                        self.scheduler.end_sequence(other)
