"""Output chunks: what a request's client is told, value by value. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from .errors import EngineError
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

    def by_name(self) -> dict[str, int]:
        """The counts by name. Written out: asdict takes 30 times as long, and each request has this done at its end."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": self.new_tokens,
            "copied_blocks": self.copied_blocks,
            "num_preemptions": self.num_preemptions,
        }


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A part of one continuation's output. finish_reason is set on its last, usage on the request's last."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens from the second on, with its first chunk
    cumulative_logprob: float | None = None  # with the last, of continuations that were ranked


Send = Callable[[OutputChunk | EngineError], None]  # takes the output of a request, chunk by chunk, or the error that ends it


def joined(chunks: Sequence[OutputChunk]) -> OutputChunk:
    """All chunks of one continuation as one, with the last one's end."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        prompt_logprobs=tuple(chain.from_iterable(chunk.prompt_logprobs for chunk in chunks)),
    )


def coalesce(chunks: Sequence[OutputChunk]) -> list[OutputChunk]:
    """The same chunks in fewer: neighbours of one continuation become one. For a reader that is behind the loop."""
    runs: list[list[OutputChunk]] = []
    for chunk in chunks:
        if runs and runs[-1][-1].index == chunk.index:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return [joined(run) if len(run) > 1 else run[0] for run in runs]
