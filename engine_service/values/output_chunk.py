"""Pieces: what a request's client is told, value by value. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from .request import FinishReason
from .token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request that ended; names are the protocol's."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    copied_blocks: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of one continuation. finish_reason is set on its last, usage on the request's last."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens from the second on, with its first piece
    cumulative_logprob: float | None = None  # with the last, of continuations that were ranked


def joined(pieces: Sequence[OutputChunk]) -> OutputChunk:
    """All pieces of one continuation as one, with the last one's end."""
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        prompt_logprobs=tuple(chain.from_iterable(piece.prompt_logprobs for piece in pieces)),
    )


def coalesce(pieces: Sequence[OutputChunk]) -> list[OutputChunk]:
    """The same pieces in fewer: neighbours of one continuation become one. For a reader that is behind the loop."""
    runs: list[list[OutputChunk]] = []
    for piece in pieces:
        if runs and runs[-1][-1].index == piece.index:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [joined(run) if len(run) > 1 else run[0] for run in runs]
