"""What passes between the model, a beam search and the scheduler: candidates for a list's next token, and branches. Pure."""

from typing import NamedTuple


class Candidates(NamedTuple):
    """A list's likeliest next tokens and their log probabilities, the likeliest first."""

    token_ids: list[int]
    logprobs: list[float]


class Branch(NamedTuple):
    """The list in `slot` is from now on the one that was in `parent`, and this token behind it."""

    parent: int
    slot: int
    token_id: int
