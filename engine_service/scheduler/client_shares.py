"""Shares of clients in the time of steps.

Of decodes: the many sequences of one client do not make the few of another slow. A step costs a fixed time and some for each
sequence, as measured of late. Rule: a step takes no longer than its clients would, one after the other, if each decoded as many
as the client with the fewest. So a client with one sequence among K clients is slowed to a K-th at most. On a device where
sequences cost next to nothing beside the fixed time, that leaves out none. What is left after the small clients is shared
equally, and a client's sequences take turns.

Of prompts: those of one client leave the streams of another half of the time. A step that computes prompts takes longer than
its decodes alone. Rule: that time is a debt of the clients of the prompts, and each step pays as much of every debt as its
decodes take. While another client decodes, a client in debt waits with its prompts. So beside the prompts of one other client,
streams are slowed to half, on average, however many prompts wait; and no client's prompts wait for good. A client out of debt
gets as many prompts and prompt tokens into a step as one step pays, as measured of late, and one prompt and a few tokens at
least. Pure.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_FADING = 0.02
_LEAST_OF_MEAN = 0.25
_LEAST_SPREAD = 0.5  # of the numbers of tokens, as a variance: below it, no slope can be determined
_PROMPT_FADING = 0.9  # of what is measured, with each step that computes prompts
_MOST_STEPS = 256  # that a debt lasts
_LEAST_TOKENS = 64  # fewer at a time would cost little less, but where
_MOST_DECODES = 2  # the step's decodes so often take less time than they: behind a long context each token costs much
_FEWEST_TOKENS = 8


class DecodeCosts:
    """What a step costs that decodes, with few tokens of prompts: a line through recent ones, older ones fade."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_tokens = self._mean_seconds = 0.0
        self._spread = self._covariance = 0.0
        self._largest = 0.0  # of recent steps

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step was computed with so many tokens."""
        self._weight += _FADING * (1 - self._weight)
        rate = _FADING / self._weight
        tokens_off, seconds_off = num_tokens - self._mean_tokens, seconds - self._mean_seconds
        self._mean_tokens += rate * tokens_off
        self._mean_seconds += rate * seconds_off
        self._spread += rate * ((1 - rate) * tokens_off**2 - self._spread)
        self._covariance += rate * ((1 - rate) * tokens_off * seconds_off - self._covariance)
        self._largest = max(num_tokens, (1 - _FADING) * self._largest)

    def estimate_seconds(self, num_tokens: int) -> float | None:
        """What a step with so many tokens costs, and no more than recent ones on average; None: not known.

        Little is known of steps far from recent ones: where times vary, the line's end may point anywhere.
        """
        if not self._weight:
            return None
        mean = self._mean_seconds
        if self._spread < _LEAST_SPREAD:
            return mean
        line = mean + self._covariance / self._spread * (num_tokens - self._mean_tokens)
        return min(max(line, mean * _LEAST_OF_MEAN), mean)

    @property
    def fixed_sequences(self) -> float | None:
        """How many sequences cost as much as the fixed time; None before the first step.

        Twice as many as ran together of late where their price does not show: steps grow no faster than can be measured.
        """
        if self._spread < _LEAST_SPREAD or self._covariance <= 0:
            return 2 * self._largest if self._weight else None
        each = self._covariance / self._spread
        fixed = self._mean_seconds - each * self._mean_tokens
        return max(fixed / each, 0.0)


def most_decodes(counts: npt.NDArray[np.intp], fixed_sequences: float) -> int:
    """Sequences that a step may decode, so that it takes no longer than its clients one after the other; counts: of each."""
    num_clients = len(counts)
    return int(num_clients * counts.min() + (num_clients - 1) * fixed_sequences)


def equal_shares(counts: npt.NDArray[np.intp], most: int) -> npt.NDArray[np.intp]:
    """Shares of `most`, no larger than counts: small ones whole, the others equal within one. most is at least one for each."""
    shares = np.zeros_like(counts)
    left, order = most, np.argsort(counts, kind="stable")
    for place, client in enumerate(order.tolist()):
        shares[client] = min(counts[client], left // (len(order) - place))
        left -= int(shares[client])
    return shares


def out_of_share(clients: npt.NDArray[np.int32], fixed_sequences: float, turn: int) -> npt.NDArray[np.intp]:
    """Places in clients, the client of each sequence that could decode, of those that wait in this turn."""
    names, of_sequence, counts = np.unique(clients, return_inverse=True, return_counts=True)
    if len(names) < 2 or (most := most_decodes(counts, fixed_sequences)) >= len(clients):
        return np.empty(0, np.intp)
    waiting = []
    for client, share in enumerate(equal_shares(counts, most).tolist()):
        if share < counts[client]:
            places = np.flatnonzero(of_sequence == client)
            waiting.append(np.roll(places, -share * turn % len(places))[share:])
    return np.concatenate(waiting)


@dataclass(slots=True)
class _Room:
    """For one client's prompts in a step."""

    num_prompts: int
    num_tokens: int


class PromptShares:
    """The debts, and what prompts cost."""

    def __init__(self) -> None:
        self._debts: dict[str, float] = {}  # seconds, of each client in debt
        self._seconds = self._num_prompts = self._num_tokens = 0.0  # recent sums

    def note(self, seconds: float, decode_seconds: float, prompts: Counter[str], num_tokens: int) -> None:
        """A step took so many seconds, and its decodes alone would have taken decode_seconds.

        prompts: of each client, the sequences that the step computed prompt tokens of; num_tokens: all of these tokens.
        """
        if num_prompts := prompts.total():
            extra = max(seconds - decode_seconds, 0.0)
            self._seconds = _PROMPT_FADING * self._seconds + extra
            self._num_prompts = _PROMPT_FADING * self._num_prompts + num_prompts
            self._num_tokens = _PROMPT_FADING * self._num_tokens + num_tokens
            for client, num in prompts.items():
                debt = self._debts.get(client, 0.0) + extra * num / num_prompts
                self._debts[client] = min(debt, _MOST_STEPS * decode_seconds)
        self._debts = {client: left for client, debt in self._debts.items() if (left := debt - decode_seconds) > 0}

    def get_room(self, client: str, decode_seconds: float) -> _Room:
        """What the next step has for a client's prompts, beside the decodes of other clients."""
        if client in self._debts:
            return _Room(0, 0)
        if not self._seconds:
            return _Room(1, _LEAST_TOKENS)
        paid = decode_seconds / self._seconds
        num_tokens = paid * self._num_tokens
        least = min(_LEAST_TOKENS, max(_FEWEST_TOKENS, _MOST_DECODES * num_tokens))
        return _Room(max(1, int(paid * self._num_prompts)), int(max(least, num_tokens)))


class PromptRoom:
    """What one step has left for the prompts of each client."""

    def __init__(self, shares: PromptShares, decode_seconds: float, decoding: set[str]) -> None:
        """decoding: the clients of the step's decodes."""
        self._shares, self._decode_seconds, self._decoding = shares, decode_seconds, decoding
        self._left: dict[str, _Room] = {}

    def take(self, client: str, num_tokens: int) -> int:
        """Take room for a prompt of the client. How many of its tokens the step may compute; 0: no room is left."""
        if self._decoding <= {client}:
            return num_tokens  # no other client waits for them
        if (left := self._left.get(client)) is None:
            left = self._left[client] = self._shares.get_room(client, self._decode_seconds)
        taken = min(num_tokens, left.num_tokens) if left.num_prompts else 0
        left.num_prompts -= taken > 0
        left.num_tokens -= taken
        return taken
