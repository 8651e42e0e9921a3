"""Shares of clients in the time for prompts: the prompts of one client leave the streams of another half of the time.

A step that computes prompts takes longer than its decodes alone. Rule: that time is a debt of the clients of the prompts, and
each step pays as much of every debt as its decodes take. While another client decodes, a client in debt waits with its prompts.
So beside the prompts of one other client, streams are slowed to half, on average, however many prompts wait; and no client's
prompts wait for good. A client out of debt gets as many prompts and prompt tokens into a step as one step pays, as measured of
late, and one prompt and a few tokens at least. Pure.
"""

from collections import Counter
from dataclasses import dataclass

_FADING = 0.9  # of what is measured, with each step that computes prompts
_MOST_STEPS = 256  # that a debt lasts
_LEAST_TOKENS = 64  # fewer at a time would cost little less, but where
_MOST_DECODES = 2  # the step's decodes so often take less time than they: behind a long context each token costs much
_FEWEST_TOKENS = 8


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
            self._seconds = _FADING * self._seconds + extra
            self._num_prompts = _FADING * self._num_prompts + num_prompts
            self._num_tokens = _FADING * self._num_tokens + num_tokens
            for client, num in prompts.items():
                debt = self._debts.get(client, 0.0) + extra * num / num_prompts
                self._debts[client] = min(debt, _MOST_STEPS * decode_seconds)
        self._debts = {client: left for client, debt in self._debts.items() if (left := debt - decode_seconds) > 0}

    def room_of(self, client: str, decode_seconds: float) -> _Room:
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
            left = self._left[client] = self._shares.room_of(client, self._decode_seconds)
        taken = min(num_tokens, left.num_tokens) if left.num_prompts else 0
        left.num_prompts -= taken > 0
        left.num_tokens -= taken
        return taken
