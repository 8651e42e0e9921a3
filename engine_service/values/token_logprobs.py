"""TokenLogprobs: what is returned about one position's token, as the model's own distribution has it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one position; names are the protocol's. rank 1 is the likeliest; equals share the better rank."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
