"""Shares of clients in a step: where several clients decode, the many sequences of one do not make the few of another slow.

A step costs a fixed time and some for each sequence, as measured of late. Rule: a step takes no longer than its clients would,
one after the other, if each decoded as many as the client with the fewest. So a client with one sequence among K clients is
slowed to a K-th at most. On a device where sequences cost next to nothing beside the fixed time, that leaves out none. What is
left after the small clients is shared equally, and a client's sequences take turns. Pure.
"""

import numpy as np
import numpy.typing as npt

_FADING = 0.02
_LEAST_OF_MEAN = 0.25
_LEAST_SPREAD = 0.5  # of the numbers of tokens, as a variance: below it, no slope can be told


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

    def seconds_of(self, num_tokens: int) -> float | None:
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

        Twice as many as ran together of late where their price does not show: steps grow no faster than it can be told.
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
