"""What passes between a beam search, the model and the scheduler: rows, candidates for a list's next token, branches. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from .sampling_params import SamplingRow


@dataclass(frozen=True, slots=True, eq=False)
class SearchRow:
    """One list: its parameters and tokens, and how many candidates are wanted."""

    row: SamplingRow
    num_candidates: int


class Candidates(NamedTuple):
    """A list's likeliest next tokens and their log probabilities, the likeliest first."""

    token_ids: list[int]
    logprobs: list[float]


class Branch(NamedTuple):
    """The list in `slot` is from now on the one that was in `parent`, and this token behind it."""

    parent: int
    slot: int
    token_id: int
